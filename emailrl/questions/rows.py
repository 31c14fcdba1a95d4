"""Reads and writes question files: one JSON object per line with ART-E's fields, each checked."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from emailrl.disk import replace_bytes
from emailrl.errors import EmailRLError, UsageError
from emailrl.questions.splits import SPLITS
from emailrl.trajectory import Scenario, scenario_fields

ONE_A_LINE = "A question file has one JSON object per line."
FIELDS_HINT = (
    "A question has id, question, answer, message_ids, how_realistic, inbox_address and query_date; QUESTION_FIELD and "
    "ANSWER_FIELD name the fields to read as question and answer."
)
ABSENT_HINT = 'Such a question has no message_ids, and its only answer is "I don\'t know".'
MOST_LINE_BYTES = 1 << 20
MOST_CHARACTERS = 100_000
"""Maximum characters of a field: far more than any question or answer has, and still readable by a model."""


@dataclass(frozen=True, slots=True)
class Fields:
    """Field names of a question set that differ from ART-E's."""

    question: str = "question"
    answer: str = "answer"
    train_split: str = "train"
    """An additional split name that rows may use besides train, val and test."""


ART_E = Fields()
I_DONT_KNOW = "I don't know"
"""The reference answer if the mailbox does not contain the answer."""


def read_jsonl(path: Path, fields: Fields = ART_E) -> Iterator[Scenario]:
    """Yield the questions of a JSONL file; a bad row raises UsageError with file and line."""
    lines: dict[tuple[str | None, str], int] = {}
    first_split: str | None = None
    try:
        with path.open("rb") as handle:
            for number, line in enumerate(iter(lambda: handle.readline(MOST_LINE_BYTES + 1), b""), 1):
                if len(line) > MOST_LINE_BYTES:
                    raise UsageError(f"{path}:{number}: line longer than {MOST_LINE_BYTES >> 20} MiB.", ONE_A_LINE)
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                scenario = parse_row(_json(line, where), where, fields)
                if not lines:
                    first_split = scenario.split
                elif (scenario.split is None) != (first_split is None):
                    raise UsageError(f"{where}: 'split' must be in every row or in none.")
                earlier = lines.setdefault((scenario.split, scenario.id), number)
                if earlier != number:
                    raise UsageError(f"{where}: duplicate id {scenario.id!r}, first used in line {earlier}.")
                yield scenario
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror or error}.") from error
    if not lines:
        raise UsageError(f"{path}: the question file is empty.")


def parse_row(row: Any, where: str, fields: Fields = ART_E) -> Scenario:
    """Return one checked question; raises UsageError that begins with ``where`` and names the field."""
    if not isinstance(row, Mapping):
        raise UsageError(f"{where}: not a JSON object.", ONE_A_LINE)
    question_id = _field(row, "id", (str, int), where)
    answerable, needs_all = _flag(row, "answerable", True, where), _flag(row, "needs_all", False, where)
    message_ids = _field(row, "message_ids", (list, tuple), where) if answerable else row.get("message_ids", [])
    if not answerable and (message_ids or needs_all or row.get(fields.answer, I_DONT_KNOW) != I_DONT_KNOW):
        raise UsageError(f"{where}: 'answerable' is false, but there is an answer or a source email.", ABSENT_HINT)
    if (answerable and not message_ids) or not all(_is_id(message_id) for message_id in message_ids):
        raise UsageError(f"{where}: field 'message_ids' must be a list of at least one message id.")
    realistic = _field(row, "how_realistic", (int, float), where)
    if not 0 <= realistic <= 1:
        raise UsageError(f"{where}: field 'how_realistic' must be between 0 and 1, not {realistic!r}.")
    split = row.get("split")
    if split is not None and split not in SPLITS and split != fields.train_split:
        splits = dict.fromkeys((*SPLITS, fields.train_split))
        raise UsageError(f"{where}: field 'split' must be one of {', '.join(splits)}, not {split!r}.")
    kind = row.get("kind")
    if kind is not None and not isinstance(kind, str):
        raise UsageError(f"{where}: field 'kind' must be a string, not {kind!r}.")
    return Scenario(
        id=str(question_id),
        question=_field(row, fields.question, (str,), where),
        answer=_field(row, fields.answer, (str,), where) if answerable else I_DONT_KNOW,
        message_ids=list(message_ids),
        inbox_address=_field(row, "inbox_address", (str,), where).strip().lower(),
        query_date=_day(_field(row, "query_date", (str, date), where), where),
        how_realistic=float(realistic),
        split=split,
        kind=kind,
        answerable=answerable,
        needs_all=needs_all,
        shares_inbox=_flag(row, "shares_inbox", False, where),
    )


def _json(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.removeprefix(BOM_UTF8).decode())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not JSON ({error}).", ONE_A_LINE) from error


def _field(row: Mapping[str, Any], name: str, types: tuple[type, ...], where: str) -> Any:
    if name not in row:
        raise UsageError(f"{where}: field {name!r} is missing.", FIELDS_HINT)
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, types) or (isinstance(value, str) and not value.strip()):
        kinds = " or ".join("number" if t is float else t.__name__ for t in types if t is not tuple)
        raise UsageError(f"{where}: field {name!r} must be a non-empty {kinds}, not {value!r:.60}.")
    if not isinstance(value, str):
        return value
    if len(value) > MOST_CHARACTERS:
        raise UsageError(f"{where}: field {name!r} has {len(value):,} characters; the limit is {MOST_CHARACTERS:,}.")
    if not _is_text(value):
        raise UsageError(
            f"{where}: field {name!r} must be valid Unicode, but contains a lone surrogate: {value!a:.60}."
        )
    return value


def _flag(row: Mapping[str, Any], name: str, default: bool, where: str) -> bool:
    value = row.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise UsageError(f"{where}: field {name!r} must be true or false, not {value!r:.60}.")
    return value


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip()) and _is_text(value)


def _is_text(value: str) -> bool:
    """Whether text can be encoded: a JSON escape may be half of a surrogate pair."""
    if value.isascii():  # without a copy
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _day(value: str | date, where: str) -> str:
    """A date or timestamp as ``YYYY-MM-DD``."""
    text = value.isoformat() if isinstance(value, date) else value.strip()
    try:
        if text[10:11] not in ("", "T", " "):
            raise ValueError(text)
        return date.fromisoformat(text[:10]).isoformat()
    except ValueError:
        raise UsageError(f"{where}: field 'query_date' must be YYYY-MM-DD, not {text!r:.60}.") from None


def write_scenarios(path: Path, scenarios: Iterable[Scenario]) -> Path:
    """Write one question per line, atomically, and return the absolute path.

    Raises EmailRLError if the path cannot be written.
    """
    path = Path(path).absolute()
    rows = ({name: value for name, value in scenario_fields(s).items() if value is not None} for s in scenarios)
    try:
        replace_bytes(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    except OSError as error:
        raise EmailRLError(f"Cannot write {path}: {error.strerror or error}.") from error
    return path
