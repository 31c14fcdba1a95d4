"""Ranks as forked processes of this machine, which meet over gloo as under torchrun."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from emailrl.ranks import RankGroup, Ranks, joined
from emailrl.settings import TrainingSettings


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def begin(world: int, work: Callable[[], Any], folder: Path) -> list[int]:
    """Fork ``world`` ranks that do ``work`` and leave its result, or what it raised, in ``folder``; their pids."""
    port = free_port()
    return [_fork(rank, world, port, work, folder) for rank in range(world)]


def in_ranks(world: int, work: Callable[[], Any], folder: Path, *, seconds: float = 300) -> list[Any]:
    """What ``work`` returned on each rank, or the exception it raised; None for a rank that was killed."""
    return results(begin(world, work, folder), folder, seconds=seconds)


def results(children: list[int], folder: Path, *, seconds: float = 300) -> list[Any]:
    """Wait for the ranks; those that have not ended in time are killed, and fail the test."""
    end, left = time.monotonic() + seconds, set(children)
    while left and time.monotonic() < end:
        left -= {child for child in left if os.waitpid(child, os.WNOHANG)[0]}
        time.sleep(0.02)
    for child in left:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert not left, f"{len(left)} of {len(children)} ranks had not ended after {seconds:g} s"
    found = [folder / f"rank-{rank}.pickle" for rank in range(len(children))]
    return [pickle.loads(path.read_bytes()) if path.exists() else None for path in found]


def waiting(seconds: float = 300) -> TrainingSettings:
    """Settings with this RANK_TIMEOUT."""
    return TrainingSettings(rank_timeout=seconds, rank_start_timeout=300)


def ranked(work: Callable[[Ranks], Any], seconds: float = 300) -> Callable[[], Any]:
    """``work`` of a rank that has met the others: rank 0 calls the rest to it."""

    def run() -> Any:
        with joined(waiting(seconds)) as ranks:
            ranks.started()
            if ranks.is_first:
                with ranks.at_work():
                    return work(ranks)
            found: list[Any] = []
            assert isinstance(ranks, RankGroup)
            ranks.follow(lambda: found.append(work(ranks)))
            return found

    return run


def _fork(rank: int, world: int, port: int, work: Callable[[], Any], folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    try:
        torch.set_num_threads(1)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
        try:
            result = work()
        except BaseException as error:
            traceback.print_exc()
            result = error
        beside = folder / f".rank-{rank}"
        beside.write_bytes(pickle.dumps(result))
        beside.rename(folder / f"rank-{rank}.pickle")
        sys.stderr.flush()
    finally:
        os._exit(0)
