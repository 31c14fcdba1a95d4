"""Find which rank is missing: each remaining rank leaves a mark in the store and checks whose mark is absent."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any, Final

SECONDS_TO_REPORT: Final = 3.0
"""How long a rank waits for the marks of the others after losing one."""


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
