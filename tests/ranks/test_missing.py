"""The end of ranks that others miss."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from emailrl.ranks.group import SECONDS_TO_FOLLOW


def test_only_a_missing_rank_that_does_not_notice_is_killed(tmp_path: Path) -> None:
    def error_file(rank: int) -> Path:
        """Where torchrun's agent lets this rank record its error."""
        return tmp_path / str(rank) / "error.json"

    def start(rank: int, code: str = "import time; time.sleep(60)", **given: Any) -> subprocess.Popen[bytes]:
        error_file(rank).parent.mkdir()
        own = {"RANK": str(rank), "TORCHELASTIC_ERROR_FILE": str(error_file(rank))}
        return subprocess.Popen([sys.executable, "-c", code], env=os.environ | own, **given)

    stopped, awake, other, hung = (start(rank) for rank in (0, 1, 3, 4))
    stopped.send_signal(signal.SIGSTOP)
    error_file(1).with_name("awake").touch()
    missing = "from emailrl.ranks.group import note_missing; note_missing([0, 1, 4]); input()"
    reporting = start(2, missing, stdin=subprocess.PIPE)
    while not error_file(2).with_name("awake").exists():
        time.sleep(0.01)
    time.sleep(2)
    assert stopped.poll() is hung.poll() is None  # the rank that misses it has not ended
    begun = time.monotonic()
    reporting.communicate(b"\n")
    assert stopped.wait(20) == -signal.SIGKILL and hung.poll() is None
    assert hung.wait(20) == -signal.SIGKILL and time.monotonic() - begun > SECONDS_TO_FOLLOW - 1
    assert [each.poll() for each in (awake, other)] == [None, None]
    for each in (awake, other):
        each.kill()
        each.wait()
