"""Starts the ranks of a command on this host, and how the launchers of several hosts meet."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import math
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final
from urllib.parse import urlsplit

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.plain import first_line
from emailrl.base.process import INTERRUPTED, RUN_ID, handled_by, report
from emailrl.ranks.alone import CONTINUE

_LONGEST_CONNECT: Final = 60  # Seconds to connect to the first host, or to wait for one reply from it.
_SECONDS_TO_GIVE_UP: Final = 10  # Seconds after its time is over in which torch's store gives up connecting by itself.
_CONNECTING: Final = ("_create_tcp_store", "StaticTCPRendezvous.next_rendezvous")
"""The functions of torch in which a launcher connects to the store."""
SECONDS_TO_END: Final = 120
"""Seconds after a signal for the ranks to finish the current update and its checkpoint, before they are killed."""
SECONDS_TO_FOLLOW: Final = 10  # Seconds after a signal in which the other ranks end once rank 0 has.
_interrupts: Final[list[BaseException]] = []
"""Kept to the end of the process: freed earlier, their frames free torch's heartbeat, maybe in its own thread, which
then fails to join itself and prints that."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How many ranks, on which hosts, and where the hosts meet."""

    nproc: int = 1  # Ranks on this host.
    nnodes: int = 1
    node_rank: int | None = None  # This host's number; None if the hosts negotiate it.
    rdzv_endpoint: str | None = None  # HOST:PORT of the first host, for rendezvous.
    max_restarts: int = 0
    start_seconds: float = 1800  # How long hosts wait for each other (RANK_START_TIMEOUT).

    def __post_init__(self) -> None:
        if self.nnodes > 1 and not self.rdzv_endpoint:
            hint = "Pass the first host's address and a free port, HOST:PORT."
            raise UsageError(f"--nnodes {self.nnodes} needs --rdzv-endpoint.", hint)
        if self.nnodes == 1 and (self.rdzv_endpoint is not None or self.node_rank is not None):
            raise UsageError("--node-rank and --rdzv-endpoint are for several hosts.", "Add --nnodes, or drop them.")
        if self.node_rank is not None and self.node_rank >= self.nnodes:
            hint = "Hosts are numbered from 0."
            raise UsageError(f"--node-rank {self.node_rank} is too high for --nnodes {self.nnodes}.", hint)
        if self.rdzv_endpoint:
            self._address()

    @property
    def is_needed(self) -> bool:
        """Whether there are ranks to launch, and this process is not one of them."""
        return "TORCHELASTIC_RUN_ID" not in os.environ and (self.nproc > 1 or self.nnodes > 1 or self.max_restarts > 0)

    def _address(self) -> tuple[str, int]:
        try:
            parts = urlsplit(f"//{self.rdzv_endpoint}")
            host, port = parts.hostname, parts.port
        except ValueError:  # no number, too high, or unbalanced brackets
            host = port = None
        if not host or not port or parts.netloc != self.rdzv_endpoint or "@" in parts.netloc:
            hint = "Pass the first host's address and a port from 1 to 65535, such as node0:29500."
            raise UsageError(f"--rdzv-endpoint {self.rdzv_endpoint!r} is not HOST:PORT.", hint)
        return host, port

    def wait_for_address(self, say: Callable[[str], None]) -> None:
        """Wait until the first host's name resolves, as it may still be starting; EmailRLError if it takes too long."""
        (host, port), seconds = self._address(), self.start_seconds
        end = time.monotonic() + seconds
        for attempt in itertools.count():
            try:
                socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                return
            except (OSError, UnicodeError) as error:
                if time.monotonic() >= end:
                    what = f"--rdzv-endpoint: the host {host} has no address after {seconds:g} s ({error})."
                    hint = "Check the name, or raise RANK_START_TIMEOUT if the host needs longer to start."
                    raise EmailRLError(what, hint) from None
            if not attempt:
                say(f"Waiting up to {seconds:g} s (RANK_START_TIMEOUT) for the host {host}, which has no address.")
            time.sleep(min(1.0, max(0.0, end - time.monotonic())))

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Turn torch's errors of hosts that do not meet into an EmailRLError."""
        from torch.distributed import DistError
        from torch.distributed.elastic.rendezvous import RendezvousError

        def failure(reason: str) -> EmailRLError:
            return EmailRLError(
                f"The hosts did not meet at {self.rdzv_endpoint} ({reason}).",
                "Check that the command runs on all hosts, that they reach this address, and that no other program"
                " answers there; see RANK_START_TIMEOUT.",
            )

        def leave_if_stuck() -> None:  # torch's store waits forever for a program that takes connections silently
            frame = None if over.wait(self.start_seconds + _SECONDS_TO_GIVE_UP) else sys._current_frames().get(thread)
            if frame is not None and frame.f_code.co_qualname in _CONNECTING:
                report(f"error: {failure('what listens there does not answer')}")
                os._exit(1)

        over, thread = threading.Event(), threading.get_ident()
        threading.Thread(target=leave_if_stuck, daemon=True).start()
        try:
            yield
        except (RendezvousError, DistError) as error:
            raise failure(first_line(error.__cause__ or error)) from error
        finally:
            over.set()

    def rendezvous(self) -> dict[str, Any]:
        """torchrun's settings for the meeting; a single host needs no address."""
        if not self.rdzv_endpoint:
            here = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "local_addr": "localhost"}
            return {**here, "run_id": f"{RUN_ID}-{uuid.uuid4().hex}"}
        seconds = math.ceil(self.start_seconds)
        backend, limits = "static", {"rank": self.node_rank, "timeout": seconds}
        if self.node_rank is None:
            backend, limits = "c10d", {"join_timeout": seconds, "read_timeout": min(_LONGEST_CONNECT, seconds)}
        own = {"rdzv_backend": backend, "rdzv_configs": limits}
        return {"rdzv_endpoint": self.rdzv_endpoint, "run_id": RUN_ID, **own}


def restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def launch(wanted: Launch, arguments: Sequence[str], say: Callable[[str], None]) -> int:
    """Run ``emailrl`` with these arguments on all ranks of this host; returns the exit code once they have ended.
    ``say`` hears what the first rank could not report. Raises EmailRLError if a signal killed it or hosts do not
    meet."""
    # torch reads it when it is imported. Every failed try to connect is a warning, the last an error with a trace.
    level = os.environ.get("TORCH_CPP_LOG_LEVEL")
    os.environ["TORCH_CPP_LOG_LEVEL"] = level or "FATAL"
    import psutil  # type: ignore[import-untyped]
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ["TORCH_CPP_LOG_LEVEL"] = level or "ERROR"  # of the ranks
    if wanted.rdzv_endpoint:
        wanted.wait_for_address(say)
    logging.disable(logging.ERROR)  # the agent reports a failed rank on many lines
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // wanted.nproc)))
    fields = {field.name for field in dataclasses.fields(LaunchConfig)}
    newer = {"shutdown_timeout": SECONDS_TO_END, "signals_to_handle": "SIGHUP,SIGQUIT"}  # since torch 2.12
    known: dict[str, Any] = {name: value for name, value in newer.items() if name in fields}
    with _signals_passed_on(), tempfile.TemporaryDirectory(prefix="emailrl-ranks-") as folder:
        hosts = {"min_nodes": wanted.nnodes, "max_nodes": wanted.nnodes, "nproc_per_node": wanted.nproc}
        known |= {**hosts, "max_restarts": wanted.max_restarts, **wanted.rendezvous()}
        config = LaunchConfig(**known, logs_specs=DefaultLogsSpecs(log_dir=folder))
        try:
            with wanted.meeting() if wanted.rdzv_endpoint else nullcontext():
                elastic_launch(config, sys.executable)("-m", "emailrl", *arguments)
        except ChildFailedError as failed:
            rank, first = failed.get_first_failure()
            return _report(rank, int(first.exitcode), Path(folder), say)
        except SignalException as interrupt:
            _interrupts.append(interrupt)
            # End the ranks that the agent does not know yet, because the signal came while it started them.
            ranks = psutil.Process().children()
            for each in ranks:
                with suppress(psutil.NoSuchProcess):
                    each.terminate()
            for each in psutil.wait_procs(ranks, SECONDS_TO_END)[1]:
                each.kill()
            return INTERRUPTED
    return 0


def _report(rank: int, code: int, folder: Path, say: Callable[[str], None]) -> int:
    """Report how ``rank`` ended, as far as no rank has; returns the launcher's exit code."""
    attempts = sorted(folder.glob("*/attempt_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    errors = sorted(attempts[-1].glob("*/error.json"), key=lambda path: path.stat().st_mtime) if attempts else []
    printed = any(path.parent.name == "0" for path in errors)
    if code < 0:
        name = signal.Signals(-code).name
        ended = f"Rank {rank} was ended by {name}.{' The host may be out of memory.' if name == 'SIGKILL' else ''}"
        if not printed:
            raise EmailRLError(ended, CONTINUE)
        say(ended)
        return 1
    if not printed and code != INTERRUPTED:
        say(json.loads(errors[0].read_text())["message"] if errors else f"error: Rank {rank} ended with code {code}.")
    return code


@contextmanager
def _signals_passed_on() -> Iterator[None]:
    """The first signal lets the ranks finish their step, the second lets them stop at once, the third kills them."""
    import psutil
    from torch.distributed.elastic.multiprocessing.api import SignalException

    came: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if len(came) == 1:
            if number == signal.SIGINT:
                os.write(2, b"Interrupted: stopping the ranks (press again to stop now without saving).\n")
            threading.Thread(target=_end_without_first, daemon=True).start()
            # SIGTERM for both signals: a rank that does not handle signals yet ends without a traceback.
            raise SignalException("The launcher was interrupted.", signal.SIGTERM)
        for child in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):
                child.send_signal(signal.SIGINT if len(came) == 2 else signal.SIGKILL)

    with handled_by(handle):
        yield


def _end_without_first() -> None:
    """Kill the ranks on rank 0's host that have not ended seconds after it: they work for it alone."""
    import psutil

    seen = time.monotonic()
    while time.monotonic() - seen < SECONDS_TO_FOLLOW:
        time.sleep(0.2)
        living: dict[str, psutil.Process] = {}
        for child in psutil.Process().children():
            with suppress(psutil.Error):  # it has ended
                if (there := child.environ()).get("GROUP_RANK") == "0":
                    living[there["RANK"]] = child
        seen = seen if living and "0" not in living else time.monotonic()
    for child in living.values():
        with suppress(psutil.NoSuchProcess):
            child.kill()
