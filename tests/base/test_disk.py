"""Files: complete or absent, locked by one, and never reached through a link."""

from __future__ import annotations

import errno
import os
import sqlite3
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from full_disk import on_a_full_disk

from emailrl.base import disk
from emailrl.base.cache import ReplyCache
from emailrl.base.disk import Lock, check_cache, check_out, check_place, is_locked, not_a_file, replace_bytes, write_out
from emailrl.base.errors import UsageError
from emailrl.records import JsonlWriter, read_records
from emailrl.training.report import new_figure, save

REPLACE = """
from emailrl.base.disk import replace_bytes
replace_bytes(Path(sys.argv[1]), b"x" * 200)
"""
RECORD = """
from contextlib import closing
from emailrl.records import JsonlWriter
with closing(JsonlWriter(Path(sys.argv[1]))) as writer:
    writer.write({"step": 1})
    writer.write({"step": 2, "text": "x" * 200})
"""


def test_a_file_that_does_not_fit_leaves_the_old_one_alone(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    replace_bytes(path, b"old")
    assert on_a_full_disk(100, REPLACE, path) == f"{errno.EFBIG} {path}"
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_an_error_names_the_file_and_a_temporary_one_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / ("x" * 250)  # the temporary name is longer than file systems allow
    with pytest.raises(OSError) as caught:
        replace_bytes(path, b"new")
    assert (caught.value.errno, caught.value.filename) == (errno.ENAMETOOLONG, str(path))
    monkeypatch.setattr(disk.secrets, "randbelow", lambda limit: 7)
    (tmp_path / ".results.json.7").symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError):
        replace_bytes(tmp_path / "results.json", b"new")
    assert not (tmp_path / "victim").exists()


def test_a_record_that_does_not_fit_is_an_error_and_is_cut_off_later(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert on_a_full_disk(100, RECORD, path) == f"{errno.EFBIG} {path}"
    assert len(path.read_bytes()) == 100
    with closing(JsonlWriter(path)) as writer:
        writer.write({"step": 2})
    assert [record["step"] for record in read_records(path)] == [1, 2]


def test_a_pipe_that_is_named_itself_is_written_to_and_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    pipe = tmp_path / "here" / "pipe"
    os.mkfifo(pipe)
    for link in (Path("link"), tmp_path / "stdout"):
        link.symlink_to(pipe)
    for stream in (Path("pipe"), tmp_path / "stdout"):
        check_out(stream, may_exist=False)
    with pytest.raises(UsageError, match=f"--out {pipe}"):
        check_out(Path("link"), may_exist=True)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_out(pipe, b"questions")
    assert os.read(reader, 100) == b"questions" and pipe.is_fifo()
    os.close(reader)
    replace_bytes(pipe, b"derived")
    assert pipe.is_file()


def test_no_file_of_a_cache_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    for suffix in ("", "-wal", "-shm", "-journal"):
        for plant in (os.link, os.symlink):
            plant(tmp_path / "mine", tmp_path / f"cache{suffix}")
            with pytest.raises(UsageError) as refused:
                check_cache(tmp_path / "cache", "JUDGE_CACHE")
            (tmp_path / f"cache{suffix}").unlink()
        assert refused.value.hint == f"Name that place itself: JUDGE_CACHE={tmp_path / 'mine'}"


def test_a_lock_is_on_the_file_that_the_path_names(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    first = Lock(path)
    with pytest.raises(BlockingIOError):
        Lock(path)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(Lock, path, wait=True)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.2)
        first.close(remove=True)
        with waiting.result(timeout=120):
            assert is_locked(path)
    assert path.exists() and not is_locked(path)
    with pytest.raises(FileNotFoundError):
        Lock(tmp_path / "missing", create=False)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        Lock(tmp_path / "link")
    assert not is_locked(tmp_path / "link") and not (tmp_path / "elsewhere").exists()


def test_what_is_in_place_of_a_file_has_a_name(tmp_path: Path) -> None:
    file, link, broken, pipe = (tmp_path / name for name in ("file", "link", "broken", "pipe"))
    file.touch()
    link.symlink_to(file)
    broken.symlink_to(tmp_path / "nothing")
    os.mkfifo(pipe)
    assert [not_a_file(path) for path in (file, link, tmp_path / "nothing")] == [None, None, None]
    assert [not_a_file(path) for path in (tmp_path, broken, pipe)] == ["a folder", "a broken link", "a device or pipe"]


def test_inside_the_working_folder_no_part_of_a_path_is_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, disk_of_mine = tmp_path / "here", tmp_path / "disk"
    for folder in (here / "real", disk_of_mine):
        folder.mkdir(parents=True)
    (here / "outputs").symlink_to(disk_of_mine)
    monkeypatch.chdir(here)
    for path in ("outputs/run", "outputs", "real/../outputs/run", "outputs/../run", here / "outputs" / "run"):
        with pytest.raises(UsageError, match=f"--out {tmp_path}"):
            check_place(Path(path), "--out")
    for path in ("real/run", "new/run", "real/../run", "..", disk_of_mine / "run"):
        check_place(Path(path), "--out")
    monkeypatch.chdir(tmp_path / "here" / "real")
    check_place(here / "outputs" / "run", "--out")  # the user has named the link
    with pytest.raises(UsageError, match=f"--out {disk_of_mine}"):
        check_place(here / "outputs", "--out")


def test_a_caches_journal_deletes_no_other_file(tmp_path: Path) -> None:
    """SQLite deletes the super-journal that a planted journal names."""
    victim, cache = tmp_path / "victim", tmp_path / "cache.sqlite"
    victim.write_text("mine")
    with closing(sqlite3.connect(cache)) as connection:
        connection.execute("CREATE TABLE other (id)")
        (page,) = connection.execute("PRAGMA page_size").fetchone()
    magic, name = bytes.fromhex("d9d505f920a163d7"), os.fsencode(victim)
    head = magic + struct.pack(">5I", 0, 0, cache.stat().st_size // page, 512, page)
    tail = struct.pack(">I", 2**30 // page + 1) + name + struct.pack(">2I", len(name), sum(name)) + magic
    (tmp_path / "cache.sqlite-journal").write_bytes(head.ljust(512, b"\0") + tail)
    with pytest.raises(UsageError, match="Remove it"):
        ReplyCache(cache, "JUDGE_CACHE").prepare()
    assert victim.read_text() == "mine"


def test_the_same_data_give_the_same_files(tmp_path: Path) -> None:
    contents = []
    for name in ("one", "other"):
        figure = new_figure(2, 1)
        figure.subplots().plot([0, 1], [0.5, 0.25])
        png, svg = save(figure, tmp_path / name / "curve")
        assert (png.name, svg.name) == ("curve.png", "curve.svg")
        contents.append((png.read_bytes(), svg.read_bytes()))
    assert contents[0] == contents[1]
    assert contents[0][0].startswith(b"\x89PNG") and b"prefers-color-scheme: dark" in contents[0][1]
