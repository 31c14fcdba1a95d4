"""Ranks that work on their own: progress, errors, hangs and losses, with real processes over gloo."""

from __future__ import annotations

import os
import re
import signal
import time
from itertools import count
from pathlib import Path

import pytest
from ranks.processes import begin, in_ranks, ranked, results

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.ranks import Activity, LostRank, Ranks


def busy(activity: Activity, seconds: float) -> None:
    """Make progress for so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        activity.note("sampling")
        time.sleep(0.1)


def test_work_may_take_longer_than_ranks_wait_for_each_other(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> list[int]:
        def slow(activity: Activity) -> int:
            busy(activity, 8 * (ranks.rank == 2))
            return ranks.rank

        return ranks.collect(ranks.apart(slow))

    assert in_ranks(3, ranked(work, seconds=4), tmp_path) == [[0, 1, 2], [[]], [[]]]


@pytest.mark.parametrize(
    ("failing", "after", "others", "error", "said"),
    [
        (1, 0, 600, UsageError("No such thing.", "Try another."), "Rank 1: No such thing. Try another."),
        (1, 3, 0, ZeroDivisionError("by zero\nand more"), "Rank 1: ZeroDivisionError: by zero"),  # 0 has done its part
        (0, 0, 600, UsageError("No more."), "No more."),
    ],
)
def test_an_error_of_one_rank_ends_all_at_once(
    failing: int, after: float, others: float, error: Exception, said: str, tmp_path: Path
) -> None:
    def work(ranks: Ranks) -> None:
        def fail(activity: Activity) -> None:
            busy(activity, after if ranks.rank == failing else others)
            if ranks.rank == failing:
                raise error

        ranks.apart(fail)

    zero, *rest = in_ranks(3, ranked(work), tmp_path)
    assert isinstance(zero, EmailRLError) and str(zero) == said
    assert rest == [[], []]


@pytest.mark.parametrize("which", [0, 1])
def test_a_rank_without_progress_is_named_with_what_it_does(which: int, tmp_path: Path) -> None:
    def work(ranks: Ranks) -> None:
        def hang(activity: Activity) -> None:
            if ranks.rank == which:
                activity.note("in the environment of train-1")
                time.sleep(600)
            busy(activity, 600)

        ranks.apart(hang)

    zero, *others = in_ranks(3, ranked(work, seconds=4), tmp_path)
    assert isinstance(zero, EmailRLError) and not isinstance(zero, LostRank)
    expected = f"Rollouts on rank {which} of 3 made no progress for 4 s: in the environment of train-1."
    assert zero.message == expected and "RANK_TIMEOUT" in zero.hint and "--resume latest" in zero.hint
    assert others == [[], []]


def test_of_ranks_that_wait_for_each_other_the_first_to_stop_is_named(tmp_path: Path) -> None:
    """As with one engine for both: what the others wait for is the cause."""

    def work(ranks: Ranks) -> None:
        def hang(activity: Activity) -> None:
            if ranks.rank == 0:
                busy(activity, 0.5)
            activity.note("sampling" if ranks.rank == 0 else "in the environment of train-1")
            time.sleep(600)

        ranks.apart(hang)

    zero, _ = in_ranks(2, ranked(work, seconds=4), tmp_path)
    assert str(zero).startswith("Rollouts on rank 1 of 2 made no progress")


def test_progress_in_the_moment_of_the_report_does_not_undo_it(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> None:
        def hesitate(activity: Activity) -> None:
            if ranks.rank == 1:
                end, looks = time.monotonic() + 4, count()
                activity.note("sampling", lambda: time.monotonic() > end and next(looks))  # moves at the second look
                time.sleep(8)
            busy(activity, 600)

        ranks.apart(hesitate)

    zero, one = in_ranks(2, ranked(work, seconds=4), tmp_path)
    assert str(zero).startswith("Rollouts on rank 1 of 2 made no progress for 4 s: sampling.") and one == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("waiting", "seconds", "said"),
    [
        (0, 30, "error: Rank 1 of 2 ended or stopped responding."),
        (1, 4, "error: Rollouts on rank 0 of 2 made no progress for 4 s: starting. If that may"),
    ],
)
def test_rank_0_that_no_signal_interrupts_prints_the_line_and_exits(
    waiting: int, seconds: float, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As in native code: in a collective of an engine that both share, the other rank lost or waiting."""

    def work(ranks: Ranks) -> None:
        def hang(activity: Activity) -> None:
            if ranks.is_first:
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
                time.sleep(600)
            busy(activity, 600) if waiting else os.kill(os.getpid(), signal.SIGKILL)

        ranks.apart(hang)

    zero, one = in_ranks(2, ranked(work, seconds=seconds), tmp_path)
    assert zero is None and isinstance(one, LostRank) == bool(waiting)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert line.startswith(said)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_interrupts_the_others(number: signal.Signals, tmp_path: Path) -> None:
    def work(ranks: Ranks) -> None:
        ranks.apart(lambda activity: os.kill(os.getpid(), number) if ranks.rank == 1 else busy(activity, 600))

    children = begin(3, ranked(work, seconds=6), tmp_path)
    try:
        zero = results(children[:1], tmp_path)[0]
        waited = os.waitpid(children[2], 0)
    finally:
        os.kill(children[1], signal.SIGKILL)
        os.waitpid(children[1], 0)
    hung = "(did not answer within 6 s|stopped responding)"
    assert isinstance(zero, LostRank) and re.search(rf"Rank 1 of 3 ended or {hung}\.", zero.message)
    assert waited[1] == 0
