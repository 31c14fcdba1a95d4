"""Files on a disk that is full."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from emailrl.disk import replace_bytes
from emailrl.recording import JsonlWriter, read_records


@pytest.fixture
def full_at_100_bytes() -> Iterator[None]:
    """No file of this process grows beyond 100 bytes: a write takes what fits, the next one fails."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_file_that_does_not_fit_leaves_the_old_one_alone(tmp_path: Path, full_at_100_bytes: None) -> None:
    path = tmp_path / "results.json"
    replace_bytes(path, b"old")
    with pytest.raises(OSError) as raised:
        replace_bytes(path, b"x" * 200)
    assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, str(path))
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_record_that_does_not_fit_is_an_error_and_is_cut_off_later(tmp_path: Path, full_at_100_bytes: None) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonlWriter(path) as writer:
        writer.write({"step": 1})
        with pytest.raises(OSError) as raised:
            writer.write({"step": 2, "text": "x" * 200})
    assert raised.value.filename == str(path) and len(path.read_bytes()) == 100
    with JsonlWriter(path) as writer:
        writer.write({"step": 2})
    assert [record["step"] for record in read_records(path)] == [1, 2]


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    replace_bytes(pipe, b"questions")
    assert os.read(reader, 100) == b"questions" and pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]
    os.close(reader)
