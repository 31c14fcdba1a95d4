"""The data of a served page: the record of a run as it is now, rows of its trajectories, whole trajectories."""

from __future__ import annotations

import threading
from bisect import bisect_left
from os import stat_result
from pathlib import Path

from emailrl.inspection.makers import fitting_tokenizer, tokenizer_folders
from emailrl.inspection.page import Place, detail, entry_row, place_of, run_record
from emailrl.inspection.page.place import file_record, notes_of, source_of
from emailrl.inspection.tokens import TokenTexts
from emailrl.recording import Entry, Record, TrajectoryIndex, trajectory_in_line
from emailrl.trajectory import Trajectory

MAX_ROWS = 5000
"""Rows that one answer holds at most."""


class Served:
    """Reads a run or a file that may still be written; safe to ask from several threads.

    ``model_name`` is the model whose tokenizer is tried last. Raises ``UsageError`` if no trajectory is there.
    """

    def __init__(self, path: Path, *, model_name: str) -> None:
        self._path = path
        self._model_name = model_name
        self._files: dict[Path, _File] = {}
        self._shown: list[tuple[_File, int]] = []
        """The files of the last record returned, and how many trajectories of each it counts."""
        self._lock = threading.Lock()
        self.place: Place = place_of(path)

    def run(self) -> Record:
        """Return the record of the whole (``page.run_record``), files and trajectories written since included."""
        with self._lock:
            self.place = place_of(self._path)
            files = [self._file(file) for file in self.place.files]
            records = [file.record() for file in files]
            self._shown = [(file, record["count"]) for file, record in zip(files, records, strict=True)]
            return run_record(self.place, records)

    def _file(self, path: Path) -> _File:
        if path not in self._files:
            self._files[path] = _File(path)
        return self._files[path]

    def rows(self, start: int, stop: int) -> list[Record]:
        """Return the rows from ``start`` to before ``stop``, at most ``MAX_ROWS``, of the last record returned."""
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
        """Return the whole of the trajectory at a byte offset of a file of the run; None if there is none."""
        with self._lock:
            file = next((file for file, _ in self._shown if file.path.name == name), None)
            return None if file is None else file.trajectory(offset, self._model_name)


class _File:
    """One trajectory file, its index read again when the file has changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._index = TrajectoryIndex(path)
        self._state = _state(path.stat())
        self._record: Record | None = None
        self._tokens: dict[str, TokenTexts | None] = {}

    def record(self) -> Record:
        state = _state(self.path.stat())
        if state != self._state:
            self._index.refresh()
            self._state = state
        count = len(self._index)
        if self._record is None:
            first = self._build(0) if count else None
            record = file_record(self.path, first, count)
            self._record = record if first else None
            return record
        return self._record | {"count": count, "bytes": self.path.stat().st_size}

    def rows(self, start: int, stop: int) -> list[Record]:
        source = source_of(self.path)
        return [entry_row(entry, file=self.path.name, source=source) for entry in self._index[start : max(stop, start)]]

    def trajectory(self, offset: int, model_name: str) -> Record | None:
        position = bisect_left(self._index, offset, key=_offset)
        if position == len(self._index) or self._index[position].offset != offset:
            return None
        found = self._build(position)
        return detail(found, note=notes_of(self.path).get(found.id), tokens=self._tokenizer(found, model_name))

    def _build(self, position: int) -> Trajectory:
        return trajectory_in_line(self.path, *self._index.record(position))

    def _tokenizer(self, trajectory: Trajectory, model_name: str) -> TokenTexts | None:
        """The tokenizer of the policy that made a trajectory, found once per policy."""
        policy = trajectory.policy_version
        if self._tokens.get(policy) is None:
            self._tokens[policy] = fitting_tokenizer(tokenizer_folders(self.path, model_name), trajectory)
        return self._tokens[policy]


def _offset(entry: Entry) -> int:
    return entry.offset


def _state(stat: stat_result) -> tuple[int, int, int]:
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
