"""Run one server, and end everything it started as soon as its parent process ends for any reason::

    python -m emailrl.serving.keeper SECONDS COMMAND ...

Only the parent holds the other end of standard input: it closes when the parent closes it or dies, even by SIGKILL.
The server then gets SIGTERM, SECONDS to end, and SIGKILL. Processes left by a dead server (vLLM's engine process holds
GPU memory) are adopted and killed too. If this process is killed itself, the server is killed with it, and the parent
adopts the rest. Exits with the server's exit code, or 128 + N for signal N.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

from emailrl.serving.orphans import adopt_orphans, end_children, end_with_parent


def keep(command: Sequence[str], grace: float) -> int:
    """Run ``command`` in its own session until it or standard input ends; returns its exit code."""
    adopt_orphans()
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=end_with_parent,  # nothing else runs here between fork and exec
    )
    threading.Thread(target=_end_when_released, args=(server.pid, grace), daemon=True).start()
    code = server.wait()
    _remove_rest(server.pid)
    return code if code >= 0 else 128 - code


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
    end_children()


if __name__ == "__main__":
    sys.exit(keep(sys.argv[2:], float(sys.argv[1])))
