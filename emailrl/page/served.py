"""The data of a served page: the current record of a run, rows of its trajectories, and full trajectories."""

from __future__ import annotations

import threading
from bisect import bisect_left
from itertools import chain
from pathlib import Path

from emailrl.page import Place, detail, place_of, rows, run_record
from emailrl.page.place import file_record
from emailrl.page.tokens import TokenTexts, fitting_tokenizer, tokenizer_folders
from emailrl.records import Entry, Record, TrainingNote, TrajectoryIndex, notes_path, training_notes
from emailrl.records.trajectory import Trajectory

MAX_ROWS = 5000
"""Maximum rows per response."""


class Served:
    """Reads a run or file that may still be growing; thread-safe.

    ``model_name``'s tokenizer is tried last. Raises ``UsageError`` if there is no trajectory.
    """

    def __init__(self, path: Path, *, model_name: str) -> None:
        self._path = path
        self._model_name = model_name
        self._files: dict[Path, _File] = {}
        self._shown: list[tuple[_File, int]] = []
        """The files of the last returned record, with their trajectory counts."""
        self._lock = threading.Lock()
        self.place: Place = place_of(path)

    def run(self) -> Record:
        """Return the record of the whole (``page.run_record``), including newly written files and trajectories."""
        with self._lock:
            self.place = place_of(self._path)
            files = [self._file(file) for file in self.place.files]
            found = [file.record() for file in files]
            self._shown = [(file, record["count"]) for file, (record, _) in zip(files, found, strict=True)]
            run = run_record(self.place, [record for record, _ in found])
            run["left_out"] += chain.from_iterable(bad_lines for _, bad_lines in found)
            return run

    def _file(self, path: Path) -> _File:
        if path not in self._files:
            self._files[path] = _File(path)
        return self._files[path]

    def rows(self, start: int, stop: int) -> list[Record]:
        """Return rows ``start`` up to but excluding ``stop`` of the last returned record, at most ``MAX_ROWS``."""
        with self._lock:
            rows: list[Record] = []
            stop = min(stop, start + MAX_ROWS)
            for file, count in self._shown:
                rows += file.rows(max(start, 0), min(stop, count))
                start, stop = start - count, stop - count
                if stop <= 0:
                    break
            return rows

    def trajectory(self, name: str, offset: int) -> Record | None:
        """Return the full trajectory at a byte offset of a file of the run; None if there is none."""
        with self._lock:
            file = next((file for file, _ in self._shown if file.path.name == name), None)
            if file is None or not file.path.is_file():  # reading a pipe would block
                return None
            return file.trajectory(offset, self._model_name)


class _File:
    """One trajectory file, whose index is reread when the file changes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._index = TrajectoryIndex(path)
        self._notes: dict[str, TrainingNote] = {}
        self._state: tuple[int, int, int] | None = None
        self._noted: tuple[int, int, int] | None = None
        """The file and its training record as last read."""
        self._record: Record = {}
        self._bad_lines: list[str] = []
        self._tokens: dict[str, TokenTexts | None] = {}

    def record(self) -> tuple[Record, list[str]]:
        """The file's entry in the run's record, and its skipped lines."""
        state = _state(self.path)
        if state != self._state:
            self._index.refresh()
            readable = self._index.readable
            first = self._index.trajectory(readable[0]) if readable else None
            self._record = file_record(self.path, first, len(readable))
            self._bad_lines = self._index.bad_lines
            self._state = state
        return self._record, self._bad_lines

    def rows(self, start: int, stop: int) -> list[Record]:
        readable = self._index.readable[start : max(stop, start)]
        if not readable:
            return []
        if (state := _state(notes_path(self.path))) != self._noted:
            self._notes, self._noted = training_notes(self.path, brief=True)[0], state
        return rows(self.path, self._index[readable[0] : readable[-1] + 1], self._notes)

    def trajectory(self, offset: int, model_name: str) -> Record | None:
        position = bisect_left(self._index, offset, key=_offset)
        if position == len(self._index) or self._index[position].offset != offset:
            return None
        found = self._index.trajectory(position)
        note = training_notes(self.path)[0].get(found.id)
        return detail(found, note=note, tokens=self._tokenizer(found, model_name))

    def _tokenizer(self, trajectory: Trajectory, model_name: str) -> TokenTexts | None:
        """The tokenizer of the policy that made a trajectory, found once per policy."""
        policy = trajectory.policy_version
        if self._tokens.get(policy) is None:
            self._tokens[policy] = fitting_tokenizer(tokenizer_folders(self.path, model_name), trajectory)
        return self._tokens[policy]


def _offset(entry: Entry) -> int:
    return entry.offset


def _state(path: Path) -> tuple[int, int, int] | None:
    """A stamp that changes with the file's content; None if there is no file."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
