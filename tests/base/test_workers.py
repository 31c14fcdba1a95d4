"""Worker processes: deaf to signals, noticed when they die, and gone with the block."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing import active_children

import psutil
import pytest

from emailrl.base.errors import EmailRLError
from emailrl.base.workers import in_order, worker_processes


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_they_ignore_signals_from_their_first_instruction_and_end_while_busy(method: str) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with worker_processes(1, hint="", method=method) as submit:
        (child,) = active_children()
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(child.pid or 0, number)
        assert list(in_order(submit, pow, ((2, i) for i in range(4)), ahead=2)) == [1, 2, 4, 8]
        assert submit(os.getpid).result() == child.pid
        submit(time.sleep, 600)
        submit(time.sleep, 600)
        begun = time.monotonic()
    assert time.monotonic() - begun < 120 and not active_children()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def test_errors_come_back_and_a_death_is_one() -> None:
    with worker_processes(1, hint="Try again.", method="fork") as submit:
        with pytest.raises(ZeroDivisionError):
            submit(divmod, 1, 0).result()
        dead = submit(os._exit, 0)
        with pytest.raises(EmailRLError, match="Try again"):
            dead.result(20)
        with pytest.raises(EmailRLError, match="Try again"):
            submit(pow, 2, 3).result(20)


def test_those_of_a_killed_process_end_without_a_word() -> None:
    code = (
        "import time, emailrl.base.workers as w\n"
        "with w.worker_processes(2, hint='', method='fork') as submit:\n"
        "    submit(time.sleep, 600); submit(pow, 2, 3).result(); print(flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        children = psutil.Process(process.pid).children()
        process.kill()
        assert process.communicate(timeout=120) == (b"", b"")
    assert len(children) == 2 and not psutil.wait_procs(children, timeout=120)[1]
