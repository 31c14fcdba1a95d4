"""Ctrl-C and SIGTERM, from the first line of the command: one line, exit code 130.

Libraries may swallow a KeyboardInterrupt in the middle of their import, or turn it into an error of their own.
"""

from __future__ import annotations

import atexit
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from emailrl.base.ending import speaks

INTERRUPTED: Final = 130
"""The exit code."""
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
RUN_ID: Final = "emailrl"
"""How the run id of `emailrl train --nproc` starts; that launcher reports an interrupt for its ranks."""

TEMPORARY: Final[set[Path]] = set()
"""Files to remove if the process ends at once; those who create them remove them otherwise."""


def install() -> None:
    """From now on the signals raise KeyboardInterrupt, but during an import they end the process at once."""
    for number in SIGNALS:
        signal.signal(number, _interrupt)


@contextmanager
def handled_by(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call ``handle`` for the signals inside the block, which must run in the main thread."""
    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def is_importing(frame: FrameType | None) -> bool:
    """Whether ``frame`` or one of its callers imports a module."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def reports() -> bool:
    """Whether this process reports its interrupt."""
    return speaks() and not os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(RUN_ID)


def leave() -> NoReturn:
    """Report the interrupt and exit at once, without any cleanup but of ``TEMPORARY`` files."""
    for path in TEMPORARY:
        with suppress(OSError):
            path.unlink()
    if reports():
        with suppress(OSError):
            os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def ending() -> None:
    """The interrupt is reported; cleanup (threads, uploads) may take long, so the next signal ends the process."""
    for number in SIGNALS:
        signal.signal(number, _exit)


def _exit(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


def _stay_ended() -> None:
    # What Python does last restores SIGINT's default, which would replace the exit code.
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


atexit.register(_stay_ended)  # before anything else is imported: the first to be registered is the last to be called


def _interrupt(number: int, frame: FrameType | None) -> None:
    if is_importing(frame):
        leave()
    raise KeyboardInterrupt
