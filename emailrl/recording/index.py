"""An index of the trajectories in a file, kept beside it, so that 100,000 of them can be listed at once.

The index of ``NAME.jsonl`` is ``NAME.jsonl.index``: a line that names its fields, then one JSON array per trajectory,
appended together with the trajectory. It only saves time: an index that does not match its file (older, longer or
damaged) is rebuilt, and lines that it lacks are read from the file.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Any, overload

from emailrl.disk import replace_bytes
from emailrl.errors import EmailRLError
from emailrl.recording.lines import JsonlWriter, Record, encode, parse_line

_UNSAVED = 100
"""Lines that an index may lack before a reader rewrites it; while a file is written, it lacks one at most."""
_QUESTION = 200
"""Longest question or error text kept, in characters."""
_RUBRIC = (
    "answer_correct",
    "attempted_answer",
    "returned_i_dont_know",
    "sources_correct",
    "ever_found_right_email",
    "ever_read_right_email",
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a trajectory file: its position, and what lists show of it.

    ``evaluation.verdict`` accepts it like a trajectory. ``id`` is None for a line that is not a trajectory.
    """

    line: int
    """From 1, as editors count."""
    offset: int
    """Bytes before the line."""
    length: int
    """Bytes, newline included."""
    checksum: int
    id: str | None = None
    group_id: str | None = None
    step: int | None = None
    question_id: str | None = None
    question: str = ""
    kind: str | None = None
    reward: float | None = None
    rubric: dict[str, Any] = field(default_factory=dict)
    """Only the fields that verdicts and evidence need."""
    stop_reason: str | None = None
    exception: str | None = None
    turns: int = 0
    tokens: int = 0
    trained: int = 0
    """Tokens whose loss mask is 1."""
    seconds: float = 0.0


_FIELDS = [each.name for each in fields(Entry)]
_HEADER = encode({"fields": _FIELDS})
"""The place before the first line."""


def index_path(path: Path) -> Path:
    """The path of a trajectory file's index."""
    return path.with_name(f"{path.name}.index")


def entry_line(line: int, offset: int, content: bytes, record: Record | None) -> bytes:
    """The index line for one line of a trajectory file; ``record`` is its object, None where it is not one."""
    place = [line, offset, len(content), zlib.crc32(content)]
    return json.dumps([*place, *_summary(record)], separators=(",", ":")).encode() + b"\n"


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

    def append(self, content: bytes, record: Record) -> None:
        """Add a line that has been appended to the trajectory file."""
        self._line += 1
        self.write_bytes(entry_line(self._line, self._offset, content, record))
        self._offset += len(content)


class TrajectoryIndex(Sequence[Entry]):
    """The entries of a trajectory file in order; blank lines and a torn last line have none."""

    def __init__(self, path: Path) -> None:
        """Read the index beside the file, or build it; OSError where the file cannot be read."""
        self.path = path
        self._lines: list[bytes] = []
        self.num_lines = self.size = 0
        """Lines and bytes of the file that are covered, blank lines included."""
        self._take(self._stored())
        if not self._fits():
            self._take([])
        known = len(self._lines)
        self.refresh()
        is_stale = known == 0 < len(self) and index_path(path).exists()
        if is_stale or len(self) - known > _UNSAVED:
            with suppress(OSError):  # a read-only folder: the next reader builds it again
                self.save()

    def refresh(self) -> None:
        """Read what has been appended to the file; a file that was replaced is read from its start."""
        if not self._fits():
            self._take([])
        for content in _whole_lines(self.path, self.size):
            line, offset = self.num_lines + 1, self.size
            if content.strip():
                self._lines.append(entry_line(line, offset, content, _record(self.path, line, content)))
            self.num_lines, self.size = line, offset + len(content)

    def save(self) -> None:
        """Write the index beside the file."""
        write_index(self.path, self._lines)

    @property
    def torn_line(self) -> int | None:
        """The number of a last line that lacks its newline (still being written, or cut off), or None."""
        return self.num_lines + 1 if self.path.stat().st_size > self.size else None

    def record(self, position: int) -> tuple[int, Record]:
        """The line number and the object of an entry; EmailRLError, with file and line, where it is no object."""
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
            return [_checked(values) for values in json.loads(b"[" + b",".join(lines) + b"]")]
        except (ValueError, TypeError, RecursionError):
            raise EmailRLError(f"{index_path(self.path)} is damaged.", "Delete it: it is written again.") from None

    def _take(self, lines: list[bytes]) -> None:
        self._lines = lines
        self.num_lines = self.size = 0
        for last in self._entries(lines[-1:]):
            self.num_lines, self.size = last.line, last.offset + last.length

    def _stored(self) -> list[bytes]:
        """The whole lines of the index beside the file; none where it is missing or not such an index."""
        stored = index_path(self.path)
        if not stored.is_file():
            return []
        try:
            header, *lines = stored.read_bytes().splitlines(keepends=True)
            if lines and not lines[-1].endswith(b"\n"):
                lines.pop()
            if header != _HEADER:
                return []
            if lines:
                _checked(json.loads(lines[-1]))
        except (OSError, ValueError, TypeError, RecursionError):
            return []
        return lines

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


def _checked(values: Any) -> Entry:
    """An entry of an index; ValueError or TypeError for anything else."""
    entry = Entry(*values)
    if any(type(number) is not int or number < 0 for number in values[:4]) or entry.length < 1:
        raise ValueError("no entry of an index")
    return entry


def _whole_lines(path: Path, offset: int) -> Iterator[bytes]:
    """The lines from ``offset`` on that end in a newline."""
    with path.open("rb") as file:
        file.seek(offset)
        for content in file:
            if not content.endswith(b"\n"):
                return
            yield content


def _record(path: Path, line: int, content: bytes) -> Record | None:
    try:
        return parse_line(path, line, content)
    except EmailRLError:
        return None  # reading the line raises the error


def _summary(record: Record | None) -> list[Any]:
    """An entry's fields but for the place; nothing of a line that is no trajectory."""
    if record is None:
        return []
    try:
        scenario, rubric = record["scenario"], record["rubric"]
        samples = record.get("samples", [record])
        exception = record.get("exception")
        return [
            str(record["id"]),
            str(record["group_id"]),
            int(record["step"]),
            str(scenario["id"]),
            str(scenario["question"])[:_QUESTION],
            scenario.get("kind"),
            float(record["reward"]),
            {name: rubric[name] for name in _RUBRIC if name in rubric},
            record["stop_reason"],
            None if exception is None else str(exception)[:_QUESTION],
            len(record["turns"]),
            sum(len(sample["token_ids"]) for sample in samples),
            sum(sum(sample["loss_mask"]) for sample in samples),
            float(record["seconds"]),
        ]
    except (KeyError, TypeError, ValueError, AttributeError):
        return []
