"""Commands in child processes: forked, so that they need not load their libraries anew."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import torch


def begin(folder: Path, *arguments: str) -> int:
    """Begin ``emailrl`` in ``folder``, its output added to ``output.txt`` there; returns the process id."""
    child = os.fork()
    if child:
        return child
    try:
        from emailrl.cli.app import main

        # torch makes a forked child's thread pool anew when first asked: by two threads that load weights at once, one
        # of them gets none ("Invalid thread pool!").
        torch.set_num_threads(1)
        os.chdir(folder)
        sys.stdout = sys.stderr = (folder / "output.txt").open("a", buffering=1)
        for descriptor in (1, 2):
            os.dup2(sys.stdout.fileno(), descriptor)
        sys.argv = ["emailrl", *arguments]
        main()
        os._exit(0)
    except SystemExit as ended:
        os._exit(int(ended.code or 0))
    except BaseException:
        traceback.print_exc()
        os._exit(70)


def exit_code(child: int) -> int:
    """Wait for it to end; minus the signal's number where one ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
