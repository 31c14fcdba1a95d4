"""This process: Ctrl-C and SIGTERM from the first line of the command, its last line, and an exit within seconds.

Libraries may swallow a KeyboardInterrupt while they are imported. And at its end Python waits for threads and runs
destructors: one that hangs in native code (vLLM, CUDA) blocks even signal handlers, and only SIGKILL helps.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

INTERRUPTED: Final = 130  # the exit code after a signal
_HANGUP: Final = (signal.SIGHUP,) if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else ()  # ignored under nohup
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, *_HANGUP)
RUN_ID: Final = "emailrl"
"""How the run id of `emailrl train --nproc` starts; that launcher reports an interrupt for its ranks."""
TEMPORARY: Final[set[Path]] = set()
"""Files to remove if the process ends at once; those who create them remove them otherwise."""
SECONDS: Final = 15.0  # maximum time for closing an engine or exiting the process


def speaks(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process reports its outcome: of the ranks on a host, only the first."""
    rank, world, local = (environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if not (rank.isdecimal() and world.isdecimal() and local.isdecimal()):
        return True  # no rank
    return not 0 < int(local) <= int(rank) < int(world)


def install() -> None:
    """From now on the signals raise KeyboardInterrupt, but during an import they end the process at once."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # Ray blocks SIGINT
    for number in SIGNALS:
        signal.signal(number, _interrupt)


@contextmanager
def handled_by(
    handle: Callable[[int, FrameType | None], None] | signal.Handlers, signals: Iterable[signal.Signals] = SIGNALS
) -> Iterator[None]:
    """Let ``handle`` take the signals inside the block, which must run in the main thread."""
    before = {number: signal.signal(number, handle) for number in signals}
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
    """All is reported; cleanup (threads, uploads, exit handlers) may take long, so a signal ends the process."""
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


def report(line: str, say: Callable[[str], None] | None = None) -> None:
    """Print or ``say`` the error that ends this process, if it ``speaks``, and record it for its rank's launcher."""
    from emailrl.base.plain import tell  # not at the top: no import goes before this module's

    if speaks():
        (say or tell)(line)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        Path(file).write_text(json.dumps({"message": line, "timestamp": int(time.time())}))


@contextmanager
def bounded(seconds: float = SECONDS) -> Iterator[None]:
    """End the process with exit code 1 if the block takes longer; stderr then shows every thread's stack."""
    _arm(seconds)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def ending_with(*modules: str, seconds: float = SECONDS) -> Iterator[None]:
    """Let a process that imports one of ``modules`` in the block exit without waiting for what they leave behind. When
    a SystemExit leaves the block, threads and exit handlers have ``seconds``; destructors do not run."""
    code = 1
    before = [name for name in modules if name in sys.modules]

    def leave() -> None:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        os._exit(code)

    atexit.register(leave)  # before the modules register theirs: the first to come is the last to be called
    try:
        yield
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        raise
    finally:
        if any(name in sys.modules for name in modules if name not in before):
            _arm(seconds)
        else:
            atexit.unregister(leave)


def _arm(seconds: float) -> None:
    # A watchdog of C's: it needs neither the interpreter nor its lock.
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or sys.stderr)
