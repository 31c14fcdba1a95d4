"""Connect the processes that torchrun started into ranks, and disconnect them."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.plain import first_line
from emailrl.base.process import bounded, is_importing
from emailrl.ranks.alone import ALONE, Ranks
from emailrl.ranks.group import RankGroup
from emailrl.ranks.place import Place
from emailrl.settings import Settings


@contextmanager
def joined(settings: Settings, place: Place | None = None) -> Iterator[Ranks]:
    """Connect to the other ranks, if torchrun started any, and disconnect at the end; a single process is `ALONE`.

    Each rank takes the GPU of its local rank. Raises UsageError if a host has fewer GPUs than ranks, EmailRLError if
    the ranks do not connect within RANK_START_TIMEOUT. On rank 0 the loss of another rank interrupts the block, which
    then raises LostRank, also at its end.
    """
    place = place or Place.here()
    if place.world == 1:
        yield ALONE
        return
    import torch.distributed as dist

    ranks = _meet(settings, place)
    ranks.on_stop = _interrupt
    ranks.rest()
    try:
        yield ranks
    except KeyboardInterrupt:
        ranks.raise_failure()
        raise
    finally:
        ranks.on_stop = lambda: None  # losing a rank now interrupts nothing
        ranks.leave()
        if ranks.lost is None and dist.is_initialized():  # closing vLLM ends it
            with bounded():
                dist.destroy_process_group()
    if ranks.lost is not None:  # in the end, after the last work of all
        raise ranks.lost


def _meet(settings: Settings, place: Place) -> RankGroup:
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    on_gpu = settings.model.device != "cpu" and torch.cuda.is_available()
    if on_gpu:
        _check_gpus(settings, place, torch.cuda.device_count())
        torch.cuda.set_device(place.local_rank)
    training = settings.training
    start = timedelta(seconds=training.rank_start_timeout)
    try:
        store, rank, world = next(rendezvous("env://", timeout=start))
        store = PrefixStore(f"attempt/{_attempt(store, place)}", store)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=world, timeout=start
        )
        ranks = RankGroup(place, store, start_seconds=training.rank_start_timeout, seconds=training.rank_timeout)
        if on_gpu:
            # NCCL connects on first use: do it now, not after a rollout.
            ranks.all_reduce(torch.zeros(1, device="cuda"))
    except (RuntimeError, ValueError) as error:
        raise EmailRLError(
            f"Rank {place.rank} of {place.world} failed to meet the others: {first_line(error)}",
            "Check the addresses, GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, and RANK_START_TIMEOUT.",
        ) from error
    return ranks


def _attempt(store: Any, place: Place) -> int:
    """A number unused by earlier attempts, because an agent that restarts its ranks may keep their store.

    Agents on different hosts may count differently, so with several hosts each rank counts for itself.
    """
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return int(store.add(f"attempts/{place.rank}", 1))


def _check_gpus(settings: Settings, place: Place, gpus: int) -> None:
    if place.local_world > gpus:
        raise UsageError(
            f"--nproc {place.local_world} needs {place.local_world} GPUs, but this host has {gpus}.",
            "Lower --nproc, or set EMAILRL_DEVICE=cpu to train on CPUs.",
        )
    if place.local_world > 1 and settings.model.device.startswith("cuda:"):
        raise UsageError(
            f"EMAILRL_DEVICE={settings.model.device} is one GPU, but --nproc {place.local_world} needs one per rank.",
            "Unset it: each rank then takes its own GPU.",
        )


def _interrupt() -> None:
    """Interrupt the main thread once it is not importing, which would swallow that."""
    main = threading.main_thread().ident
    assert main is not None
    while is_importing(sys._current_frames().get(main)):
        time.sleep(0.05)
    signal.pthread_kill(main, signal.SIGINT)
