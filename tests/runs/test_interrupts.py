"""Ctrl-C and SIGTERM during a run."""

from __future__ import annotations

import importlib
import io
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from emailrl.runs.run import Interrupts


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
            thread.join(300)
    lines = file.held.decode().splitlines()
    assert lines[0] == "Step 1/2"
    assert lines[1].startswith("Interrupted: stopping after this step") and len(lines) == 2


def test_an_interrupt_during_an_import_waits_for_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library that is imported may swallow a KeyboardInterrupt."""
    (tmp_path / "interrupted_library.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    interrupts = Interrupts(lambda line: None)
    with interrupts.installed(), interrupts.droppable():
        importlib.import_module("interrupted_library")
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()


@pytest.mark.parametrize("how", ["launcher", "rank"])
def test_a_rank_that_nobody_interrupted_advises_no_ctrl_c(how: str) -> None:
    said: list[str] = []
    others = set(threading.enumerate())
    interrupts = Interrupts(said.append)
    with interrupts.installed():
        for _ in range(2):  # a second SIGTERM changes nothing
            signal.raise_signal(signal.SIGTERM) if how == "launcher" else interrupts.request()
        for thread in set(threading.enumerate()) - others:
            thread.join(300)
        assert said == ["Stopping after this step."] and not interrupts.impatient
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert interrupts.impatient
