"""One supervised server: start, health checks, stop, and cause of death."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx

from emailrl.errors import UsageError
from emailrl.plain import cut, one_line

GRACE = 5.0
"""Seconds from SIGTERM to SIGKILL."""
HEALTH_TIMEOUT = 10.0
"""Timeout of a health check, in seconds."""
MISSED = 3
"""Consecutive failed health checks after which a server counts as hung."""
LAST_PORT = 65535
TOLD = 300
"""Characters of the log quoted when a server dies."""
READ = 1 << 17
"""Bytes of the log's end searched for the error: vLLM prints long tracebacks of several processes after it."""
_CAUSE: Final = re.compile(r"(?:^|[ )])([\w.]*(?:Error|Exception): (?!.*See (?:root cause|stack trace)).+)")
"""An error in a traceback, but not vLLM's line that only refers to another."""


@dataclass
class Server:
    """A server on its own port; ``log`` gets all its output, across restarts."""

    url: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    starts: int = 0
    was_well: bool = False
    """Since its last start."""
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _missed: int = field(default=0, init=False)
    _log_start: int = field(default=0, init=False)

    def start(self) -> None:
        """Start it under a keeper, which stops it when this process ends."""
        self.starts, self.was_well, self._missed = self.starts + 1, False, 0
        with self.log.open("ab") as log:
            self._log_start = log.seek(0, os.SEEK_END)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "emailrl.serving.keeper", str(GRACE), *self.command],
                stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=dict(self.environment),
                start_new_session=True,
            )  # fmt: skip

    def check(self) -> str | None:
        """Why it is dead or hung, None while starting or healthy; records when it becomes healthy."""
        assert self._process is not None
        if (code := self._process.poll()) is not None:
            return f"{_ending(code)}: {self._last_words()}"
        if self._answers():
            self.was_well, self._missed = True, 0
        elif self.was_well:
            self._missed += 1
        return None if self._missed < MISSED else f"it answered none of {MISSED} health checks: {self._last_words()}"

    @property
    def keeper(self) -> int | None:
        """The process id of its keeper; None before the first start."""
        return None if self._process is None else self._process.pid

    def release(self) -> None:
        """Tell its keeper to stop it, without waiting."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def end(self) -> bool:
        """Stop it and wait for its keeper; False if the keeper was killed, so that processes of it may be left."""
        self.release()
        return self._process is None or self._process.wait() >= 0

    def _answers(self) -> bool:
        try:  # every second: reading the certificates, which http does not use, takes ten times as long as the rest
            reply = httpx.get(f"{self.url}/health", timeout=HEALTH_TIMEOUT, trust_env=False, verify=False)
            return reply.status_code == 200
        except httpx.HTTPError:
            return False

    def _last_words(self) -> str:
        """The error that ended it, else the end of its output since its last start, on one line."""
        with self.log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, size - READ))
            lines = log.read().decode(errors="replace").splitlines()
        causes = [found[1] for line in lines if (found := _CAUSE.search(line))]
        if causes:
            return cut(one_line(causes[-1]), TOLD)
        text = one_line(" | ".join(line.strip() for line in lines if line.strip()))
        return f"{'…' if len(text) > TOLD else ''}{text[-TOLD:]}" or "it printed nothing"


def _ending(code: int) -> str:
    if code < 0:
        return f"its keeper was killed by {signal.Signals(-code).name}"
    signals = {128 + number: number.name for number in signal.Signals}
    return f"killed by {signals[code]}" if code in signals else f"exit code {code}"


def check_port(host: str, port: int) -> None:
    """Raise UsageError for an address that is not this machine's, or a port that does not exist or is in use."""
    if port > LAST_PORT:
        raise UsageError(f"The servers' ports would go up to {port}; the last one is {LAST_PORT}.", "Lower --port.")
    try:
        if not host:
            raise ValueError("it is empty")
        [(family, _, _, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:  # ValueError: the name has a part of more than 63 characters
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"--host {host!r} is not an address: {reason}.", "Use 127.0.0.1, 0.0.0.0 (all addresses), or ::1 for IPv6."
        ) from None
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            other = error.errno == errno.EADDRNOTAVAIL
            raise UsageError(
                f"Port {port} on {host} cannot be used: {error.strerror}.",
                "Choose an address of this machine as --host." if other else "Choose another --port.",
            ) from None
