"""Collect groups: several rollouts of each scenario under one policy, played, audited and scored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from emailrl.agent.play import Play
from emailrl.engines.base import SamplingParams
from emailrl.records.trajectory import Scenario, Trajectory, TrajectoryGroup
from emailrl.settings import AgentSettings


class Scores(Protocol):
    """The part of ``rewards.Scorer`` that the collector uses."""

    def score(self, trajectories: Sequence[Trajectory]) -> None:
        """Set rewards in place."""
        ...


@dataclass(frozen=True, slots=True)
class Collector:
    """Plays every scenario several times and scores the trajectories."""

    play: Play
    scorer: Scores
    agent: AgentSettings
    mode: str
    """Recorded in the trajectories."""
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
        agent = self.agent
        sampling = SamplingParams(
            agent.max_tokens,
            agent.temperature if temperature is None else temperature,
            top_p=agent.top_p,
            top_k=agent.top_k,
        )
        ended = {each.id: each for each in self.play(trajectories, sampling, seed, progress)}
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
                    mode=self.mode,
                )
                for member in range(group_size)
            ]
            groups.append(TrajectoryGroup(group_id, scenario, members))
        return groups
