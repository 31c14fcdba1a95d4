"""How the launchers of several hosts meet: the address that all are given, and for how long they wait."""

from __future__ import annotations

import math
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from emailrl.ctrl_c import RUN_ID
from emailrl.ending import report
from emailrl.errors import EmailRLError, UsageError
from emailrl.plain import first_line

_LONGEST_CONNECT: Final = 60
"""Seconds to connect to the first host, or to wait for one reply from it."""
_SECONDS_TO_GIVE_UP: Final = 10
"""Seconds after its time is over in which torch's store gives up connecting by itself."""
_CONNECTING: Final = ("_create_tcp_store", "StaticTCPRendezvous.next_rendezvous")
"""The functions of torch in which a launcher connects to the store."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the hosts meet."""

    endpoint: str
    """HOST:PORT of the first host."""
    seconds: float
    """How long they wait for each other."""
    node_rank: int | None = None
    """This host's number; None if the hosts negotiate it."""

    def __post_init__(self) -> None:
        self._parts()

    def _parts(self) -> tuple[str, int]:
        try:
            parts = urlsplit(f"//{self.endpoint}")
            host, port = parts.hostname, parts.port
        except ValueError:  # no number, too high, or unbalanced brackets
            host = port = None
        if not host or not port or parts.netloc != self.endpoint or "@" in self.endpoint:
            raise UsageError(
                f"--rdzv-endpoint {self.endpoint!r} is not HOST:PORT.",
                "Pass the first host's address and a port from 1 to 65535, such as node0:29500.",
            )
        return host, port

    def wait_for_address(self, say: Callable[[str], None]) -> None:
        """Wait until the first host's name resolves, as it may still be starting; EmailRLError after ``seconds``."""
        host, port = self._parts()
        end, said = time.monotonic() + self.seconds, False
        while True:
            try:
                socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                return
            except (OSError, UnicodeError) as error:
                if time.monotonic() >= end:
                    raise EmailRLError(
                        f"--rdzv-endpoint: the host {host} has no address after {self.seconds:g} s ({error}).",
                        "Check the name, or raise RANK_START_TIMEOUT if the host needs longer to start.",
                    ) from None
            if not said:
                say(f"Waiting up to {self.seconds:g} s (RANK_START_TIMEOUT) for the host {host}, which has no address.")
                said = True
            time.sleep(min(1.0, max(0.0, end - time.monotonic())))

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Turn torch's errors of hosts that do not meet into an EmailRLError."""
        from torch.distributed import DistError
        from torch.distributed.elastic.rendezvous import RendezvousError

        over = threading.Event()
        threading.Thread(target=self._leave_if_stuck, args=(threading.get_ident(), over), daemon=True).start()
        try:
            yield
        except (RendezvousError, DistError) as error:
            raise self._failure(first_line(error.__cause__ or error)) from error
        finally:
            over.set()

    def _failure(self, reason: str) -> EmailRLError:
        return EmailRLError(
            f"The hosts did not meet at {self.endpoint} ({reason}).",
            "Check that the command runs on all hosts, that they reach this address, and that no other program"
            " answers there; see RANK_START_TIMEOUT.",
        )

    def _leave_if_stuck(self, thread: int, over: threading.Event) -> None:
        """Exit if torch's store is still connecting: it waits forever for a program that takes connections silently."""
        if over.wait(self.seconds + _SECONDS_TO_GIVE_UP):
            return
        frame = sys._current_frames().get(thread)
        if frame is not None and frame.f_code.co_qualname in _CONNECTING:
            report(f"error: {self._failure('what listens there does not answer')}")
            os._exit(1)

    def config(self) -> dict[str, Any]:
        """torchrun's settings for it."""
        seconds = math.ceil(self.seconds)
        meeting: dict[str, Any] = {"rdzv_endpoint": self.endpoint, "run_id": RUN_ID}
        if self.node_rank is None:
            limits = {"join_timeout": seconds, "read_timeout": min(_LONGEST_CONNECT, seconds)}
            return {**meeting, "rdzv_backend": "c10d", "rdzv_configs": limits}
        own = {"rank": self.node_rank, "timeout": seconds}
        return {**meeting, "rdzv_backend": "static", "rdzv_configs": own}


def alone() -> dict[str, Any]:
    """torchrun's settings for a single host, which needs no address."""
    here = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "local_addr": "localhost"}
    return {**here, "run_id": f"{RUN_ID}-{uuid.uuid4().hex}"}
