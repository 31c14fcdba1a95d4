"""Replies kept on disk, by several processes at once."""

from __future__ import annotations

import multiprocessing
import sqlite3
from contextlib import closing
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
        worker.join(60)
        assert worker.exitcode == 0
    cache.put("0", "m", False)  # a value once kept stays
    assert [cache.get(str(number)) for number in range(80)] == [number % 2 == 0 for number in range(80)]


def test_another_programs_database_is_left_as_it_is(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "places.sqlite")) as other, other:
        other.execute("CREATE TABLE places (url TEXT)")
    before = (tmp_path / "places.sqlite").read_bytes()
    with pytest.raises(UsageError, match="another program"):
        ReplyCache(tmp_path / "places.sqlite", "JUDGE_CACHE").prepare()
    assert (tmp_path / "places.sqlite").read_bytes() == before
