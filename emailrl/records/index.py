"""An index of the trajectories in a file, stored next to it, so that 100,000 of them can be listed quickly.

The index of ``NAME.jsonl`` is ``NAME.jsonl.index``: a line that names its fields, then one JSON array per trajectory,
appended together with the trajectory. It is only a cache: an index that does not match its file (older, longer or
damaged) is rebuilt, and missing lines are read from the file.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import overload

from emailrl.disk import check_own, replace_bytes
from emailrl.errors import EmailRLError, UsageError
from emailrl.records.entry import FIELDS, NO_TRAJECTORY, Entry, checked_entry, entry_line
from emailrl.records.fields import trajectory_in_line
from emailrl.records.lines import JsonlWriter, Record, encode, parse_line
from emailrl.records.trajectory import Trajectory

_UNSAVED = 100
"""Lines that an index may lack before a reader rewrites it; it lacks at most one while the file is written."""
_REASONS, _NUMBERS = 3, 20
"""Bad lines whose errors are quoted, and further ones that are listed; the others are counted."""
_HEADER = encode({"fields": FIELDS})
"""The position before the first line."""


def index_path(path: Path) -> Path:
    """The path of a trajectory file's index."""
    return path.with_name(f"{path.name}.index")


def write_index(path: Path, lines: Iterable[bytes]) -> None:
    """Replace the index of a trajectory file."""
    replace_bytes(index_path(path), b"".join(chain([_HEADER], lines)))


class IndexWriter(JsonlWriter):
    """Appends to the index of a trajectory file, after bringing it up to date."""

    def __init__(self, path: Path) -> None:
        index = TrajectoryIndex(path)
        index.save()
        super().__init__(index_path(path))
        self._line, self._offset = index.num_lines, index.size

    def append(self, content: bytes, trajectory: Trajectory) -> None:
        """Add a line that has been appended to the trajectory file."""
        self._line += 1
        self.write_bytes(entry_line(self._line, self._offset, content, trajectory))
        self._offset += len(content)


class TrajectoryIndex(Sequence[Entry]):
    """The entries of a trajectory file in order; blank lines and a torn last line have none."""

    def __init__(self, path: Path) -> None:
        """Read the file's index, or build it; OSError if the file cannot be read."""
        self.path = path
        self._lines: list[bytes] = []
        self.unreadable: list[int] = []
        """The positions of lines that hold no trajectory."""
        self.num_lines = self.size = 0
        """Lines and bytes of the file covered, including blank lines."""
        self._take_stored()
        if not self._fits():
            self._take([])
        known = len(self._lines)
        self.refresh()
        is_stale = known == 0 < len(self) and index_path(path).exists()
        if is_stale or len(self) - known > _UNSAVED:
            with suppress(OSError, UsageError):  # a read-only folder, or a link: the next reader builds it again
                check_own(index_path(path), "")
                self.save()

    def refresh(self) -> None:
        """Read appended lines; a replaced file is read from its start."""
        if not self._fits():
            self._take([])
        for content in _whole_lines(self.path, self.size):
            line, offset = self.num_lines + 1, self.size
            if content.strip():
                trajectory = _trajectory(self.path, line, content)
                if trajectory is None:
                    self.unreadable.append(len(self._lines))
                self._lines.append(entry_line(line, offset, content, trajectory))
            self.num_lines, self.size = line, offset + len(content)

    def save(self) -> None:
        """Write the index next to the file."""
        write_index(self.path, self._lines)

    @property
    def readable(self) -> Sequence[int]:
        """The positions of the lines that hold a trajectory."""
        bad = set(self.unreadable)
        return [each for each in range(len(self)) if each not in bad] if bad else range(len(self))

    @property
    def complaints(self) -> list[str]:
        """Problems with the file, if any: ``bad_lines`` and ``torn``."""
        return [*self.bad_lines, *self.torn]

    @property
    def bad_lines(self) -> list[str]:
        """How many lines hold no trajectory and which, with errors of the first ones, if any."""
        if not self.unreadable:
            return []
        parts = [self._reason(position) for position in self.unreadable[:_REASONS]]
        if others := self.unreadable[_REASONS:]:
            numbers = ", ".join(str(self[position].line) for position in others[:_NUMBERS])
            more = f" and {len(others) - _NUMBERS:,} more" if len(others) > _NUMBERS else ""
            parts.append(f"also line{'s' * (len(others) > 1)} {numbers}{more}")
        listed = "; ".join(parts)
        return [f"{self.path.name}: {len(self.unreadable)} of {len(self)} lines could not be read: {listed}"]

    @property
    def torn(self) -> list[str]:
        """A message about the last line, if it lacks its newline."""
        line = self.torn_line
        return [f"{self.path.name}, line {line}: incomplete (still being written, or cut off)"] if line else []

    def _reason(self, position: int) -> str:
        """Why the line of an entry cannot be read."""
        entry = self[position]
        try:
            trajectory_in_line(self.path, *self.record(position))
        except EmailRLError as error:
            return error.message.removeprefix(f"{self.path}, ").removesuffix(".")
        return f"line {entry.line}: changed while it was read"

    @property
    def torn_line(self) -> int | None:
        """The number of a last line that lacks its newline (still being written, or cut off), or None."""
        return self.num_lines + 1 if self.path.stat().st_size > self.size else None

    def record(self, position: int) -> tuple[int, Record]:
        """The line number and the object of an entry; EmailRLError, with file and line, if it is not an object."""
        entry = self[position]
        content = self._content(entry)
        if zlib.crc32(content) != entry.checksum:  # the file was changed in place
            self._take([])
            self.refresh()
            if not -len(self) <= position < len(self):
                raise EmailRLError(f"{self.path} changed while it was read.", "Run the command again.")
            entry = self[position]
            content = self._content(entry)
        return entry.line, parse_line(self.path, entry.line, content)

    def __len__(self) -> int:
        return len(self._lines)

    @overload
    def __getitem__(self, position: int) -> Entry: ...

    @overload
    def __getitem__(self, position: slice) -> list[Entry]: ...

    def __getitem__(self, position: int | slice) -> Entry | list[Entry]:
        if isinstance(position, slice):
            return self._entries(self._lines[position])
        return self._entries([self._lines[position]])[0]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries(self._lines))

    def _entries(self, lines: list[bytes]) -> list[Entry]:
        try:
            return [checked_entry(values) for values in json.loads(b"[" + b",".join(lines) + b"]")]
        except (ValueError, TypeError, RecursionError):
            raise EmailRLError(f"{index_path(self.path)} is damaged.", "Delete it: it is written again.") from None

    def _take(self, lines: list[bytes], *, some_bad: bool = False) -> None:
        """Start with the lines of an index; ``some_bad`` if any has no trajectory."""
        self._lines = lines
        self.unreadable = [at for at, line in enumerate(lines) if line.endswith(NO_TRAJECTORY)] if some_bad else []
        self.num_lines = self.size = 0
        for last in self._entries(lines[-1:]):
            self.num_lines, self.size = last.line, last.offset + last.length

    def _take_stored(self) -> None:
        """Start with the complete lines of the file's index; with none if it is missing or invalid."""
        lines: list[bytes] = []
        some_bad = False
        with suppress(OSError, ValueError, TypeError, RecursionError):
            content = index_path(self.path).read_bytes()
            header, *found = content.splitlines(keepends=True)
            if found and not found[-1].endswith(b"\n"):
                found.pop()
            if header == _HEADER:
                for last in found[-1:]:
                    checked_entry(json.loads(last))
                lines, some_bad = found, NO_TRAJECTORY in content
        self._take(lines, some_bad=some_bad)

    def _fits(self) -> bool:
        """Whether the last entry still matches the file."""
        if not self._lines:
            return True
        last = self[-1]
        if last.offset + last.length > self.path.stat().st_size:
            return False
        return zlib.crc32(self._content(last)) == last.checksum

    def _content(self, entry: Entry) -> bytes:
        with self.path.open("rb") as file:
            file.seek(entry.offset)
            return file.read(entry.length)


def _whole_lines(path: Path, offset: int) -> Iterator[bytes]:
    """The complete lines from ``offset`` on."""
    with path.open("rb") as file:
        file.seek(offset)
        for content in file:
            if not content.endswith(b"\n"):
                return
            yield content


def _trajectory(path: Path, line: int, content: bytes) -> Trajectory | None:
    try:
        return trajectory_in_line(path, line, parse_line(path, line, content))
    except EmailRLError:
        return None  # reading the line raises the error
