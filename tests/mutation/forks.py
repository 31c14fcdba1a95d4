"""Jobs in forks of this process, each with its outcome."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence

POLL_SECONDS = 0.003


def forked(
    jobs: Sequence[Callable[[], int]], workers: int, *, is_quiet: bool = False, limit: float = math.inf
) -> Iterator[tuple[int, str, float]]:
    """Run each job in a fork of its own, for ``limit`` seconds at most.

    Yields its index, outcome (``survived``, ``killed``, ``timeout``) and seconds as they end.
    """
    waiting, running = list(enumerate(jobs))[::-1], dict[int, tuple[int, float]]()
    while waiting or running:
        while waiting and len(running) < workers:
            i, job = waiting.pop()
            running[_fork(job, is_quiet)] = i, time.monotonic()
        time.sleep(POLL_SECONDS)
        for pid, (i, started) in list(running.items()):
            seconds = time.monotonic() - started
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                outcome = _outcome(os.waitstatus_to_exitcode(status))
            elif seconds > limit:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                outcome = "timeout"
            else:
                continue
            del running[pid]
            yield i, outcome, seconds


def _outcome(code: int) -> str:
    if code in (0, 1, 2):  # pytest: all passed; some failed; a test file could not be imported
        return "killed" if code else "survived"
    if code == -signal.SIGVTALRM:
        return "timeout"
    if code < 0:  # ended by a signal, as by a stack overflow
        return "killed"
    raise RuntimeError(f"a process of the mutation run ended with {code}: it could not run the tests")


def _fork(job: Callable[[], int], is_quiet: bool) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 3
    try:
        errors = os.dup(2)
        if is_quiet:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
        code = job()
    except BaseException:
        os.write(errors, traceback.format_exc().encode())
    finally:
        os._exit(code)
