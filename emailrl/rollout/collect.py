"""Collect groups: several rollouts of each scenario under one policy, played, audited and scored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from emailrl.engines.base import Engine, SamplingParams
from emailrl.environment.custom import load_task, mail_agent
from emailrl.rollout.player import MakeEnvironment, Player, Plays, build_player
from emailrl.trajectory import Scenario, Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from emailrl.engines.renderer import ChatRenderer
    from emailrl.policy.load import Policy
    from emailrl.settings import Settings


class Scores(Protocol):
    """The part of ``rewards.Scorer`` that the collector uses."""

    def score(self, trajectories: Sequence[Trajectory]) -> None:
        """Set rewards in place."""
        ...


class Collector(Player):
    """Plays scenarios and scores the trajectories. ``team``, if given, plays instead of this process's player."""

    def __init__(
        self,
        engine: Engine,
        renderer: ChatRenderer | None,
        settings: Settings,
        scorer: Scores,
        db: Path,
        *,
        run_id: str = "",
        make_environment: MakeEnvironment = mail_agent,
    ) -> None:
        super().__init__(engine, renderer, settings, db, make_environment=make_environment)
        self.scorer = scorer
        self.run_id = run_id
        self.team: Plays | None = None

    def collect(
        self,
        scenarios: Sequence[Scenario],
        group_size: int,
        *,
        step: int,
        seed: int,
        temperature: float | None = None,
        split_label: str = "train",
        progress: Callable[[Trajectory], None] | None = None,
        played: Mapping[str, Trajectory] = MappingProxyType({}),
    ) -> list[TrajectoryGroup]:
        """Roll out every scenario ``group_size`` times and score the rollouts; returns one group per scenario, in
        order.

        ``temperature`` None means that of training rollouts. A trajectory's samples depend only on seed, step, label,
        scenario and its number in the group. An exception in one trajectory is recorded in it; ``progress`` is called
        with each one as it ends, before scoring. Trajectories already ``played``, by id, are reused, and scored if they
        have no reward. Raises TokenDriftError if the token audit fails.
        """
        groups = self._empty_groups(scenarios, group_size, step, split_label, played)
        everything = [trajectory for group in groups for trajectory in group.trajectories]
        trajectories = [trajectory for trajectory in everything if trajectory.id not in played]
        agent = self.settings.agent
        sampling = SamplingParams(
            agent.max_tokens,
            agent.temperature if temperature is None else temperature,
            top_p=agent.top_p,
            top_k=agent.top_k,
        )
        ended = {
            each.id: each for each in (self.team or self).play(trajectories, sampling, seed=seed, progress=progress)
        }
        for group in groups:
            group.trajectories = [ended.get(each.id, each) for each in group.trajectories]
        everything = [trajectory for group in groups for trajectory in group.trajectories]
        self.scorer.score([trajectory for trajectory in everything if not trajectory.reward_terms])
        return groups

    def _empty_groups(
        self,
        scenarios: Sequence[Scenario],
        group_size: int,
        step: int,
        label: str,
        played: Mapping[str, Trajectory],
    ) -> list[TrajectoryGroup]:
        """Groups of trajectories, empty except for those already ``played``.

        A scenario that occurs twice in one step gets two groups.
        """
        times: Counter[str] = Counter()
        groups = []
        for scenario in scenarios:
            times[scenario.id] += 1
            repeat = f".{times[scenario.id]}" if times[scenario.id] > 1 else ""
            group_id = f"{label}-{step:06d}-{scenario.id}{repeat}"
            members = [
                played.get(f"{group_id}-{member}")
                or Trajectory(
                    f"{group_id}-{member}",
                    group_id,
                    scenario,
                    run_id=self.run_id,
                    step=step,
                    mode=self.settings.training.mode,
                )
                for member in range(group_size)
            ]
            groups.append(TrajectoryGroup(group_id, scenario, members))
        return groups


def build_collector(
    settings: Settings,
    policy: Policy,
    engine: Engine,
    *,
    scorer: Scores | None = None,
    run_id: str = "",
    make_environment: MakeEnvironment | None = None,
) -> Collector:
    """A collector whose player comes from ``build_player``; raises the same errors."""
    from emailrl.rewards.build import build_scorer

    player = build_player(settings, policy, engine, make_environment=make_environment)
    return Collector(
        engine,
        player.renderer,
        settings,
        scorer or build_scorer(settings),
        settings.store.db,
        run_id=run_id,
        make_environment=player.make_environment,
    )


def build_chat_collector(settings: Settings, *, scorer: Scores | None = None) -> Collector:
    """A collector that uses the chat server of ``settings.openai``, without a policy; the caller closes its engine.

    Raises UsageError for an environment that cannot be loaded, or a missing key.
    """
    from emailrl.engines import build_chat_engine
    from emailrl.rewards.build import build_scorer

    task = load_task(settings.agent.environment, settings.agent)
    scorer = scorer or build_scorer(settings)
    engine = build_chat_engine(settings, task.tools)
    return Collector(engine, None, settings, scorer, settings.store.db, make_environment=task.make)
