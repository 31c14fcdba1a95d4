"""What ranks tell each other, with real processes over gloo; and that one process alone needs none of it."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks.processes import begin, in_ranks, ranked, results, waiting

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.process import install
from emailrl.ranks import ALONE, LostRank, Place, RankGroup, Ranks, joined
from emailrl.settings import TrainingSettings

HUNG = "(did not answer within %g s|stopped responding)"
"""How a hanging rank is described; the latter by a rank that another one has left by then."""


def test_alone_every_method_gives_back_what_it_is_given() -> None:
    tensor = torch.ones(2)
    ALONE.all_reduce(tensor)
    ALONE.check_same("x", "y")
    with ALONE.at_work(), joined(TrainingSettings(), Place()) as ranks:
        assert ranks is ALONE and ranks.is_first and ranks.is_alone
    assert tensor.tolist() == [1, 1]
    assert (ALONE.broadcast(1), ALONE.scatter([2]), ALONE.gather(3), ALONE.collect(4)) == (1, 2, [3], [4])
    assert ALONE.agree(lambda: 5) == 5
    assert ALONE.apart(lambda activity: 6) == 6


def test_objects_and_sums_reach_every_rank(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> Any:
        tensor = torch.full((3,), float(ranks.rank + 1))
        ranks.all_reduce(tensor)
        ranks.check_same("The text", "same")
        first = ranks.is_first
        said = ranks.broadcast({"from": 0} if first else None)
        return (
            said,
            ranks.scatter(["a", "b", "c"] if first else None),
            ranks.gather(ranks.rank),
            ranks.collect(10 * ranks.rank),
            tensor.tolist(),
            ranks.seconds > 0,
        )

    zero, *others = in_ranks(3, ranked(work), tmp_path)
    assert zero == ({"from": 0}, "a", [0, 1, 2], [0, 10, 20], [6, 6, 6], True)
    assert others == [[({"from": 0}, letter, [0, 1, 2], [], [6, 6, 6], True)] for letter in "bc"]


def test_sums_use_one_communicator_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL connects each group at its first sum, which takes seconds and memory of the GPU."""

    def work() -> int:
        groups, honest = set[Any](), dist.all_reduce

        def all_reduce(tensor: torch.Tensor, *, group: Any, **op: Any) -> None:
            groups.update([] if op else [group])  # pulses name an operation
            honest(tensor, group=group, **op)

        monkeypatch.setattr(dist, "all_reduce", all_reduce)
        with joined(waiting()) as ranks:
            for _ in range(2):
                ranks.all_reduce(torch.ones(1))
                ranks.started()
            if isinstance(ranks, RankGroup) and not ranks.is_first:
                ranks.follow(lambda: None)
        return len(groups)

    assert in_ranks(2, work, tmp_path) == [1, 1]


@pytest.mark.parametrize(
    ("failing", "error", "said"),
    [
        (1, UsageError("No such thing.", "Try another."), "Rank 1: No such thing. Try another."),
        (0, OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
    ],
)
def test_an_error_on_one_rank_is_raised_by_rank_0_and_ends_the_others(
    failing: int, error: Exception, said: str, tmp_path: Path
) -> None:
    def work(ranks: Ranks) -> None:
        def fail() -> None:
            if ranks.rank == failing:
                raise error

        ranks.agree(fail)

    zero, *others = in_ranks(3, ranked(work), tmp_path)
    assert isinstance(zero, EmailRLError if failing else OSError) and str(zero) == said
    assert others == [[], []]  # they heard of the end from rank 0, and do not take it for lost


def test_what_differs_between_ranks_is_named(tmp_path: Path) -> None:
    zero, *_ = in_ranks(2, ranked(lambda ranks: ranks.check_same("The adapter", str(ranks.rank))), tmp_path)
    assert "Rank 1: The adapter differs from rank 0's." in str(zero)


def test_a_rank_that_is_killed_while_rank_0_is_busy_interrupts_it_and_is_named(tmp_path: Path) -> None:
    def run() -> Any:
        with joined(waiting(8)) as ranks:
            ranks.started()
            if ranks.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if not ranks.is_first:
                assert isinstance(ranks, RankGroup)
                ranks.follow(lambda: None)
            time.sleep(600)

    zero, one, two = in_ranks(3, run, tmp_path)
    assert one is None and isinstance(zero, LostRank) and isinstance(two, LostRank)
    assert "Rank 1 of 3 ended or stopped responding." in str(zero)


@pytest.mark.parametrize("moment", ["waiting", "working"])
def test_a_rank_that_hangs_ends_the_others_within_the_limit(moment: str, tmp_path: Path) -> None:
    def run() -> Any:
        with joined(waiting(6)) as ranks:
            ranks.started()
            if ranks.is_first:
                if moment == "waiting":
                    time.sleep(600)
                with ranks.at_work():
                    return ranks.gather(1)
            assert isinstance(ranks, RankGroup)
            if ranks.rank == 2 and moment == "waiting":
                os.kill(os.getpid(), signal.SIGSTOP)

            def work() -> None:
                if ranks.rank == 2:
                    os.kill(os.getpid(), signal.SIGSTOP)
                ranks.gather(1)

            ranks.follow(work)

    children = begin(3, run, tmp_path)
    try:
        zero, one = results(children[:2], tmp_path)
    finally:
        os.kill(children[2], signal.SIGKILL)
        os.waitpid(children[2], 0)
    assert isinstance(zero, LostRank) and isinstance(one, LostRank)
    assert re.search(f"Rank 2 of 3 ended or {HUNG % 6}", str(zero))


def test_a_rank_asked_to_stop_lets_rank_0_know(tmp_path: Path) -> None:
    def run() -> Any:
        heard: list[float] = []
        told = Event()
        with joined(waiting(8)) as ranks:
            ranks.started()
            assert isinstance(ranks, RankGroup)
            if not ranks.is_first:
                ranks.stop()
                return ranks.follow(lambda: None)
            ranks.on_stop = lambda: (heard.append(time.monotonic()), told.set())
            assert told.wait(300)
            time.sleep(3)  # another pulse
        return len(heard)

    assert in_ranks(2, run, tmp_path) == [1, None]


def test_a_signal_ends_a_rank_whose_partner_is_gone_before_they_have_met(tmp_path: Path) -> None:
    """Without that, it sits in native code for RANK_START_TIMEOUT, and the launcher waits for it."""

    def run() -> None:
        if os.environ["RANK"] == "1":
            dist.new_group = lambda *args, **named: os._exit(1)  # type: ignore[assignment]
        else:
            install()
        with joined(waiting()):
            pass

    first, second = begin(2, run, tmp_path)
    assert os.waitpid(second, 0) == (second, 1 << 8)
    time.sleep(1)
    os.kill(first, signal.SIGTERM)
    begun = time.monotonic()
    assert os.waitpid(first, 0) == (first, signal.SIGTERM) and time.monotonic() - begun < 120


def test_ranks_that_do_not_meet_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    short = TrainingSettings(rank_start_timeout=2)
    with (
        pytest.raises(EmailRLError, match="Rank 1 of 2 failed to meet the others") as raised,
        joined(short, Place(1, 2)),
    ):
        pass
    assert "RANK_START_TIMEOUT" in raised.value.hint
