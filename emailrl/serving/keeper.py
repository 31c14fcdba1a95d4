"""Run one server, and end everything it started as soon as its parent process ends for any reason::

    python -m emailrl.serving.keeper SECONDS COMMAND ...

Only the parent holds the other end of standard input: it closes when the parent closes it or dies, even by SIGKILL.
The server then gets SIGTERM, SECONDS to end, and SIGKILL. Processes left by a dead server (vLLM's engine process holds
GPU memory) are adopted and killed too. Exits with the server's exit code, or 128 + N for signal N.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def keep(command: Sequence[str], grace: float) -> int:
    """Run ``command`` in its own session until it or standard input ends; returns its exit code."""
    set_process = _prctl()
    set_process(PR_SET_CHILD_SUBREAPER, 1)
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        # Killing the keeper ends the server too. Nothing else runs here between fork and exec.
        preexec_fn=lambda: set_process(PR_SET_PDEATHSIG, signal.SIGTERM),
    )
    threading.Thread(target=_end_when_released, args=(server.pid, grace), daemon=True).start()
    code = server.wait()
    _remove_rest(server.pid)
    return code if code >= 0 else 128 - code


def _prctl():  # type: ignore[no-untyped-def]
    """Linux's ``prctl``; on other systems, which vLLM does not support, only the process group ends with the server."""
    if sys.platform != "linux":
        return lambda *_: 0
    return ctypes.CDLL(None, use_errno=True).prctl


def _end_when_released(server: int, grace: float) -> None:
    while os.read(0, 1):  # not sys.stdin: interpreter shutdown would wait for its lock
        pass
    with suppress(ProcessLookupError):
        os.killpg(server, signal.SIGTERM)
    threading.Event().wait(grace)  # the process exits earlier if the server does
    with suppress(ProcessLookupError):
        os.killpg(server, signal.SIGKILL)


def _remove_rest(server: int) -> None:
    """Kill the server's group and processes that left it: orphans are now this process's children."""
    with suppress(ProcessLookupError):
        os.killpg(server, signal.SIGKILL)
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    with suppress(ChildProcessError):  # none is left
        while True:
            for child in children.read_text().split() if children.exists() else ():
                with suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)
            os.wait()


if __name__ == "__main__":
    sys.exit(keep(sys.argv[2:], float(sys.argv[1])))
