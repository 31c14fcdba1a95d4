"""Rollouts: many environments on one engine, each conversation at its own pace, tokens recorded as they come. Sampled
ids enter the sample with mask 1, ids of prompts and tool results with mask 0; no text is tokenized twice. If a chat
template does not extend the conversation so far, a new sample begins with the whole new prompt."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Protocol

from emailrl.engines.base import Completion, Engine, LocalEngine, Request, SamplingParams
from emailrl.ranks import Activity
from emailrl.records.trajectory import Message, Scenario, StopReason, TokenSample, Trajectory, Turn

if TYPE_CHECKING:
    from emailrl.agent.mail_env import StepResult
    from emailrl.engines.renderer import ChatRenderer


class Environment(Protocol):
    """One rollout of one scenario. Its ``rubric`` (a dict or a dataclass), ``final_answer`` and ``final_sources`` are
    read if it has them."""

    scenario: Scenario

    def start(self) -> list[Message]:
        """The first messages."""

    def step(self, message: Message) -> StepResult:
        """Process the assistant's message."""


def run(
    environments: Sequence[Environment],
    engine: Engine,
    renderer: ChatRenderer | None,
    sampling: SamplingParams,
    *,
    seeds: Sequence[int],
    trajectories: Sequence[Trajectory] | None = None,
    progress: Callable[[Trajectory], None] | None = None,
    stale_allowed: bool = False,
    activity: Activity | None = None,
) -> list[Trajectory]:
    """Play every environment to its end; returns one trajectory per environment, in order. ``seeds`` has one seed for
    each environment; turn ``t`` samples with a seed derived from it. ``trajectories`` (empty, with ids and metadata)
    are filled in place; by default new ones are created. ``renderer`` is None for chat engines, whose trajectories have
    no samples. ``progress`` is called with each trajectory as it ends. If the weights change between two turns, the
    trajectory ends with an exception, or continues with ``stale_allowed``; either way, turns whose weights differ from
    the first turn's are counted (``rubric["stale_turns"]``). ``activity`` gets every turn, and every step of a local
    engine, so that others can tell whether rollouts hang; requests to a server have time limits of their own. An
    exception inside an environment, or an engine's error for one request, ends only that trajectory and is recorded in
    its ``exception``; other engine exceptions and KeyboardInterrupt propagate."""
    if trajectories is None:
        scenarios = [environment.scenario for environment in environments]
        trajectories = [Trajectory(f"{number:06d}", one.id, one) for number, one in enumerate(scenarios)]
    rollouts = {
        trajectory.id: _Rollout(environment, renderer, sampling, seed, trajectory, progress, stale_allowed)
        for environment, seed, trajectory in zip(environments, seeds, trajectories, strict=True)
    }
    if len(rollouts) != len(environments):
        raise ValueError("two trajectories have the same id")
    first = [request for rollout in rollouts.values() if (request := rollout.advance(None)) is not None]
    activity = activity or Activity()

    def note_sampling() -> None:
        if isinstance(engine, LocalEngine):
            activity.note("sampling", lambda: engine.steps)
        else:
            activity.end()

    def advance(completion: Completion) -> Request | None:
        activity.note(f"in the environment of {completion.trajectory_id}")
        following = rollouts[completion.trajectory_id].advance(completion)
        note_sampling()
        return following

    note_sampling()
    try:
        engine.generate(first, advance)
    except BaseException:
        activity.end()
        raise
    return list(trajectories)


class StaleSpanError(RuntimeError):
    """The turns of a trajectory were sampled by different weights."""


def derive_seed(*parts: object) -> int:
    """A 63-bit seed derived from the draw's identity alone, not from order, batch or process."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@dataclass(slots=True)
class _Rollout:
    """An environment and its conversation."""

    environment: Environment
    renderer: ChatRenderer | None
    sampling: SamplingParams
    seed: int
    trajectory: Trajectory
    progress: Callable[[Trajectory], None] | None
    stale_allowed: bool
    stale_turns: int = 0
    text: str = ""

    def advance(self, completion: Completion | None) -> Request | None:
        """Begin (None) or process a completion; returns the next request, None when the trajectory is over."""
        trajectory = self.trajectory
        try:
            if completion is None:
                trajectory.messages += self.environment.start()
            if completion is None or self._play(completion):
                ids = [] if self.renderer is None else self._prompt(self.renderer, completion)
                seed = derive_seed(self.seed, len(trajectory.turns))
                return Request(trajectory.id, self.sampling, ids, list(trajectory.messages), seed)
        except Exception as error:
            trajectory.exception, trajectory.stop_reason = f"{type(error).__name__}: {error}", StopReason.EXCEPTION
        self._finish()
        return None

    def _play(self, completion: Completion) -> bool:
        """Record a completion and have the environment reply; False when the trajectory is over."""
        trajectory = self.trajectory
        if completion.error is not None:
            trajectory.exception, trajectory.stop_reason = completion.error, StopReason.EXCEPTION
            return False
        stamp = completion.policy_version, completion.adapter_sha256
        if not trajectory.turns:
            trajectory.policy_version, trajectory.adapter_sha256 = stamp
        elif stamp != (trajectory.policy_version, trajectory.adapter_sha256):
            self.stale_turns += 1
            if not self.stale_allowed:
                changed = f"from {trajectory.policy_version} to {completion.policy_version}"
                raise StaleSpanError(f"the policy changed {changed} mid-trajectory")
        turn = Turn(
            completion.token_ids,
            completion.logprobs,
            completion.finish_reason,
            seconds=completion.seconds,
            prompt_tokens=completion.prompt_tokens,
            completion_tokens=completion.num_tokens,
            cost=completion.cost,
            policy_version=completion.policy_version,
            adapter_sha256=completion.adapter_sha256,
        )
        trajectory.turns.append(turn)
        if self.renderer is not None:
            trajectory.samples[-1].append_sampled(completion.token_ids, completion.logprobs)
            message = self.renderer.parse(completion.token_ids)
        elif completion.message is not None:
            message = completion.message
        else:
            raise RuntimeError("the engine returned neither a message nor anything to render it with")
        trajectory.messages.append(message)
        if completion.finish_reason == "length":
            trajectory.stop_reason = StopReason.TRUNCATED
            return False
        before = time.perf_counter()
        result = self.environment.step(message)
        turn.tool_seconds = time.perf_counter() - before
        turn.tool_name, turn.tool_args, turn.tool_result = result.tool_name, result.tool_args, result.tool_result
        trajectory.messages += result.messages
        if result.done:
            trajectory.stop_reason = result.stop_reason
        return not result.done

    def _prompt(self, renderer: ChatRenderer, completion: Completion | None) -> list[int]:
        """The ids of the next prompt. Those that were not sampled are added to the sample, or begin a new one."""
        trajectory = self.trajectory
        if completion is None:
            rendered = renderer.start(trajectory.messages)
        else:
            rendered = renderer.extend(self.text + renderer.text_of(completion.token_ids), trajectory.messages)
        self.text = rendered.text
        if completion is None or not rendered.extends:
            trajectory.samples.append(TokenSample())
        trajectory.samples[-1].append_prompt(rendered.ids)
        return list(trajectory.samples[-1].token_ids)

    def _finish(self) -> None:
        """Copy the environment's verdict and report the trajectory."""
        trajectory = self.trajectory
        rubric = getattr(self.environment, "rubric", None) or {}
        trajectory.rubric = dict(rubric) if isinstance(rubric, dict) else asdict(rubric)
        if self.stale_turns:
            trajectory.rubric["stale_turns"] = self.stale_turns
        trajectory.rubric["prompt_tokens"] = sum(turn.prompt_tokens for turn in trajectory.turns)
        trajectory.rubric["completion_tokens"] = sum(turn.completion_tokens for turn in trajectory.turns)
        trajectory.final_answer = getattr(self.environment, "final_answer", None)
        trajectory.final_sources = list(getattr(self.environment, "final_sources", ()))
        # Exclude the time it waited for a free row in the engine, which says nothing about the policy.
        trajectory.seconds = sum(turn.seconds + turn.tool_seconds for turn in trajectory.turns)
        if self.progress is not None:
            self.progress(trajectory)
