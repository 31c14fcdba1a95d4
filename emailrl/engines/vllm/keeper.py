"""Run one server, and end everything it started as soon as its parent process ends for any reason::

    python -m emailrl.engines.vllm.keeper SECONDS COMMAND ...

Only the parent holds the other end of standard input: it closes when the parent closes it or dies, even by SIGKILL.
The server then gets SIGTERM, SECONDS to end, and SIGKILL. Processes left by a dead server (vLLM's engine process holds
GPU memory) are adopted and killed too. If this process is killed itself, the server is killed with it.
Exits with the server's exit code, or 128 + N for signal N.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_prctl: Callable[..., int] = ctypes.CDLL(None).prctl if sys.platform == "linux" else lambda *_: 0  # vLLM needs Linux


def keep(command: Sequence[str], grace: float) -> int:
    """Run ``command`` in its own session until it or standard input ends; returns its exit code."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # a descendant whose parent dies becomes this process's child
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: _prctl(PR_SET_PDEATHSIG, signal.SIGKILL),  # nothing else runs here between fork and exec
    )

    def signal_group(number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, number)

    def end_when_released() -> None:
        while os.read(0, 1):  # not sys.stdin: interpreter shutdown would wait for its lock
            pass
        signal_group(signal.SIGTERM)
        threading.Event().wait(grace)  # the process exits earlier if the server does
        signal_group(signal.SIGKILL)

    threading.Thread(target=end_when_released, daemon=True).start()
    code = server.wait()
    signal_group(signal.SIGKILL)
    # Kill this process's children, and theirs as they are adopted, and wait until all have ended.
    listed = Path(f"/proc/self/task/{os.getpid()}/children")
    while listed.exists() and (children := [int(pid) for pid in listed.read_text().split()]):
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for child in children:
            with suppress(ChildProcessError):
                os.waitpid(child, 0)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(keep(sys.argv[2:], float(sys.argv[1])))
