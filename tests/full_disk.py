"""Code run where no file grows beyond a size: a write takes what fits, the next one fails, as on a full disk."""

from __future__ import annotations

import io
import os
import resource
import signal
import sys
from contextlib import redirect_stdout
from pathlib import Path


def on_a_full_disk(most_bytes: int, code: str, *arguments: object) -> str:
    """What ``code`` prints in a forked process, or errno and filename of the OSError that it ends in.

    A process of its own, since the limit holds for all files of one: the report of the tests too.
    """
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
            sys.argv = ["-c", *map(str, arguments)]
            said = io.StringIO()
            try:
                with redirect_stdout(said):
                    exec(code, {"sys": sys, "Path": Path})
            except OSError as error:
                said.write(f"{error.errno} {error.filename}")
            os.write(tell, said.getvalue().encode())
        finally:
            os._exit(0)
    os.close(tell)
    with open(told) as output:
        printed = output.read()
    os.waitpid(child, 0)
    return printed
