"""Play conversations: a function from empty trajectories to finished ones, audited; and groups of them, scored.
``Stage.on`` makes one of an engine in this process; ``training.team`` one of the engines of all ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from emailrl.agent.runner import Environment, derive_seed, run
from emailrl.agent.task import MAIL, load_task
from emailrl.base.errors import EmailRLError
from emailrl.engines.base import Engine, SamplingParams
from emailrl.ranks import Activity
from emailrl.records.trajectory import Scenario, Trajectory, TrajectoryGroup
from emailrl.settings import AgentSettings

if TYPE_CHECKING:
    from emailrl.engines.renderer import ChatRenderer
    from emailrl.mail import Mailbox
    from emailrl.model.policy import Policy
    from emailrl.settings import PlayingSettings


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
            if position >= len(trained):
                raise drift(f"turn {number}, token {offset}: sampled but not in the sample")
            if trained[position] != sampled:
                where = f"turn {number}, token {offset}"
                raise drift(f"{where}: sampled {sampled}, but {trained[position]} in the training sample")
            position += 1
    if position != len(trained):
        raise drift(f"{len(trained) - position} ids in the training sample were never sampled")
    return position


MakeEnvironment = Callable[[Scenario, "Mailbox"], Environment]
"""Makes the environment of one trajectory on the scenario's open mailbox, which stays open until the rollouts end."""
Progress = Callable[[Trajectory], None] | None  # Called with each trajectory as it ends
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

    def on(self, engine: Engine, activity: Activity | None = None) -> Play:
        """Play with this engine, all conversations at once, and note progress in ``activity``; trajectories are filled
        in place."""
        activity = activity or Activity()
        activity.note("starting the environments")

        def play(
            trajectories: Sequence[Trajectory], sampling: SamplingParams, seed: int, progress: Progress = None
        ) -> Sequence[Trajectory]:
            seeds = [derive_seed(seed, trajectory.id) for trajectory in trajectories]
            with ExitStack() as opened:
                environments = [self.open_environment(trajectory.scenario, opened) for trajectory in trajectories]
                run(
                    environments,
                    engine,
                    self.renderer,
                    sampling,
                    seeds=seeds,
                    trajectories=trajectories,
                    progress=progress,
                    stale_allowed=self.stale_allowed,
                    activity=activity,
                )
            for trajectory in trajectories:
                if trajectory.exception is None:
                    audit(trajectory)
            return trajectories

        return play

    def open_environment(self, scenario: Scenario, opened: ExitStack) -> Environment:
        """The environment of a scenario, on its mailbox, which is closed with ``opened``."""
        from emailrl.mail import open_mailbox

        order, without_keywords = self.agent.search_order, self.agent.search_without_keywords
        inbox, until = scenario.inbox_address, scenario.query_date
        mailbox = open_mailbox(self.db, inbox, until=until, order=order, without_keywords=without_keywords)
        return self.make_environment(scenario, opened.enter_context(mailbox))


def build_stage(
    settings: PlayingSettings,
    policy: Policy,
    make_environment: Callable[[AgentSettings, Scenario, Mailbox], Environment] | None = None,
) -> Stage:
    """A stage that renders with the policy's own tokenizer and template. ``make_environment`` overrides the settings'
    environment, with the mail tools. UsageError if it cannot be loaded."""
    from emailrl.engines.renderer import ChatRenderer

    agent = settings.agent
    task = load_task(MAIL if make_environment else agent.environment, settings)
    make = partial(make_environment, agent) if make_environment else task.make
    renderer = ChatRenderer(policy.tokenizer, task.tools)
    return Stage(agent, settings.store.db, make, renderer, settings.vllm.stale_spans == "correct")


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
        if they have no reward. Raises TokenDriftError if the token audit fails."""
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
        sampling = SamplingParams(agent.max_tokens, temperature, agent.top_p, agent.top_k)
        ended = {each.id: each for each in self.play(fresh, sampling, seed, progress)}
        for group in groups:
            group.trajectories = [ended.get(each.id, each) for each in group.trajectories]
        everything = [trajectory for group in groups for trajectory in group.trajectories]
        self.score([trajectory for trajectory in everything if not trajectory.reward_terms])
        return groups
