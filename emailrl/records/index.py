"""An index of the trajectories in a file, stored next to it, so that 100,000 of them can be listed quickly. The index
of ``NAME.jsonl`` is ``NAME.jsonl.index``: a line that names its fields, then one JSON array per trajectory. It is only
a cache: one that does not match its file (older, longer or damaged) is rebuilt."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import accumulate, count
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import ConfigDict, Field, TypeAdapter

from emailrl.base.disk import check_own, replace_bytes, write_out
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.records.lines import JsonlWriter, encode, parse
from emailrl.records.trajectory import Integer, Number, Trajectory, trajectory_in_line, trajectory_to_dict

_TEXT = 201  # characters kept of a question, answer or error: one more than lists show, to mark truncation
_VERDICT = ("answer_correct", "attempted_answer", "returned_i_dont_know")
_EVIDENCE = ("sources_correct", "ever_found_right_email", "ever_read_right_email")
_UNSAVED = 100
"""Lines that an index may lack before a reader rewrites it; it lacks at most one while the file is written."""
_REASONS, _NUMBERS = 3, 20  # bad lines whose errors are quoted, and of which the numbers are listed
_NO_TRAJECTORY = b",null]\n"  # the unique ending of an index line without a trajectory
_Count = Annotated[int, Field(strict=True, ge=0)]


class Entry(NamedTuple):
    """One line of a trajectory file: its position and the fields shown in lists, which ``evaluation.verdict`` accepts
    like a trajectory. ``id`` is None for a line that is not a trajectory."""

    line: _Count  # from 1, as editors count
    offset: _Count  # byte offset of the line
    length: Annotated[int, Field(strict=True, ge=1)]  # bytes, newline included
    checksum: _Count
    id: str | None = None
    group_id: str | None = None
    step: Integer | None = None
    question_id: str | None = None
    question: str = ""
    gold: str = ""  # the expected answer
    answer: str | None = None
    kind: str | None = None
    inbox: str = ""
    reward: Number | None = None
    rubric: dict[str, Any] = {}  # noqa: RUF012
    """Only the fields that verdicts and evidence need; of evidence none if the question has no gold email."""
    stop_reason: str | None = None
    exception: str | None = None
    turns: Integer = 0
    tokens: Integer = 0
    trained: Integer = 0  # tokens whose loss mask is 1
    seconds: Number = 0.0


_ENTRIES = TypeAdapter(list[Entry], config=ConfigDict(defer_build=True))
_HEADER = encode({"fields": Entry._fields})


def _entry_line(line: int, offset: int, content: bytes, trajectory: Trajectory | None) -> bytes:
    """The index line for one line of a trajectory file; ``trajectory`` is None if the line holds none."""
    values: list[Any] = [line, offset, len(content), zlib.crc32(content)]
    if trajectory is None:
        values.append(None)
    else:
        scenario, rubric, exception = trajectory.scenario, trajectory.rubric, trajectory.exception
        names = _VERDICT + _EVIDENCE if scenario.message_ids else _VERDICT
        trained = sum(sum(sample.loss_mask) for sample in trajectory.samples)
        answer = None if trajectory.final_answer is None else trajectory.final_answer[:_TEXT]
        values += [trajectory.id, trajectory.group_id, trajectory.step, scenario.id]
        values += [scenario.question[:_TEXT], scenario.answer[:_TEXT], answer, scenario.kind, scenario.inbox_address]
        values += [trajectory.reward, {name: rubric[name] for name in names if name in rubric}]
        values += [trajectory.stop_reason, None if exception is None else exception[:_TEXT]]
        values += [len(trajectory.turns), trajectory.num_tokens, trained, trajectory.seconds]
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"


def index_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.index")


def write_trajectories(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Write a whole file of trajectories at once, and its index, atomically."""
    written = list(trajectories)
    lines = [encode(trajectory_to_dict(each)) for each in written]
    write_out(path, b"".join(lines))
    if path.is_file():  # no index beside a pipe
        entries = map(_entry_line, count(1), accumulate(map(len, lines), initial=0), lines, written)
        replace_bytes(index_path(path), b"".join([_HEADER, *entries]))


class TrajectoryWriter(JsonlWriter):
    """Appends trajectories to a JSONL file and its index, after bringing the index up to date."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        index = TrajectoryIndex(path)
        index.save()
        self._index = JsonlWriter(index_path(path))
        self._line, self._offset = index.num_lines, index.size

    def append(self, trajectory: Trajectory) -> None:
        content = encode(trajectory_to_dict(trajectory))
        self.write_bytes(content)
        self._line += 1
        self._index.write_bytes(_entry_line(self._line, self._offset, content, trajectory))
        self._offset += len(content)

    def close(self) -> None:
        super().close()
        self._index.close()


class TrajectoryIndex:
    """The entries of a trajectory file in order; blank lines and a torn last line have none. ``num_lines`` and ``size``
    are the lines, blank ones included, and the bytes of the file that it covers."""

    def __init__(self, path: Path) -> None:
        """Read the file's index, or build it; OSError if the file cannot be read."""
        self.path = path
        self._lines: list[bytes] = []
        self.num_lines = self.size = 0
        stored = index_path(path)
        with suppress(OSError, EmailRLError):  # missing or invalid
            content = stored.read_bytes() if stored.is_file() else b""  # reading a pipe would block
            header, *lines = content.splitlines(keepends=True) or [b""]
            self._take([line for line in lines if line.endswith(b"\n")] if header == _HEADER else [])
        known = self.refresh()
        is_stale = known == 0 < len(self) and stored.exists()
        if is_stale or len(self) - known > _UNSAVED:
            with suppress(OSError, UsageError):  # a read-only folder, or a link: the next reader builds it again
                check_own(stored, "")
                self.save()

    def refresh(self) -> int:
        """Read appended lines; a replaced file is read from its start. Returns how many entries were known before."""
        last = self[-1] if self._lines else None
        if last and (self.path.stat().st_size < self.size or zlib.crc32(self._content(last)) != last.checksum):
            self._take([])
        known = len(self)
        with self.path.open("rb") as file:
            file.seek(self.size)
            for content in file:
                if not content.endswith(b"\n"):
                    break
                line, offset = self.num_lines + 1, self.size
                if content.strip():
                    trajectory = None
                    with suppress(EmailRLError):  # which reading the line raises
                        trajectory = trajectory_in_line(self.path, line, content)
                    self._lines.append(_entry_line(line, offset, content, trajectory))
                self.num_lines, self.size = line, offset + len(content)
        return known

    def save(self) -> None:
        replace_bytes(index_path(self.path), b"".join([_HEADER, *self._lines]))

    @property
    def unreadable(self) -> list[int]:
        return [position for position, line in enumerate(self._lines) if line.endswith(_NO_TRAJECTORY)]

    @property
    def readable(self) -> list[int]:
        return [position for position, line in enumerate(self._lines) if not line.endswith(_NO_TRAJECTORY)]

    @property
    def bad_lines(self) -> list[str]:
        """How many lines hold no trajectory and which, with errors of the first ones, if any."""
        unreadable = self.unreadable
        if not unreadable:
            return []
        reasons = []
        for position in unreadable[:_REASONS]:
            try:
                self.trajectory(position)  # raises, unless the file has been changed since
            except EmailRLError as error:
                reasons.append(error.message.removeprefix(f"{self.path}, ").removesuffix("."))
        if others := unreadable[_REASONS:]:
            numbers = ", ".join(str(self[position].line) for position in others[:_NUMBERS])
            more = f" and {len(others) - _NUMBERS:,} more" if len(others) > _NUMBERS else ""
            reasons.append(f"also line{'s' * (len(others) > 1)} {numbers}{more}")
        told = f"{len(unreadable)} of {len(self)} lines could not be read: {'; '.join(reasons)}"
        return [f"{self.path.name}: {told}"]

    @property
    def torn(self) -> list[str]:
        """A message about the last line, if it lacks its newline."""
        if self.path.stat().st_size <= self.size:
            return []
        return [f"{self.path.name}, line {self.num_lines + 1}: incomplete (still being written, or cut off)"]

    def trajectory(self, position: int) -> Trajectory:
        """Read the trajectory of an entry; ``EmailRLError`` names file, line and field if the line holds none."""
        entry = self[position]
        content = self._content(entry)
        if zlib.crc32(content) != entry.checksum:  # the file was changed in place
            self._take([])
            self.refresh()
            if not -len(self) <= position < len(self):
                raise EmailRLError(f"{self.path} changed while it was read.", "Run the command again.")
            entry = self[position]
            content = self._content(entry)
        return trajectory_in_line(self.path, entry.line, content)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, position: int) -> Entry:
        return self._entries([self._lines[position]])[0]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries())

    def entries(self, start: int = 0, stop: int | None = None) -> list[Entry]:
        return self._entries(self._lines[start:stop])

    def _entries(self, lines: list[bytes]) -> list[Entry]:
        try:
            return _ENTRIES.validate_python(parse(b"[" + b",".join(lines) + b"]"))
        except (ValueError, RecursionError):
            raise EmailRLError(f"{index_path(self.path)} is damaged.", "Delete it: it is written again.") from None

    def _take(self, lines: list[bytes]) -> None:
        """Start with the lines of an index; raises ``EmailRLError`` if the last one is invalid."""
        last = self._entries(lines[-1:])
        self._lines = lines
        self.num_lines, self.size = (last[0].line, last[0].offset + last[0].length) if last else (0, 0)

    def _content(self, entry: Entry) -> bytes:
        with self.path.open("rb") as file:
            file.seek(entry.offset)
            return file.read(entry.length)
