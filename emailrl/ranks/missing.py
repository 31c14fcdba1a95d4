"""Find which rank is missing: each remaining rank leaves a mark in the store and checks whose mark is absent.

It also has missing ranks of its host killed if they hang: torchrun's agent sends them SIGTERM and waits 30 s or more.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from emailrl.disk import replace_bytes

SECONDS_TO_REPORT: Final = 3.0
"""How long a rank waits for the marks of the others after losing one."""

SECONDS_TO_FOLLOW: Final = 5.0
"""How long a missing rank, once one that missed it has ended, may take to end or notice that before it is killed."""

_ERROR_FILE: Final = "TORCHELASTIC_ERROR_FILE"
_NOTE: Final = "awake"
"""Beside the error file of a rank that has itself noticed the loss of another."""


def missing_ranks(store: Any, rank: int, world: int) -> list[int] | None:
    """Ranks that leave no mark in the store; None if the store itself is unreachable.

    Runs in a thread: a request to an unreachable host never returns.
    """
    found: list[list[int]] = []
    keys = [f"lost/{each}" for each in range(world)]

    def look() -> None:
        end = time.monotonic() + SECONDS_TO_REPORT
        with suppress(RuntimeError):
            store.set(keys[rank], "1")
            while True:
                missing = [each for each, key in enumerate(keys) if not store.check([key])]
                if not missing or time.monotonic() >= end:
                    found.append(missing)
                    return
                time.sleep(0.1)

    thread = threading.Thread(target=look, name="missing", daemon=True)
    thread.start()
    thread.join(SECONDS_TO_REPORT + 2)
    return found[0] if found else None


def note_missing(ranks: list[int]) -> None:
    """Record that this rank is awake, and let a process kill those of ``ranks`` on this host that are not.

    It does so seconds after this rank has ended and reported its error.
    """
    import psutil  # type: ignore[import-untyped]

    file = os.environ.get(_ERROR_FILE)
    if not file:
        return
    replace_bytes(Path(file).with_name(_NOTE), b"")
    beside = [child.pid for child in psutil.Process(os.getppid()).children() if _rank_of(child) in ranks]
    if beside:
        subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import kill_hung; kill_hung({os.getpid()}, {beside})"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,  # the agent ends the whole session of a rank
        )  # fmt: skip


def kill_hung(parent: int, pids: list[int]) -> None:
    """Once ``parent`` has ended, kill its sibling ranks ``pids`` that do not end and are not awake."""
    import psutil

    hung = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            hung.append(psutil.Process(pid))
    while os.getppid() == parent:
        time.sleep(0.1)
    for process in hung:
        with suppress(psutil.Error):
            if process.status() == psutil.STATUS_STOPPED:  # no signal but this one reaches it
                process.kill()
    for process in psutil.wait_procs(hung, SECONDS_TO_FOLLOW)[1]:
        with suppress(psutil.Error):
            if not Path(process.environ()[_ERROR_FILE]).with_name(_NOTE).exists():
                process.kill()


def _rank_of(process: Any) -> int | None:
    import psutil

    try:
        environ = process.environ()
    except psutil.Error:
        return None
    return int(environ["RANK"]) if _ERROR_FILE in environ else None
