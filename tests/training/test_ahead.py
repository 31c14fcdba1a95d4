"""Rollouts ahead of the trainer, with scripted parts: which policy plays a step, and what a checkpoint keeps."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from threading import Event, Timer
from types import SimpleNamespace
from typing import Any, cast

import pytest

from emailrl.base.errors import EmailRLError
from emailrl.ranks import Activity
from emailrl.records.trajectory import Scenario
from emailrl.training.ahead import Ahead
from emailrl.training.state import Collected, RunState, StepQuestions

QUESTIONS = [Scenario(f"q{n}", "?", "!", [], "a@x", "2001-01-01") for n in range(20)]


@dataclass
class Pinned:
    """Stays on one version."""

    version: int
    parts: Scripted

    def __post_init__(self) -> None:
        self.parts.open.add(self.version)

    def load(self) -> None:
        assert self.parts.settled  # versions are loaded one after the other
        self.parts.settled = False
        self.parts.may_load.wait(300)
        self.parts.loaded.append(self.version)

    def cancel(self) -> None: ...

    def close(self) -> None:
        self.parts.open.discard(self.version)


@dataclass
class Scripted:
    """Engine and rollouts in one: every step has two questions and one rollout of each."""

    loaded: list[int] = field(default_factory=list)
    settled: bool = True
    unverified: set[int] = field(default_factory=set)
    may_load: Event = field(default_factory=Event)
    open: set[int] = field(default_factory=set)
    played: dict[int, list[str]] = field(default_factory=dict)
    choose_by_outcome: bool = False
    per_step: int = 2
    hangs_in: int = 0
    dies_in: dict[int, BaseException] = field(default_factory=dict)
    rescued: Event = field(default_factory=Event)

    def __post_init__(self) -> None:
        self.may_load.set()

    def hand_over(self, step: int) -> Pinned:
        assert self.settled
        return Pinned(step, self)

    def settle(self) -> None:
        self.settled = True
        self.unverified.clear()

    def play_on(self, engine: Pinned, activity: Activity) -> Any:
        return SimpleNamespace(engine=engine, activity=activity)

    def questions(self, place: RunState) -> StepQuestions:
        return StepQuestions(QUESTIONS, place.cursor, 1, epochs=None)

    def play(self, step: int, questions: StepQuestions, display: Any, play: Any) -> Collected:
        if step == self.hangs_in:
            play.activity.note(f"in the environment of {step}-q1")
            self.rescued.wait(300)
        if step in self.dies_in:
            raise self.dies_in[step]
        taken = questions.take(self.per_step)
        self.unverified.add(step)
        self.played[step] = [question.id for question in taken]
        return Collected()


def ahead(parts: Scripted, state: RunState, staleness: int, **how: Any) -> Ahead:
    given = cast(Any, parts)
    return Ahead(
        given, cast(Any, parts.play_on), given, state, staleness=staleness, last_step=5, hand_over=parts.hand_over,
        **{"limit": 60} | how,
    )  # fmt: skip


def train(one: Ahead, state: RunState, steps: int) -> None:
    for _ in range(steps):
        _, questions = one.take()
        state.end_step(questions.cursor, 0.0)


def test_each_step_is_played_by_the_policy_that_its_number_says() -> None:
    for staleness, expected in ((1, [0, 0, 1, 2, 3]), (2, [0, 0, 0, 1, 2])):
        for by_outcome in (False, True):
            parts, state = Scripted(choose_by_outcome=by_outcome), RunState()
            one = ahead(parts, state, staleness)
            train(one, state, 5)
            one.close()
            assert parts.loaded == expected
            asked = [name for step in range(1, 6) for name in parts.played[step]]
            assert len(asked) == len(set(asked)) == 10 and parts.open == set()


def test_an_environment_that_hangs_ends_the_wait_for_its_step() -> None:
    parts, state = Scripted(hangs_in=2), RunState()
    one = ahead(parts, state, 1, limit=2)
    train(one, state, 1)
    begun = time.monotonic()
    with pytest.raises(EmailRLError) as raised:
        one.take()
    expected = "The rollouts of step 2 made no progress for 2 s: in the environment of 2-q1."
    assert raised.value.message == expected and "RANK_TIMEOUT" in raised.value.hint
    one.close()
    assert time.monotonic() - begun < 120
    parts.rescued.set()


def test_what_ends_the_rollouts_of_a_step_ends_the_run() -> None:
    for error, said in (
        (SystemExit("the end"), r"step 2 were ended: the end\. Use --resume"),
        (OSError("full"), "full"),
    ):
        parts, state = Scripted(dies_in={2: error}), RunState()
        one = ahead(parts, state, 1)
        train(one, state, 1)
        with pytest.raises((EmailRLError, OSError), match=said):
            one.take()
        one.close()


def test_a_step_trains_while_the_next_version_is_loaded_and_the_step_after_it_does_not() -> None:
    """With MAX_STALENESS=1, version 1 is loaded while step 2 trains; step 3 is played by it, and so waits for it."""
    parts, state = Scripted(), RunState()
    one = ahead(parts, state, 1)
    train(one, state, 1)
    parts.may_load.clear()
    train(one, state, 1)
    assert parts.loaded == [0, 0] and 3 not in parts.played
    Timer(0.2, parts.may_load.set).start()
    train(one, state, 1)
    assert parts.loaded[:3] == [0, 0, 1] and set(parts.played) >= {1, 2, 3}
    assert one.seconds["trainer_wait"] > 0.05 and one.seconds["adapter_load"] > 0.05
    one.close()


def test_a_step_is_trained_only_after_what_was_sampled_for_it_is_verified() -> None:
    parts, state = Scripted(), RunState(step=4)
    one = ahead(parts, state, 1)
    train(one, state, 1)
    assert 5 in parts.played and not parts.unverified
    one.close()
