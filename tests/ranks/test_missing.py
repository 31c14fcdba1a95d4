"""A launcher's watch over ranks that others miss."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from emailrl.ranks.missing import hung_ranks_killed, note_missing


def error_file(folder: Path, attempt: int, rank: int) -> Path:
    """Where torchrun's agent lets this rank record its error."""
    file = folder / "run" / f"attempt_{attempt}" / str(rank) / "error.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


def test_only_a_missing_rank_that_notes_nothing_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sleeping(attempt: int, rank: int) -> subprocess.Popen[bytes]:
        own = {"RANK": str(rank), "TORCHELASTIC_ERROR_FILE": str(error_file(tmp_path, attempt, rank))}
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=os.environ | own)

    hung, awake, other, later = (sleeping(*place) for place in [(0, 0), (0, 1), (0, 3), (1, 0)])
    hung.send_signal(signal.SIGSTOP)
    for rank, missing in [(1, [0]), (2, [0, 1])]:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file(tmp_path, 0, rank)))
        note_missing(missing)
    begun = time.monotonic()
    with hung_ranks_killed(tmp_path):
        time.sleep(1)
        assert hung.poll() is None  # no rank has ended
        error_file(tmp_path, 0, 2).write_text("{}")
        assert hung.wait(20) == -signal.SIGKILL and time.monotonic() - begun > 5
    assert [each.poll() for each in (awake, other, later)] == [None, None, None]
    for each in (awake, other, later):
        each.kill()
        each.wait()
