"""The index beside a trajectory file: what it says, and that it never says what the file no longer does."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from two_turns import trajectory

from emailrl.base.errors import EmailRLError
from emailrl.measure.evaluation import verdict
from emailrl.records import TrajectoryIndex, TrajectoryWriter, read_trajectories, write_trajectories
from emailrl.records.trajectory import Trajectory

__all__ = ["trajectory"]


@pytest.fixture
def some(trajectory: Trajectory) -> list[Trajectory]:
    return [replace(trajectory, id=f"t-{number}", reward=float(number)) for number in range(3)]


@pytest.fixture
def file(tmp_path: Path, some: list[Trajectory]) -> Path:
    """A file of them, with its index."""
    write_trajectories(tmp_path / "file.jsonl", some)
    return tmp_path / "file.jsonl"


def beside(file: Path) -> Path:
    return file.with_name(f"{file.name}.index")


def ids(index: TrajectoryIndex) -> list[str | None]:
    return [entry.id for entry in index]


def test_an_entry_says_where_its_line_lies_and_what_came_of_it(file: Path, some: list[Trajectory]) -> None:
    first, second, _ = file.read_bytes().splitlines(keepends=True)
    entry = TrajectoryIndex(file)[1]
    assert (entry.line, entry.offset, entry.length) == (2, len(first), len(second))
    assert (entry.id, entry.group_id, entry.step, entry.question) == ("t-1", "g-2", 3, "Who paid?")
    assert (entry.reward, entry.turns, entry.tokens, entry.trained, verdict(entry)) == (1.0, 2, 8, 4, "correct")
    assert TrajectoryIndex(file).trajectory(-1) == some[2]


def test_writers_leave_the_index_that_a_reader_would_build(tmp_path: Path, some: list[Trajectory]) -> None:
    whole, appended = tmp_path / "whole.jsonl", tmp_path / "appended.jsonl"
    write_trajectories(whole, some)
    for part in (some[:1], some[1:]):
        with closing(TrajectoryWriter(appended)) as writer:
            for each in part:
                writer.append(each)
    built = tmp_path / "built.jsonl"
    built.write_bytes(whole.read_bytes())
    index = TrajectoryIndex(built)
    index.save()
    assert ids(index) == ["t-0", "t-1", "t-2"]
    assert beside(whole).read_bytes() == beside(appended).read_bytes() == beside(built).read_bytes()


def test_what_is_appended_is_taken_up_once_its_line_is_whole(tmp_path: Path, some: list[Trajectory]) -> None:
    file = tmp_path / "file.jsonl"
    write_trajectories(file, some[:2])
    line = file.read_bytes().splitlines(keepends=True)[0]
    index = TrajectoryIndex(file)
    with file.open("ab") as stream:
        stream.write(line[:30])
    index.refresh()
    assert (len(index), index.torn) == (2, ["file.jsonl, line 3: incomplete (still being written, or cut off)"])
    with file.open("ab") as stream:
        stream.write(line[30:])
    index.refresh()
    assert (ids(index), index.torn) == (["t-0", "t-1", "t-0"], [])
    assert ids(TrajectoryIndex(file)) == ["t-0", "t-1", "t-0"]


def shorten(file: Path, some: list[Trajectory]) -> None:
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[2:]))


def replace_by_another(file: Path, some: list[Trajectory]) -> None:
    index = beside(file).read_bytes()
    write_trajectories(file, [replace(each, id=f"other-{each.id}") for each in (*some, *some)])
    beside(file).write_bytes(index)


@pytest.mark.parametrize("change", [shorten, replace_by_another])
def test_an_index_that_does_not_fit_is_built_again(
    file: Path, some: list[Trajectory], change: Callable[[Path, list[Trajectory]], None]
) -> None:
    opened = TrajectoryIndex(file)
    change(file, some)
    opened.refresh()
    wanted = [each.id for each in read_trajectories(file)]
    assert ids(opened) == ids(TrajectoryIndex(file)) == wanted
    assert [json.loads(line)[4] for line in beside(file).read_bytes().splitlines()[1:]] == wanted  # and saved


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"",
        lambda whole: whole[:-20],
        lambda whole: b"\x00\xff\n[1]\n",
        lambda whole: b'{"fields":["line"]}\n[1]\n',
        lambda whole: whole + b"7\n",
        lambda whole: whole + b"[7,0,0,0]\n",
        lambda whole: whole + b"[4,9000000000000000000,9,1]\n",
        lambda whole: whole + b"[4,-9,9,1]\n",
        lambda whole: whole + b"[" * 5000 + b"]" * 5000 + b"\n",
    ],
)
def test_a_damaged_index_is_built_again(file: Path, damage: Callable[[bytes], bytes]) -> None:
    whole = beside(file).read_bytes()
    beside(file).write_bytes(damage(whole))
    assert ids(TrajectoryIndex(file)) == ["t-0", "t-1", "t-2"]
    with closing(TrajectoryWriter(file)):
        pass
    assert beside(file).read_bytes() == whole


def test_an_index_that_is_a_pipe_is_not_waited_for(file: Path) -> None:
    beside(file).unlink()
    os.mkfifo(beside(file))
    assert ids(TrajectoryIndex(file)) == ["t-0", "t-1", "t-2"] and beside(file).is_fifo()


def test_a_line_changed_in_place_is_read_as_it_is_now(file: Path) -> None:
    index = TrajectoryIndex(file)
    file.write_bytes(file.read_bytes().replace(b'"t-1"', b'"tt1"'))
    assert index.trajectory(1).id == "tt1" and index[1].id == "tt1"


def test_a_line_that_is_no_trajectory_has_an_entry_and_an_error(tmp_path: Path, some: list[Trajectory]) -> None:
    file = tmp_path / "file.jsonl"
    write_trajectories(file, some[:1])
    with file.open("ab") as stream:
        stream.write(b'\n{"id": 4}\nnot JSON\n' + file.read_bytes())
    index = TrajectoryIndex(file)
    assert [(entry.line, entry.id) for entry in index] == [(1, "t-0"), (3, None), (4, None), (5, "t-0")]
    for position, reason in ((1, "line 3: not a trajectory"), (2, "line 4: not JSON")):
        with pytest.raises(EmailRLError, match=reason):
            index.trajectory(position)


@pytest.mark.parametrize("line", [b"null\n", b"garbage\n", b'[1,"0",9,1]\n'])
def test_a_damaged_line_in_the_middle_is_one_clear_error(file: Path, line: bytes) -> None:
    lines = beside(file).read_bytes().splitlines(keepends=True)
    beside(file).write_bytes(b"".join([*lines[:2], line, *lines[3:]]))
    with pytest.raises(EmailRLError, match=r"file\.jsonl\.index is damaged\. Delete it: it is written again"):
        ids(TrajectoryIndex(file))
