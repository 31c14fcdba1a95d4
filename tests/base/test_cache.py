"""Replies kept on disk, by several processes at once."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest

from emailrl.base.cache import ReplyCache
from emailrl.base.errors import UsageError


def _put(path: Path, start: int) -> None:
    cache = ReplyCache(path, "JUDGE_CACHE")
    for number in range(start, start + 40):
        cache.put(str(number), "m", number % 2 == 0)


def test_the_cache_is_shared_by_processes(tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite"
    cache = ReplyCache(path, "JUDGE_CACHE")
    assert cache.get("0") is None and not path.exists(), "a look creates no file"
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_put, args=(path, start)) for start in (0, 20, 40)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(300)
        assert worker.exitcode == 0
    cache.put("0", "m", False)  # a value once kept stays
    assert [cache.get(str(number)) for number in range(80)] == [number % 2 == 0 for number in range(80)]


@pytest.mark.parametrize("table", ["places (url TEXT)", "kept (x)"])
def test_another_programs_database_is_left_as_it_is(tmp_path: Path, table: str) -> None:
    """Also one whose program was killed: its log is not merged into it."""
    dead = "import os, sqlite3; c = sqlite3.connect('p.sqlite'); c.execute('PRAGMA journal_mode = WAL');"
    dead += f"c.execute('CREATE TABLE {table}'); c.execute('PRAGMA wal_checkpoint'); c.execute('CREATE TABLE t (x)');"
    subprocess.run([sys.executable, "-c", f"{dead} c.commit(); os._exit(0)"], cwd=tmp_path, check=True)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert len(before) == 3
    with pytest.raises(UsageError, match="another program"):
        ReplyCache(tmp_path / "p.sqlite", "JUDGE_CACHE")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
