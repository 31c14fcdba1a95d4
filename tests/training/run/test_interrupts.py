"""What a signal does while the main thread is busy with the log."""

from __future__ import annotations

import io
import signal
import threading
from typing import Any

from emailrl.training.run.interrupts import Interrupts


class Interrupted(io.RawIOBase):
    """A file whose first write is interrupted by Ctrl-C."""

    def __init__(self) -> None:
        self.held = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        first, self.held = not self.held, self.held + bytes(data)
        if first:
            signal.raise_signal(signal.SIGINT)
        return len(data)


def test_the_notice_of_an_interrupt_may_come_while_the_log_is_being_written() -> None:
    file = Interrupted()
    log = io.TextIOWrapper(io.BufferedWriter(file))

    def say(text: str) -> None:
        log.write(f"{text}\n")
        log.flush()

    others = set(threading.enumerate())
    with Interrupts(say).installed():
        say("Step 1/2")
        for thread in set(threading.enumerate()) - others:
            thread.join(10)
    lines = file.held.decode().splitlines()
    assert lines[0] == "Step 1/2"
    assert lines[1].startswith("Interrupted: stopping after this step") and len(lines) == 2
