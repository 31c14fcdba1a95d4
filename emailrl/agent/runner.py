"""Rollouts: many environments on one engine, each conversation at its own pace.

The runner records each conversation's tokens as they are produced. Sampled ids enter the sample with mask 1, ids of
prompts and tool results with mask 0; no text is tokenized twice. If a chat template does not extend the conversation so
far, a new sample begins with the whole new prompt.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Protocol

from emailrl.engines.base import Completion, Engine, Request, SamplingParams
from emailrl.records.trajectory import Message, Scenario, StopReason, TokenSample, Trajectory, Turn

if TYPE_CHECKING:
    from emailrl.agent.mail_env import StepResult
    from emailrl.engines.renderer import ChatRenderer


class Environment(Protocol):
    """One rollout of one scenario. Its ``rubric`` (a dict or a dataclass), ``final_answer``
    and ``final_sources`` are read if it has them."""

    scenario: Scenario

    def start(self) -> list[Message]:
        """The first messages."""
        ...

    def step(self, message: Message) -> StepResult:
        """Process the assistant's message."""
        ...


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
) -> list[Trajectory]:
    """Play every environment to its end; returns one trajectory per environment, in order.

    ``seeds`` has one seed for each environment; turn ``t`` samples with a seed derived from it. ``trajectories``
    (empty, with ids and metadata) are filled in place; by default new ones are created. ``renderer`` is None for chat
    engines, whose trajectories have no samples. ``progress`` is called with each trajectory as it ends. If the weights
    change between two turns, the trajectory ends with an exception, or continues with ``stale_allowed``; either way,
    turns whose weights differ from the first turn's are counted (``rubric["stale_turns"]``).

    An exception inside an environment, or an engine's error for one request, ends only that trajectory and is recorded
    in its ``exception``; other engine exceptions and KeyboardInterrupt propagate.
    """
    if trajectories is None:
        trajectories = [
            Trajectory(f"{number:06d}", environment.scenario.id, environment.scenario)
            for number, environment in enumerate(environments)
        ]
    rollouts = {
        trajectory.id: _Rollout(environment, renderer, sampling, seed, trajectory, progress, stale_allowed)
        for environment, seed, trajectory in zip(environments, seeds, trajectories, strict=True)
    }
    if len(rollouts) != len(environments):
        raise ValueError("two trajectories have the same id")
    first = [rollout.begin() for rollout in rollouts.values()]
    engine.generate(
        [request for request in first if request is not None],
        advance=lambda completion: rollouts[completion.trajectory_id].advance(completion),
    )
    return list(trajectories)


class StaleSpanError(RuntimeError):
    """The turns of a trajectory were sampled by different weights."""

    def __init__(self, first: str, now: str) -> None:
        super().__init__(f"the policy changed from {first} to {now} mid-trajectory")


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

    def begin(self) -> Request | None:
        """The first request; None if the environment failed to start."""
        return self._guarded(self._begin)

    def advance(self, completion: Completion) -> Request | None:
        """Process a completion and return the next request; None when the trajectory is over."""
        return self._guarded(lambda: self._advance(completion))

    def _guarded(self, act: Callable[[], Request | None]) -> Request | None:
        try:
            request = act()
        except Exception as error:
            self.trajectory.exception = f"{type(error).__name__}: {error}"
            self.trajectory.stop_reason = StopReason.EXCEPTION
            request = None
        if request is None:
            self._finish()
        return request

    def _begin(self) -> Request:
        self.trajectory.messages += self.environment.start()
        if self.renderer is not None:
            rendered = self.renderer.start(self.trajectory.messages)
            self.text = rendered.text
            self._open_sample(rendered.ids)
        return self._request()

    def _advance(self, completion: Completion) -> Request | None:
        if completion.error is not None:
            self.trajectory.exception = completion.error
            self.trajectory.stop_reason = StopReason.EXCEPTION
            return None
        trajectory = self.trajectory
        self._stamp(completion)
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
        message = self._read(completion)
        trajectory.messages.append(message)
        if completion.finish_reason == "length":
            trajectory.stop_reason = StopReason.TRUNCATED
            return None
        before = time.perf_counter()
        result = self.environment.step(message)
        turn.tool_seconds = time.perf_counter() - before
        turn.tool_name, turn.tool_args, turn.tool_result = result.tool_name, result.tool_args, result.tool_result
        trajectory.messages += result.messages
        if result.done:
            trajectory.stop_reason = result.stop_reason
            return None
        if self.renderer is not None:
            self._extend(completion.token_ids)
        return self._request()

    def _read(self, completion: Completion) -> Message:
        """The assistant's message; also adds its ids to the sample."""
        if self.renderer is None:
            if completion.message is None:
                raise RuntimeError("the engine returned neither a message nor anything to render it with")
            return completion.message
        self.trajectory.samples[-1].append_sampled(completion.token_ids, completion.logprobs)
        return self.renderer.parse(completion.token_ids)

    def _extend(self, sampled: list[int]) -> None:
        assert self.renderer is not None
        rendered = self.renderer.extend(self.text + self.renderer.text_of(sampled), self.trajectory.messages)
        self.text = rendered.text
        if rendered.extends:
            self.trajectory.samples[-1].append_prompt(rendered.ids)
        else:
            self._open_sample(rendered.ids)

    def _open_sample(self, prompt_ids: list[int]) -> None:
        sample = TokenSample()
        sample.append_prompt(prompt_ids)
        self.trajectory.samples.append(sample)

    def _request(self) -> Request:
        turn = len(self.trajectory.turns)
        return Request(
            self.trajectory.id,
            self.sampling,
            prompt_ids=list(self.trajectory.samples[-1].token_ids) if self.renderer is not None else [],
            messages=list(self.trajectory.messages),
            seed=derive_seed(self.seed, turn),
        )

    def _stamp(self, completion: Completion) -> None:
        """Record the first completion's weights for the trajectory; count turns that differ."""
        trajectory = self.trajectory
        stamp = (completion.policy_version, completion.adapter_sha256)
        if not trajectory.turns:
            trajectory.policy_version, trajectory.adapter_sha256 = stamp
        elif stamp != (trajectory.policy_version, trajectory.adapter_sha256):
            self.stale_turns += 1
            if not self.stale_allowed:
                raise StaleSpanError(trajectory.policy_version, stamp[0])

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
