"""Find which rank is missing: each remaining rank leaves a mark in the store and checks whose mark is absent.

It also notes the missing ranks in a file for the launcher of its host, which kills those that hang: torchrun's agent
sends them SIGTERM, waits 30 s, and has no setting for that.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from emailrl.disk import replace_bytes

SECONDS_TO_REPORT: Final = 3.0
"""How long a rank waits for the marks of the others after losing one."""

SECONDS_TO_FOLLOW: Final = 5.0
"""How long a missing rank, once another has reported it, may take to notice that itself before it is killed."""

_ERROR_FILE: Final = "TORCHELASTIC_ERROR_FILE"
_NOTE: Final = "missing.json"


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
    """Record for the launcher, if there is one, that this rank is alive and misses ``ranks``."""
    if file := os.environ.get(_ERROR_FILE):
        replace_bytes(Path(file).with_name(_NOTE), json.dumps(ranks).encode())


@contextmanager
def hung_ranks_killed(folder: Path) -> Iterator[None]:
    """In the block, kill child ranks that another rank of this host missed when it ended, unless they note that too.

    ``folder`` has a folder per attempt with one per rank, for its error file and its note.
    """
    done = threading.Event()
    thread = threading.Thread(target=_kill_hung, args=(folder, done), name="hung", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _kill_hung(folder: Path, done: threading.Event) -> None:
    import psutil  # type: ignore[import-untyped]

    ended: dict[Path, float] = {}
    while not done.wait(0.5):
        for error in folder.glob("*/attempt_*/*/error.json"):
            note = error.with_name(_NOTE)
            if time.monotonic() - ended.setdefault(error, time.monotonic()) < SECONDS_TO_FOLLOW or not note.exists():
                continue
            for child in psutil.Process().children():
                with suppress(psutil.Error):
                    if _is_hung(child.environ(), note):
                        child.kill()


def _is_hung(environ: dict[str, str], note: Path) -> bool:
    """Whether the rank with these variables is of the note's attempt, is missing there and has no note of its own."""
    file = Path(environ.get(_ERROR_FILE, ""))
    if file.parent.parent != note.parent.parent or file.with_name(_NOTE).exists():
        return False
    return int(environ["RANK"]) in json.loads(note.read_text())
