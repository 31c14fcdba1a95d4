"""Reads and writes JSON objects on disk, one per line, crash-safe.

A line counts once its newline is on disk. A process that dies while writing leaves an incomplete last line, which the
next writer removes and readers skip; any other bad line is an error with its file and number.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic_core import from_json, to_json

from emailrl.disk import naming, replace_bytes
from emailrl.errors import EmailRLError

Record = dict[str, Any]


def encode(record: Record) -> bytes:
    """Return one line of strict JSON with its newline; NaN and infinity become null."""
    try:
        return to_json(record, inf_nan_mode="null") + b"\n"  # takes a fifth of the standard library's time
    except ValueError:  # a lone surrogate, or nested deeper than it allows
        pass
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(finite(record), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Untrusted email: a lone surrogate has no UTF-8 form, but does have a JSON escape.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def finite(value: Any) -> Any:
    """Return the value with None in place of every NaN and infinity, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def read_records(path: Path) -> Iterator[Record]:
    """Yield the objects of a JSONL file in order; ``EmailRLError`` names file and line of one that cannot be read.

    An incomplete last line without a newline is skipped: it is still being written, or a crash cut it off.
    """
    for _, record in numbered_records(path):
        yield record


def numbered_records(path: Path) -> Iterator[tuple[int, Record]]:
    """Yield the same objects as ``read_records``, each with its line number from 1."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            if not line.endswith(b"\n") and not _is_json(line):
                return
            yield number, parse_line(path, number, line)


def parse_line(path: Path, number: int, line: bytes) -> Record:
    """Return the object in one line; ``EmailRLError`` names file and line if it is not a JSON object."""
    try:
        record = from_json(line, cache_strings="keys")  # takes less than half the time of the standard library
    except ValueError:
        try:
            record = _loads(line)  # also reads lone surrogates, and has better error messages
        except UnicodeDecodeError as error:
            found = f"byte 0x{error.object[error.start]:02x} at position {error.start + 1}"
            raise EmailRLError(f"{path}, line {number}: not UTF-8 ({found}).", "JSONL files are UTF-8.") from None
        except (ValueError, RecursionError) as error:
            raise EmailRLError(f"{path}, line {number}: not JSON ({error}).") from None
    if not isinstance(record, dict):
        found = "null" if record is None else type(record).__name__
        raise EmailRLError(f"{path}, line {number}: expected a JSON object, found {found}.")
    return record


def _loads(line: bytes) -> Any:
    """The value of a line; the standard library would guess UTF-16 from its first bytes."""
    return json.loads(line.decode("utf-8-sig"))


def _is_json(line: bytes) -> bool:
    try:
        _loads(line)
    except (ValueError, RecursionError):
        return False
    return True


class JsonlWriter:
    """Appends objects to a JSONL file, each in one write; opening the file removes an incomplete last line."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        mend(path)
        self._file = path.open("ab", buffering=0)

    def write(self, record: Record) -> None:
        """Append one object; raises OSError naming the file if only a part of it was written."""
        self.write_bytes(encode(record))

    def write_bytes(self, line: bytes) -> None:
        """Append one encoded object."""
        rest = memoryview(line)
        with naming(self.path):
            while rest:  # a full disk takes a part and fails at the next write
                rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        """Flush everything to disk."""
        if not self._file.closed:
            with naming(self.path):
                os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def mend(path: Path) -> None:
    """Make the file end in a complete line: remove an incomplete one, add a missing newline."""
    if not path.exists():
        return
    content = path.read_bytes()
    if not content or content.endswith(b"\n"):
        return
    end = content.rfind(b"\n") + 1
    if _is_json(content[end:]):
        with path.open("ab") as file:
            file.write(b"\n")
    else:
        with path.open("rb+") as file:
            file.truncate(end)


def keep_records(path: Path, keep: Callable[[Record], bool]) -> None:
    """Rewrite a JSONL file atomically with only the objects that ``keep`` accepts, their bytes unchanged."""
    if not path.exists():
        return
    mend(path)
    wanted = {number for number, record in numbered_records(path) if keep(record)}
    with path.open("rb") as file:
        lines = [line for number, line in enumerate(file, start=1) if number in wanted]
    replace_bytes(path, b"".join(lines))


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write a whole JSONL file atomically."""
    replace_bytes(path, b"".join(map(encode, records)))


class MetricsWriter(JsonlWriter):
    """``metrics.jsonl``: one object per step, in order; non-finite values are null."""

    def __init__(self, path: Path, *, after_step: int | None = None) -> None:
        """Open for appending, after removing the lines of steps past ``after_step`` that an interrupted run left."""
        if after_step is not None:
            keep_records(path, lambda record: _step_of(path, record) <= after_step)
        super().__init__(path)


def _step_of(path: Path, record: Record) -> int:
    step = record.get("step", 0)
    if not isinstance(step, int):
        raise EmailRLError(f"{path}: the step {step!r:.40} is not a whole number.", "Delete that line.")
    return step
