"""Adopt and end processes whose parent has died; does nothing outside Linux, which vLLM does not support."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_prctl: Callable[..., int] = ctypes.CDLL(None).prctl if sys.platform == "linux" else lambda *_: 0


def adopt_orphans() -> None:
    """From now on, a descendant whose parent dies becomes a child of this process, whatever its session or group."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent() -> None:
    """Kill this process as soon as its parent dies."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_children(besides: Collection[int] = ()) -> None:
    """Kill this process's children, and theirs as they are adopted, and wait until all have ended."""
    listed = Path(f"/proc/self/task/{os.getpid()}/children")
    while listed.exists() and (children := [int(pid) for pid in listed.read_text().split() if int(pid) not in besides]):
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for child in children:
            with suppress(ChildProcessError):
                os.waitpid(child, 0)
