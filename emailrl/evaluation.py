"""One policy on one set of questions: accuracy with its interval, rewards, rubric means, cost in time and tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from emailrl.trajectory import Scenario, StopReason, Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from typing import Self

Z_95 = 1.959963984540054
"""The normal distribution's 97.5 % point."""
MAX_UNJUDGED = 0.05
"""Share of answers without a verdict up to which the others still measure a policy."""


class Collects(Protocol):
    """What evaluation asks of ``rollout.collect.Collector``: finished, scored groups for scenarios."""

    def collect(
        self,
        scenarios: Sequence[Scenario],
        group_size: int,
        *,
        step: int,
        seed: int,
        temperature: float,
        split_label: str = "train",
        progress: Callable[[Trajectory], None] | None = None,
        played: Mapping[str, Trajectory] = MappingProxyType({}),
    ) -> list[TrajectoryGroup]: ...


def wilson_interval(successes: int, total: int, z: float = Z_95) -> tuple[float, float]:
    """The Wilson score interval of a proportion, 95 % by default; (0, 1) when nothing was observed.

    Source: Wilson, JASA 22 (1927); centre (k + z²/2) / (n + z²), half-width z·√(k(n-k)/n + z²/4) / (n + z²).
    """
    if total == 0:
        return 0.0, 1.0
    centre = (successes + z * z / 2) / (total + z * z)
    half = z * math.sqrt(successes * (total - successes) / total + z * z / 4) / (total + z * z)
    return max(0.0, centre - half), min(1.0, centre + half)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What one pass over the questions showed.

    ``accuracy`` and its interval are over the judged: a rollout that raised is wrong, an answer without a verdict is
    left out (``unjudged``). ``num_questions`` counts all.
    """

    step: int
    num_questions: int
    num_correct: int
    unjudged: int
    exceptions: int
    """Trajectories that raised, or got no verdict or no reward."""
    reward: float | None
    """Mean over the trajectories that did not raise; None when all did."""
    latency_seconds: float | None
    """Mean wall time of a trajectory that did not raise."""
    tokens: float | None
    """Mean tokens of a trajectory that did not raise: prompt, completions and tool results, each counted once."""
    rubric: dict[str, float]
    """Mean of each rubric field over the trajectories that did not raise; truth values count as 0 and 1."""
    trajectories: list[Trajectory]

    @property
    def num_judged(self) -> int:
        """What the accuracy is a share of."""
        return self.num_questions - self.unjudged

    @property
    def accuracy(self) -> float:
        """Share of right answers among the judged, 0 to 1; 0 where none is judged, and the interval then all of it."""
        return self.num_correct / self.num_judged if self.num_judged else 0.0

    @property
    def is_void(self) -> bool:
        """Whether so many answers have no verdict (``MAX_UNJUDGED``) that the others measure nothing."""
        return self.unjudged > MAX_UNJUDGED * self.num_questions

    @property
    def interval(self) -> tuple[float, float]:
        """The accuracy's Wilson 95 % interval."""
        return wilson_interval(self.num_correct, self.num_judged)

    @property
    def verdicts(self) -> dict[str, bool]:
        """Whether each judged question was answered rightly, by its id."""
        return {each.scenario.id: is_correct(each) for each in self.trajectories if is_judged(each)}

    def metrics(self) -> dict[str, Any]:
        """The numbers under the names ``benchmark --json`` gives them, one mean per rubric field included."""
        low, high = self.interval
        return {
            "accuracy": self.accuracy,
            "accuracy_low": low,
            "accuracy_high": high,
            "latency_seconds": self.latency_seconds,
            "tokens": self.tokens,
            "reward": self.reward,
            "num_questions": self.num_questions,
            "unjudged": self.unjudged,
            "exceptions": self.exceptions,
            **disagreement(self.trajectories),
        } | self.rubric

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], step: int = 0) -> Self:
        """Measure scored trajectories, one per question."""
        whole = [trajectory for trajectory in trajectories if trajectory.exception is None]
        return cls(
            step=step,
            num_questions=len(trajectories),
            num_correct=sum(map(is_correct, trajectories)),
            unjudged=sum(not is_judged(trajectory) for trajectory in trajectories),
            exceptions=len(trajectories) - len(whole),
            reward=mean([trajectory.reward for trajectory in whole]),
            latency_seconds=mean([trajectory.seconds for trajectory in whole]),
            tokens=mean([num_tokens(trajectory) for trajectory in whole]),
            rubric=rubric_means(whole),
            trajectories=list(trajectories),
        )


def evaluate(
    collector: Collects,
    scenarios: Sequence[Scenario],
    *,
    step: int,
    seed: int,
    temperature: float,
    split_label: str = "val",
    progress: Callable[[Trajectory], None] | None = None,
    played: Mapping[str, Trajectory] = MappingProxyType({}),
) -> Evaluation:
    """Roll out and score each question once with the policy the collector's engine now holds.

    ``progress`` hears of each trajectory as it ends; those ``played`` before, by id, are not played again.
    """
    groups = collector.collect(
        scenarios,
        1,
        step=step,
        seed=seed,
        temperature=temperature,
        split_label=split_label,
        progress=progress,
        played=played,
    )
    return Evaluation.of([trajectory for group in groups for trajectory in group.trajectories], step)


def has_crashed(trajectory: Trajectory) -> bool:
    """Whether the rollout itself raised; not so where it ended, and only its verdict or reward could not be had."""
    return trajectory.exception is not None and trajectory.stop_reason is StopReason.EXCEPTION


def is_judged(trajectory: Trajectory) -> bool:
    """Whether it is known to be right or wrong, as what crashed is."""
    return has_crashed(trajectory) or trajectory.rubric.get("answer_correct") is not None


def is_correct(trajectory: Trajectory) -> bool:
    """Whether the answer was judged right, be there a reward or not; a rollout that raised is wrong."""
    return not has_crashed(trajectory) and bool(trajectory.rubric.get("answer_correct"))


def verdict(trajectory: Trajectory) -> str:
    """What came of it in words: correct, wrong, did not know, no answer, crashed or not judged.

    ART-E's reward tells them apart: who says that he does not know loses less than who is wrong.
    """
    rubric = trajectory.rubric
    if has_crashed(trajectory):
        return "crashed"
    if rubric.get("answer_correct") is None:
        return "not judged"
    if rubric["answer_correct"]:
        return "correct"
    if rubric.get("returned_i_dont_know"):
        return "did not know"
    return "wrong" if rubric.get("attempted_answer", True) else "no answer"


def num_tokens(trajectory: Trajectory) -> int:
    """Tokens in the trajectory; for engines that return text only, what the server counted in the rubric."""
    if trajectory.samples:
        return sum(len(sample.token_ids) for sample in trajectory.samples)
    return sum(int(trajectory.rubric.get(name) or 0) for name in ("prompt_tokens", "completion_tokens"))


def total_cost(trajectories: Sequence[Trajectory]) -> float | None:
    """US dollars for all completions, those of trajectories that raised included; None where nothing has a price."""
    costs = [turn.cost for trajectory in trajectories for turn in trajectory.turns if turn.cost is not None]
    return math.fsum(costs) if costs else None


def disagreement(trajectories: Sequence[Trajectory]) -> dict[str, int]:
    """How many of a judge's answers the offline check looked at too, and on how many only the one found them right."""
    verdicts = [
        (trajectory.rubric["answer_correct"], trajectory.rubric["offline_correct"])
        for trajectory in trajectories
        if trajectory.exception is None and trajectory.rubric.get("offline_correct") is not None
    ]
    return {
        "judge_compared": len(verdicts),
        "only_judge_right": sum(judged and not offline for judged, offline in verdicts),
        "only_offline_right": sum(offline and not judged for judged, offline in verdicts),
    }


def rubric_means(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Mean of every numeric or boolean rubric field over the trajectories that have it."""
    values: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.rubric.items():
            if isinstance(value, (bool, int, float)):
                values.setdefault(name, []).append(float(value))
    return {name: math.fsum(items) / len(items) for name, items in values.items()}


def mean(values: Sequence[float]) -> float | None:
    """The mean, or None of nothing."""
    return math.fsum(values) / len(values) if values else None


def reason(exception: str | None) -> str:
    """Why a rollout raised, for people: what ``Trajectory.exception`` says without the names of classes before it."""
    return re.sub(r"^(?:\w+: )*\w*(?:Error|Exception): ", "", str(exception))
