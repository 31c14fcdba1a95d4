"""Play conversations: a function from empty trajectories to finished ones, audited; and groups of them, scored. Every
conversation goes at its own pace, and its tokens are recorded as they come: sampled ids enter the sample with mask 1,
ids of prompts and tool results with mask 0; no text is tokenized twice. If a chat template does not extend the
conversation so far, a new sample begins with the whole new prompt."""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from emailrl.agent.task import MAIL, MailEnvironment, StepResult, agent_mailbox, load_task
from emailrl.base.errors import EmailRLError
from emailrl.engines.base import Completion, Engine, LocalEngine, Request, SamplingParams
from emailrl.engines.renderer import ChatRenderer, Rendered
from emailrl.engines.thoughts import template_notes, thought_of
from emailrl.ranks import Activity
from emailrl.records.trajectory import Message, Scenario, StopReason, TokenSample, Trajectory, TrajectoryGroup, Turn
from emailrl.settings import AgentSettings, ModelSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from emailrl.mail import Mailbox
    from emailrl.model.policy import Policy
    from emailrl.settings import PlayingSettings

Progress = Callable[[Trajectory], None] | None  # Called with each trajectory as it ends


class Environment(Protocol):
    """One rollout of one scenario. Its ``rubric`` (a dict or a dataclass), ``final_answer`` and ``final_sources`` are
    read if present."""

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
    progress: Progress = None,
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
    environment: Environment
    renderer: ChatRenderer | None
    sampling: SamplingParams
    seed: int
    trajectory: Trajectory
    progress: Progress
    stale_allowed: bool
    stale_turns: int = 0
    prompt: Rendered = field(default_factory=partial(Rendered, [], ""))
    part: Completion | None = None  # what is sampled of a turn that may go on

    def advance(self, completion: Completion | None) -> Request | None:
        """Begin (None) or process a completion; returns the next request, None when the trajectory is over."""
        trajectory = self.trajectory
        try:
            if completion is None:
                trajectory.messages += self.environment.start()
            else:
                completion = completion if self.part is None else self._joined(self.part, completion)
                if (going_on := self._go_on(completion)) is not None:
                    return going_on
            if completion is None or self._play(completion):
                ids = [] if self.renderer is None else self._prompt(self.renderer, completion)
                seed = derive_seed(self.seed, len(trajectory.turns))
                sampling = replace(self.sampling, max_tokens=self._room([]))
                return Request(trajectory.id, sampling, ids, list(trajectory.messages), seed)
        except Exception as error:
            trajectory.exception, trajectory.stop_reason = f"{type(error).__name__}: {error}", StopReason.EXCEPTION
        self._finish()
        return None

    def _room(self, ids: Sequence[int]) -> int:
        """How many tokens may follow these of a turn: within its thought's bound, or within that of its answer."""
        most, bound = self.sampling.max_tokens, self.sampling.max_thinking_tokens
        if bound is None or self.renderer is None:
            return most - len(ids)
        thought, is_open = thought_of(self.renderer, self.prompt.text, ids)
        return min(bound - thought, most) if is_open else most - (len(ids) - thought)

    def _go_on(self, completion: Completion) -> Request | None:
        """The request that goes on with a turn cut off where its thought may end, not its answer; None for others."""
        begun, ids = [] if self.part is None else self.part.token_ids, completion.token_ids
        self.part = None
        if completion.finish_reason != "length" or self.renderer is None:
            return None
        if len(ids) < len(begun) + self._room(begun) or (room := self._room(ids)) < 1:  # less than asked: no window
            return None
        self.part, seed = completion, derive_seed(self.seed, len(self.trajectory.turns), len(ids))
        prompt, sampling = self.trajectory.samples[-1].token_ids + ids, replace(self.sampling, max_tokens=room)
        return Request(self.trajectory.id, sampling, prompt, list(self.trajectory.messages), seed)

    def _joined(self, part: Completion, rest: Completion) -> Completion:
        """A turn's completion of two; its weights are those of the later one."""
        before, after = ((each.policy_version, each.adapter_sha256) for each in (part, rest))
        if before != after and not self.stale_allowed:
            raise StaleSpanError(f"the policy changed from {before[0]} to {after[0]} mid-turn")
        ids, logprobs = part.token_ids + rest.token_ids, part.logprobs + rest.logprobs
        seconds, prompt = part.seconds + rest.seconds, part.prompt_tokens
        return replace(rest, token_ids=ids, logprobs=logprobs, seconds=seconds, prompt_tokens=prompt)

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
        turn = Turn(completion.token_ids, completion.logprobs, completion.finish_reason, cost=completion.cost)
        turn.prompt_tokens, turn.completion_tokens = completion.prompt_tokens, completion.num_tokens
        turn.seconds, (turn.policy_version, turn.adapter_sha256) = completion.seconds, stamp
        trajectory.turns.append(turn)
        if self.renderer is not None:
            trajectory.samples[-1].append_sampled(completion.token_ids, completion.logprobs)
            message = self.renderer.parse(completion.token_ids)
            turn.thinking_tokens, _ = thought_of(self.renderer, self.prompt.text, completion.token_ids)
        elif completion.message is not None:
            message, turn.thinking_tokens = completion.message, completion.thinking_tokens
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
            self.prompt = renderer.start(trajectory.messages)
        else:
            self.prompt = renderer.extend(self.prompt, completion.token_ids, trajectory.messages)
        if not trajectory.samples or not self.prompt.extends:
            trajectory.samples.append(TokenSample())
        trajectory.samples[-1].append_prompt(self.prompt.ids)
        return list(trajectory.samples[-1].token_ids)

    def _finish(self) -> None:
        trajectory = self.trajectory
        rubric = getattr(self.environment, "rubric", None) or {}
        trajectory.rubric = dict(rubric) if isinstance(rubric, dict) else asdict(rubric)
        if self.stale_turns:
            trajectory.rubric["stale_turns"] = self.stale_turns
        trajectory.rubric["prompt_tokens"] = sum(turn.prompt_tokens for turn in trajectory.turns)
        trajectory.rubric["completion_tokens"] = sum(turn.completion_tokens for turn in trajectory.turns)
        thoughts = [turn.thinking_tokens for turn in trajectory.turns if turn.thinking_tokens is not None]
        trajectory.rubric["thinking_tokens"] = sum(thoughts) if len(thoughts) == len(trajectory.turns) else None
        trajectory.final_answer = getattr(self.environment, "final_answer", None)
        trajectory.final_sources = list(getattr(self.environment, "final_sources", ()))
        # Exclude the time it waited for a free row in the engine, which says nothing about the policy.
        trajectory.seconds = sum(turn.seconds + turn.tool_seconds for turn in trajectory.turns)
        if self.progress is not None:
            self.progress(trajectory)


class TokenDriftError(EmailRLError):
    """An id or log-probability to train differs from what the policy sampled."""


def audit(trajectory: Trajectory) -> int:
    """Check every trained token of a trajectory and return their number, 0 for that of a chat engine without samples.
    Raises TokenDriftError naming turn and position."""

    def drift(what: str) -> TokenDriftError:
        hint = "The tokens to train differ from those sampled; nothing was trained."
        return TokenDriftError(f"Trajectory {trajectory.id}: {what}.", hint)

    if not trajectory.samples:
        return 0
    trained, starts = list[tuple[int, float]](), set[int]()  # where in the first a run of sampled tokens begins
    for number, sample in enumerate(trajectory.samples):
        if not len(sample.token_ids) == len(sample.loss_mask) == len(sample.sampler_logprobs):
            raise drift(f"sample {number}: ids, mask and log-probabilities differ in length")
        previous, columns = 0, zip(sample.token_ids, sample.loss_mask, sample.sampler_logprobs, strict=True)
        for index, (token, mask, logprob) in enumerate(columns):
            where = f"sample {number}, position {index}"
            if mask not in (0, 1) or (mask == 1) != (logprob is not None):
                raise drift(f"{where}: mask {mask} with log-probability {logprob}")
            if logprob is not None:
                if not math.isfinite(logprob) or logprob > 1e-4:
                    raise drift(f"{where}: log-probability {logprob}")
                if not previous:
                    starts.add(len(trained))
                trained.append((token, logprob))
            previous = mask
    stamp = trajectory.policy_version, trajectory.adapter_sha256
    stale = sum((turn.policy_version, turn.adapter_sha256) != stamp for turn in trajectory.turns)
    if stale != trajectory.rubric.get("stale_turns", 0):
        raise drift(f"{stale} turns were sampled by different weights than the first")
    position = 0
    for number, turn in enumerate(trajectory.turns):
        if len(turn.completion_ids) != len(turn.logprobs):
            raise drift(f"turn {number}: ids and log-probabilities differ in number")
        if turn.completion_ids and position not in starts:
            raise drift(f"turn {number}: no prompt precedes its first id")
        for offset, sampled in enumerate(zip(turn.completion_ids, turn.logprobs, strict=True)):
            where = f"turn {number}, token {offset}"
            if position >= len(trained):
                raise drift(f"{where}: sampled but not in the sample")
            if trained[position] != sampled:
                raise drift(f"{where}: sampled {sampled}, but {trained[position]} in the training sample")
            position += 1
    if position != len(trained):
        raise drift(f"{len(trained) - position} ids in the training sample were never sampled")
    return position


MakeEnvironment = Callable[[Scenario, "Mailbox"], Environment]
"""Makes the environment of one trajectory on the scenario's open mailbox, which stays open until the rollouts end."""
Play = Callable[[Sequence[Trajectory], SamplingParams, int, Progress], Sequence[Trajectory]]
"""Plays trajectories that hold only ids and metadata, with a seed; returns them finished. A trajectory's samples depend
only on the seed and its id. An exception in one is recorded in it. Raises TokenDriftError if the token audit fails."""
Score = Callable[[Sequence[Trajectory]], None]
"""Sets rewards in place."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Where conversations take place: an environment on the mailbox of each scenario, and the chat template."""

    agent: AgentSettings
    db: Path
    make_environment: MakeEnvironment
    renderer: ChatRenderer | None  # None for chat engines
    stale_allowed: bool = False  # Turns of a trajectory may be sampled by several policy versions (STALE_SPANS=correct)

    def notes(self, model: ModelSettings, max_turns: int) -> list[str]:
        """As ``engines.thoughts.template_notes``; none without a template."""
        return [] if self.renderer is None else template_notes(self.renderer, model, max_turns)

    def on(self, engine: Engine, activity: Activity | None = None) -> Play:
        """Play all conversations at once with this engine, noting progress in ``activity``; trajectories are filled
        in place."""
        activity = activity or Activity()
        activity.note("starting the environments")
        converse = partial(
            run, engine=engine, renderer=self.renderer, stale_allowed=self.stale_allowed, activity=activity
        )

        def play(
            trajectories: Sequence[Trajectory], sampling: SamplingParams, seed: int, progress: Progress = None
        ) -> Sequence[Trajectory]:
            seeds = [derive_seed(seed, trajectory.id) for trajectory in trajectories]
            with ExitStack() as opened:
                environments = [self.open_environment(trajectory.scenario, opened) for trajectory in trajectories]
                converse(environments, sampling=sampling, seeds=seeds, trajectories=trajectories, progress=progress)
            for trajectory in trajectories:
                if trajectory.exception is None:
                    audit(trajectory)
            return trajectories

        return play

    def open_environment(self, scenario: Scenario, opened: ExitStack) -> Environment:
        """The environment of a scenario, on its mailbox, which is closed with ``opened``."""
        mailbox = agent_mailbox(self.agent, self.db, scenario.inbox_address, scenario.query_date)
        return self.make_environment(scenario, opened.enter_context(mailbox))


def build_stage(
    settings: PlayingSettings,
    policy: Policy,
    make_environment: type[MailEnvironment] | None = None,
) -> Stage:
    """A stage that renders with the policy's own tokenizer and template. ``make_environment`` overrides the settings'
    environment, with the mail tools. UsageError if it cannot be loaded."""

    agent = settings.agent
    task = load_task(MAIL if make_environment else agent.environment, settings)
    make = partial(make_environment, agent=agent) if make_environment else task.make
    renderer = ChatRenderer(policy.tokenizer, task.tools, settings.model.tool_dialect)
    return Stage(agent, settings.store.db, make, renderer, settings.vllm.stale_spans == "correct")


def check_template(settings: PlayingSettings, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise as ``ChatRenderer`` for a tokenizer whose template does not serve the settings' environment."""
    ChatRenderer(tokenizer, load_task(settings.agent.environment, settings).tools, settings.model.tool_dialect)


@dataclass(frozen=True, slots=True)
class Collector:
    """Plays every scenario several times and scores the trajectories."""

    play: Play
    score: Score
    agent: AgentSettings
    mode: str  # Recorded in the trajectories
    run_id: str = ""

    def collect(
        self,
        scenarios: Sequence[Scenario],
        group_size: int,
        *,
        step: int,
        seed: int,
        temperature: float | None = None,
        split_label: str = "train",
        progress: Progress = None,
        played: Mapping[str, Trajectory] | None = None,
    ) -> list[TrajectoryGroup]:
        """Roll out every scenario ``group_size`` times and score the rollouts; returns one group per scenario, in
        order. ``temperature`` None means that of training rollouts. A trajectory's samples depend only on seed, step,
        label, scenario and its number in the group. An exception in one trajectory is recorded in it; ``progress`` is
        called with each one as it ends, before scoring. Trajectories already ``played``, by id, are reused, and scored
        with their group if one of it has no reward. Raises TokenDriftError if the token audit fails."""
        agent, played, times, groups = self.agent, played or {}, Counter[str](), list[TrajectoryGroup]()
        for scenario in scenarios:
            times[scenario.id] += 1
            # A scenario that occurs twice in one step gets two groups.
            again = f".{times[scenario.id]}" if times[scenario.id] > 1 else ""
            name = f"{split_label}-{step:06d}-{scenario.id}{again}"
            made = [
                Trajectory(f"{name}-{member}", name, scenario, run_id=self.run_id, step=step, mode=self.mode)
                for member in range(group_size)
            ]
            groups.append(TrajectoryGroup(name, scenario, [played.get(each.id, each) for each in made]))
        fresh = [each for group in groups for each in group.trajectories if each.id not in played]
        temperature = agent.temperature if temperature is None else temperature
        sampling = SamplingParams.of(agent, temperature)
        ended = {each.id: each for each in self.play(fresh, sampling, seed, progress)}
        for group in groups:
            group.trajectories = [ended.get(each.id, each) for each in group.trajectories]
        unscored = (group.trajectories for group in groups if not all(each.reward_terms for each in group.trajectories))
        self.score([trajectory for trajectories in unscored for trajectory in trajectories])
        return groups
