"""Reads and writes JSON objects on disk, one per line, crash-safe. A line counts once its newline is on disk. A process
that dies while writing leaves an incomplete last line, which the next writer removes and readers skip; any other bad
line is an error with its file and number."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json, to_json

from emailrl.base.disk import naming, not_a_file, replace_bytes
from emailrl.base.errors import EmailRLError
from emailrl.base.plain import cut

Record = dict[str, Any]
Value = TypeVar("Value")
_SHOWN = 40  # characters of a wrong value quoted in an error


def encode(record: Record | list[Record]) -> bytes:
    """Return one line of strict JSON with its newline; NaN and infinity become null."""
    with suppress(ValueError):  # a lone surrogate, or nested deeper than it allows
        return to_json(record, inf_nan_mode="null") + b"\n"  # takes a fifth of the standard library's time
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
    """Yield the objects of a JSONL file in order; ``EmailRLError`` names file and line of one that cannot be read. An
    incomplete last line is skipped: it is still being written, or a crash cut it off."""
    for number, line in numbered_lines(path):
        yield parse_line(path, number, line)


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that hold these objects, each with its number from 1."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip() and (line.endswith(b"\n") or _is_json(line)):
                yield number, line


def readable(path: Path, in_line: Callable[[Path, int, bytes], Value]) -> tuple[list[Value], list[str]]:
    """Return what ``in_line`` finds in a file's lines, and errors for the lines it refuses; nothing without a file."""
    instead = not_a_file(path)
    found: list[Value] = []
    complaints = [f"{path.name} is {instead}"] if instead else []
    for number, line in numbered_lines(path) if path.is_file() else ():
        try:
            found.append(in_line(path, number, line))
        except EmailRLError as error:
            complaints.append(error.message.removeprefix(f"{path.parent}/").removesuffix("."))
    return found, complaints


def parse_line(path: Path, number: int, line: bytes) -> Record:
    """Return the object in one line; ``EmailRLError`` names file and line if it is not a JSON object."""
    try:
        record = parse(line)
    except UnicodeDecodeError as error:
        found = f"byte 0x{error.object[error.start]:02x} at position {error.start + 1}"
        raise EmailRLError(f"{path}, line {number}: not UTF-8 ({found}).", "JSONL files are UTF-8.") from None
    except (ValueError, RecursionError) as error:
        raise EmailRLError(f"{path}, line {number}: not JSON ({error}).") from None
    if not isinstance(record, dict):
        found = "null" if record is None else type(record).__name__
        raise EmailRLError(f"{path}, line {number}: expected a JSON object, found {found}.")
    return record


def checked(kind: TypeAdapter[Value], name: str, path: Path, number: int, line: bytes) -> Value:
    """Return the object in one line as ``kind``; ``EmailRLError`` names file, line and field if it is not ``name``."""
    try:
        return kind.validate_python(parse_line(path, number, line))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).removeprefix(".")
    match first["type"], first["input"]:
        case "missing", _:
            wrong = f"{where} is missing"
        case "unexpected_keyword_argument", _:
            wrong = f"{where} is not a known field"
        case "value_error", _:
            wrong = f"{where}.{first['ctx']['error']}".removeprefix(".")
        case _, value:
            shown = {"list": "a list", "dict": "an object"}.get(type(value).__name__)
            found = shown or cut(json.dumps(value), _SHOWN)
            wrong = f"{where} must be {first['msg'].removeprefix('Input should be ')}, not {found}".strip()
    raise EmailRLError(f"{path}, line {number}: not {name} ({wrong}).")


def parse(content: bytes) -> Any:
    """Return the value of JSON in UTF-8; raises ValueError or RecursionError."""
    with suppress(ValueError):
        return from_json(content, cache_strings="keys")  # takes less than half the time of the standard library
    # This also reads lone surrogates, and has better errors. Given bytes, it would guess UTF-16 from the first ones.
    return json.loads(content.decode("utf-8-sig"))


def _is_json(line: bytes) -> bool:
    try:
        parse(line)
    except (ValueError, RecursionError):
        return False
    return True


class JsonlWriter:
    """Appends objects to a JSONL file, each in one write; opening it mends or removes a torn last line."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        content = path.read_bytes() if path.exists() else b""
        last = content[content.rfind(b"\n") + 1 :]
        self._file = path.open("ab", buffering=0)
        if last and _is_json(last):
            self.write_bytes(b"\n")
        elif last:
            self._file.truncate(len(content) - len(last))

    def write(self, record: Record) -> None:
        """Append one object; raises OSError naming the file if only a part of it was written."""
        self.write_bytes(encode(record))

    def write_bytes(self, line: bytes) -> None:
        rest = memoryview(line)
        with naming(self.path):
            while rest:  # a full disk takes a part and fails at the next write
                rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        if not self._file.closed:
            with naming(self.path):
                os.fsync(self._file.fileno())
            self._file.close()


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write a whole JSONL file atomically."""
    replace_bytes(path, b"".join(map(encode, records)))
