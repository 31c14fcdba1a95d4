"""``--nproc N``: run this command as N ranks, started and supervised by torchrun's agent.

One rank per host prints errors (`emailrl.cli.output.fail`) and records that in a file. The launcher adds the signal
that killed a rank, which the other ranks cannot know, and reports an error only if no rank could.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from emailrl.errors import EmailRLError, UsageError

SECONDS_TO_END: Final = 120
"""Seconds after a signal for the ranks to finish the current update and its checkpoint, before they are killed."""
INTERRUPTED: Final = 130


@dataclass(frozen=True, slots=True)
class Launch:
    """How many ranks, on which hosts."""

    nproc: int = 1
    """Ranks on this host."""
    nnodes: int = 1
    node_rank: int | None = None
    """This host's number; None if the hosts negotiate it."""
    rdzv_endpoint: str | None = None
    """HOST:PORT of the first host, for rendezvous."""
    max_restarts: int = 0

    def __post_init__(self) -> None:
        if self.nnodes > 1 and self.rdzv_endpoint is None:
            raise UsageError(
                f"--nnodes {self.nnodes} needs --rdzv-endpoint.",
                "Pass the first host's address and a free port, HOST:PORT.",
            )
        if self.nnodes == 1 and (self.rdzv_endpoint is not None or self.node_rank is not None):
            raise UsageError("--node-rank and --rdzv-endpoint are for several hosts.", "Add --nnodes, or drop them.")
        if self.node_rank is not None and self.node_rank >= self.nnodes:
            raise UsageError(
                f"--node-rank {self.node_rank} is too high for --nnodes {self.nnodes}.", "Hosts are numbered from 0."
            )

    @property
    def is_needed(self) -> bool:
        """Whether there are ranks to launch, and this process is not one of them."""
        return "TORCHELASTIC_RUN_ID" not in os.environ and (self.nproc > 1 or self.nnodes > 1 or self.max_restarts > 0)


def restarts() -> int:
    """How often the agent has restarted this process's ranks."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def launch(wanted: Launch, arguments: Sequence[str], say: Callable[[str], None]) -> int:
    """Run ``emailrl`` with these arguments on all ranks of this host; returns the exit code once they have ended.

    ``say`` hears which signal killed a rank. Raises EmailRLError if no other rank could report that it was lost.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.ERROR)  # the agent reports a failed rank on many lines
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // wanted.nproc)))
    fields = {field.name for field in dataclasses.fields(LaunchConfig)}
    known: dict[str, Any] = (
        {"shutdown_timeout": SECONDS_TO_END} if "shutdown_timeout" in fields else {}
    )  # since torch 2.12
    with tempfile.TemporaryDirectory(prefix="emailrl-ranks-") as folder:
        config = LaunchConfig(
            min_nodes=wanted.nnodes,
            max_nodes=wanted.nnodes,
            nproc_per_node=wanted.nproc,
            max_restarts=wanted.max_restarts,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            **_meeting(wanted),
            **known,
        )
        try:
            elastic_launch(config, sys.executable)("-m", "emailrl", *arguments)
        except ChildFailedError as failed:
            rank, first = failed.get_first_failure()
            if first.exitcode < 0:
                ended = _ended(rank, -first.exitcode)
                if not any(Path(folder).rglob("error.json")):
                    raise EmailRLError(ended, "Continue from the last checkpoint: --resume latest.") from None
                say(ended)
            return int(first.exitcode) if first.exitcode > 0 else 1
        except SignalException:
            return INTERRUPTED
    return 0


def _meeting(wanted: Launch) -> dict[str, Any]:
    """Rendezvous settings for the hosts' agents; a single host needs none."""
    if wanted.nnodes == 1:
        here = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "local_addr": "localhost"}
        return {**here, "run_id": uuid.uuid4().hex}
    meeting: dict[str, Any] = {"rdzv_endpoint": wanted.rdzv_endpoint, "run_id": "emailrl"}
    if wanted.node_rank is None:
        return {**meeting, "rdzv_backend": "c10d"}
    return {**meeting, "rdzv_backend": "static", "rdzv_configs": {"rank": wanted.node_rank}}


def _ended(rank: int, number: int) -> str:
    name = signal.Signals(number).name
    memory = " The host may be out of memory." if name == "SIGKILL" else ""
    return f"Rank {rank} was ended by {name}.{memory}"
