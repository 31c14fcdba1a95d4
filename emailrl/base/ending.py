"""How a process ends: its last line, and an exit within seconds whatever foreign code (vLLM, CUDA) does.

Normally, Python waits for threads and runs destructors. One that hangs in native code blocks the interpreter: no signal
handler runs any more, not even for Ctrl-C, and only SIGKILL helps.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

SECONDS: Final = 15.0
"""Maximum time for closing an engine or exiting the process."""


def speaks(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process reports its outcome: of the ranks on a host, only the first."""
    rank, world, local = (environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if not (rank.isdecimal() and world.isdecimal() and local.isdecimal()):
        return True  # no rank
    return not 0 < int(local) <= int(rank) < int(world)


def report(line: str) -> None:
    """Print the error that ends this process, if it ``speaks``, and record it for the launcher of its rank."""
    from emailrl.base.plain import tell  # not at the top: no import goes before ``ctrl_c``'s

    if speaks():
        tell(line)
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
    """Let a process that imports one of ``modules`` in the block exit without waiting for what they leave behind.

    When a SystemExit leaves the block, threads and exit handlers have ``seconds``; destructors do not run. Only for the
    outermost call of a program.
    """
    code = 1
    before = [name for name in modules if name in sys.modules]

    def leave() -> None:
        if sys.stdout is not None:
            sys.stdout.flush()
        if sys.stderr is not None:
            sys.stderr.flush()
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
