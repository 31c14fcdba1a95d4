"""Which groups are kept, what is asked in place of the others, and what is charged for length: literal cases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from emailrl.records.trajectory import Scenario, StopReason, Trajectory, TrajectoryGroup
from emailrl.runs.log import Display
from emailrl.settings import AlgorithmSettings, TrainingSettings
from emailrl.training.algorithms import ALGORITHMS
from emailrl.training.state import Collected, Filter, Rollouts, make_filter


def scenario(name: str) -> Scenario:
    return Scenario(name, "When?", "Monday", ["m"], "a@example.com", "2001-01-01")


def group(
    *rewards: float,
    name: str = "g",
    right: tuple[int, ...] = (),
    exceptions: tuple[int, ...] = (),
    ended: StopReason = StopReason.EXCEPTION,
) -> TrajectoryGroup:
    asked = scenario(name)
    members = [
        Trajectory(
            f"{name}-{i}", name, asked, reward=reward, rubric={"answer_correct": i in right},
            exception="Oops: broken" if i in exceptions else None, stop_reason=ended if i in exceptions else None,
        )
        for i, reward in enumerate(rewards)
    ]  # fmt: skip
    return TrajectoryGroup(name, asked, members)


def sift(groups: Sequence[TrajectoryGroup], wanted: Filter) -> Collected:
    sifted = {group.id: wanted.sift(group) for group in groups}
    kept = [found for found in sifted.values() if not isinstance(found, str)]
    reasons = {name: found for name, found in sifted.items() if isinstance(found, str)}
    return Collected(list(groups), kept, reasons)


def test_drops_are_counted_by_reason() -> None:
    groups = [
        group(0.0, 1.0, name="good"),
        group(0.0, 1.0, 0.5, name="one_raised", exceptions=(2,)),
        group(0.0, 1.0, name="left_alone", exceptions=(0,)),
        group(0.0, 0.0, name="no_judgment", exceptions=(0, 1), ended=StopReason.ANSWERED),  # played, but not scored
        group(0.5, 0.5, 0.5, name="equal"),
        group(0.5, 0.57, name="close"),  # sample std 0.0495, population std 0.035
        group(0.5, 0.58, name="apart"),  # sample std 0.0566, population std 0.04: kept only by the sample std
        group(0.5, 0.5, 0.58, name="three"),  # 0.0462; without the division by n - 1, 0.0653
        group(0.5, 0.5, 0.59, name="far"),  # 0.05196
    ]
    collected = sift(groups, Filter(2, 0.05))
    assert [one.id for one in collected.kept] == ["good", "one_raised", "apart", "far"]
    assert [len(one.trajectories) for one in collected.kept] == [2, 2, 2, 3]
    assert collected.reasons == {
        "left_alone": "group_too_small", "no_judgment": "group_unscored",
        "equal": "group_low_std", "close": "group_low_std", "three": "group_low_std",
    }  # fmt: skip
    assert collected.dropped() == {
        "trajectories_exception": 4, "groups_too_small": 1, "groups_unscored": 1, "groups_low_std": 3,
        "groups_below_range": 0, "groups_above_range": 0,
    }  # fmt: skip
    assert collected.groups == groups and len(groups[1].trajectories) == 3  # the group given is left as it was


def test_a_standard_deviation_of_just_the_least_is_enough() -> None:
    assert sift([group(0.0, 1.0)], Filter(2, math.sqrt(0.5))).reasons == {}  # 0.25 + 0.25, over n - 1 = 1
    assert sift([group(0.0, 1.0)], Filter(2, math.nextafter(math.sqrt(0.5), 1))).reasons == {"g": "group_low_std"}


def test_single_rollouts_pass_where_the_algorithm_takes_them() -> None:
    assert sift([group(1, 1, right=(0,))], Filter(2, 0.05, between=(0, 1))).reasons == {"g": "group_low_std"}
    collected = sift([group(1.0), group(1.0, name="h", exceptions=(0,))], Filter(1, 0.05))
    assert [one.id for one in collected.kept] == ["g"] and collected.reasons == {"h": "group_too_small"}


@pytest.mark.parametrize(
    ("between", "kept"),
    [
        ((0.0, 1.0), ["quarter", "half"]),  # strictly inside: 0 and 1 are out
        ((0.25, 0.75), ["half"]),  # and so are the bounds themselves
        ((-0.1, 0.5), ["none", "quarter"]),
        ((0.5, 1.1), ["all"]),
    ],
)
def test_the_mean_answer_lies_strictly_inside_the_range(between: tuple[float, float], kept: list[str]) -> None:
    groups = [
        group(0, 1, 2, 3, name="none"),
        group(0, 1, 2, 3, name="quarter", right=(3,)),
        group(0, 1, 2, 3, name="half", right=(0, 1)),
        group(0, 1, 2, 3, name="all", right=(0, 1, 2, 3)),
    ]
    assert [one.id for one in sift(groups, Filter(2, 0.0, between=between)).kept] == kept


def test_the_mean_reward_is_that_of_the_members_that_did_not_raise() -> None:
    groups = [group(-1.0, 0.5), group(-1.0, 1.5, -9.0, name="h", exceptions=(2,)), group(0.5, 2.5, name="i")]
    collected = sift(groups, Filter(2, 0.0, between=(-0.25, 1.5), mean_of="reward"))
    assert [one.id for one in collected.kept] == ["h"]  # the means are -0.25, 0.25, 1.5
    assert collected.reasons == {"g": "group_below_range", "i": "group_above_range"}


@pytest.mark.parametrize(
    ("settings", "answers", "expected"),
    [
        ({}, True, Filter(2, 0.05, (0.0, 1.0), "accuracy", 10)),
        ({}, False, Filter(2, 0.05, (0.0, 1.0), "reward", 10)),
        ({"filter_on": "accuracy"}, False, Filter(2, 0.05, (0.0, 1.0), "accuracy", 10)),
        ({"filter_on": "spread"}, True, Filter(2, 0.05, max_refill_rounds=10)),
        (
            {"filter_on": "reward", "filter_low": -1, "filter_high": 0.5, "max_refill_rounds": 3, "min_group_std": 0},
            True,
            Filter(2, 0.0, (-1.0, 0.5), "reward", 3),
        ),
    ],
)
def test_the_filter_of_dapo(settings: dict[str, Any], answers: bool, expected: Filter) -> None:
    assert make_filter(ALGORITHMS["dapo"], AlgorithmSettings(**settings), answers=answers) == expected


def test_without_dynamic_filtering_there_is_no_range_and_no_refill() -> None:
    assert make_filter(ALGORITHMS["grpo"], AlgorithmSettings(), answers=True) == Filter(2, 0.05)
    assert make_filter(ALGORITHMS["ppo"], AlgorithmSettings(), answers=True) == Filter(1, 0.0)


class Game:
    """Questions 0, 1, 2, …; the group of each is kept if ``good`` says so."""

    def __init__(self, folder: Path, good: set[int], last: int = 99) -> None:
        self.folder, self.good, self.left = folder, good, list(range(last + 1))
        self.rounds: list[tuple[str, list[int]]] = []

    def take(self, count: int) -> list[Scenario]:
        taken, self.left = self.left[:count], self.left[count:]
        return [scenario(str(number)) for number in taken]

    def collect(self, scenarios: Sequence[Scenario], size: int, *, split_label: str, **how: Any) -> Any:
        numbers = [int(one.id) for one in scenarios]
        self.rounds.append((split_label, numbers))
        return [group(0, 1, name=str(n), right=(1,) if n in self.good else ()) for n in numbers]

    def play(self, wanted: Filter | int) -> Collected:
        """With a filter, or so many rounds of refills."""
        if isinstance(wanted, int):
            wanted = Filter(2, 0.0, between=(0, 1), max_refill_rounds=wanted)
        both: Any = self
        return Rollouts(TrainingSettings(), [], self.folder, wanted, both, None, 3).play(1, both, Display())


def test_a_refill_asks_as_many_as_are_missing_until_the_step_is_full(tmp_path: Path) -> None:
    game = Game(tmp_path, good={1, 4, 6})
    collected = game.play(9)
    assert game.rounds == [("train", [0, 1, 2]), ("refill-1", [3, 4]), ("refill-2", [5]), ("refill-3", [6])]
    assert [one.id for one in collected.kept] == ["1", "4", "6"]
    assert [one.id for one in collected.groups] == ["0", "1", "2", "3", "4", "5", "6"]
    assert collected.refill_rounds == 3 and collected.dropped()["groups_below_range"] == 4
    assert Game(tmp_path, good={0, 1, 2}).play(9).refill_rounds == 0  # a full step asks nothing further


def test_a_refill_ends_after_its_rounds_and_where_the_questions_do(tmp_path: Path) -> None:
    game = Game(tmp_path, good={1})
    assert [one.id for one in game.play(2).kept] == ["1"]
    assert game.rounds == [("train", [0, 1, 2]), ("refill-1", [3, 4]), ("refill-2", [5, 6])]
    game = Game(tmp_path, good={1}, last=3)
    assert game.play(9).refill_rounds == 1
    assert game.rounds == [("train", [0, 1, 2]), ("refill-1", [3])]
    game = Game(tmp_path, good=set())
    assert game.play(0).kept == [] and game.rounds == [("train", [0, 1, 2])]
    nothing = Game(tmp_path, good=set(), last=-1).play(2)
    assert (nothing.groups, nothing.refill_rounds) == ([], 0)
