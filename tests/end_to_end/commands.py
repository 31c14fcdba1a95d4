"""Commands in child processes, forked, so that they need not load their libraries anew; and Ctrl-C in this one."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import emailrl.measure.benchmark  # noqa: F401 - and the rest: a child would load it each time
from emailrl.cli.app import main


def begin(folder: Path, *arguments: str) -> int:
    """Begin ``emailrl`` in ``folder``, its output added to ``output.txt`` there; returns the process id."""
    child = os.fork()
    if child:
        return child
    try:
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


EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate"}


def file_operations(work: Callable[[], object], folder: Path, *, kill_at: int | None = None) -> int | None:
    """Work in a child process; its file operations in the folder, or None where it killed itself at the n-th."""
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        count = 0

        def audit(event: str, args: tuple[Any, ...]) -> None:
            nonlocal count
            if event in EVENTS and str(folder) in str(args):
                count += 1
                if kill_at is not None and count > kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        torch.set_num_threads(1)
        sys.addaudithook(audit)
        try:
            work()
            os.write(tell, str(count).encode())
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    os.close(tell)
    with open(told) as said:
        assert status in (0, signal.SIGKILL), status
        return int(said.read()) if status == 0 else None


@contextmanager
def interrupted(owner: Any, name: str, *, at: int = 1, step: int = 0, times: int = 1) -> Iterator[None]:
    """Ctrl-C comes as the function is called for the n-th time, or with this ``step``, and ends the block."""
    original, calls = getattr(owner, name), itertools.count(1)

    def called(*args: Any, **how: Any) -> Any:
        is_due = how["step"] == step if step else next(calls) == at
        for _ in range(times if is_due else 0):
            os.kill(os.getpid(), signal.SIGINT)
        return original(*args, **how)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, called)
        yield
