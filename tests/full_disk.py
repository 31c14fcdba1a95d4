"""Code run where no file grows beyond a size: a write takes what fits, the next one fails, as on a full disk."""

from __future__ import annotations

import subprocess
import sys

_LIMITED = """
import resource, signal, sys
from pathlib import Path
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2)
try:
    exec(sys.argv.pop(1))
except OSError as error:
    print(error.errno, error.filename, end="")
"""


def on_a_full_disk(most_bytes: int, code: str, *arguments: object) -> str:
    """What ``code`` prints in a process of its own, or errno and filename of the OSError that it ends in.

    A process of its own, since the limit holds for all files of one: the report of the tests too.
    """
    command = [sys.executable, "-c", _LIMITED, str(most_bytes), code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout
