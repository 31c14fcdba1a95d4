"""One index entry of a trajectory file: a line's position, and the trajectory's fields for lists."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field, fields
from operator import contains
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from emailrl.records.trajectory import Trajectory

_TEXT = 201
"""Characters kept of a question, answer or error: one more than lists show, to mark truncation."""
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
    """One line of a trajectory file: its position and the fields shown in lists.

    ``evaluation.verdict`` accepts it like a trajectory. ``id`` is None for a line that is not a trajectory.
    """

    line: int
    """From 1, as editors count."""
    offset: int
    """Byte offset of the line."""
    length: int
    """Bytes, newline included."""
    checksum: int
    id: str | None = None
    group_id: str | None = None
    step: int | None = None
    question_id: str | None = None
    question: str = ""
    gold: str = ""
    """The expected answer."""
    answer: str | None = None
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


def _types(annotation: Any) -> set[type]:
    """The Python types that a field may have in JSON."""
    options = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    found = {get_origin(each) or each for each in options}
    return found | {int} if float in found else found


FIELDS = [each.name for each in fields(Entry)]
"""The names of an entry's values, in the order of its line."""
_TYPES = [_types(annotation) for annotation in get_type_hints(Entry).values()]
NO_TRAJECTORY = b",null]\n"
"""The unique ending of an index line without a trajectory."""


def entry_line(line: int, offset: int, content: bytes, trajectory: Trajectory | None) -> bytes:
    """Return the index line for one line of a trajectory file; ``trajectory`` is None if the line holds none."""
    place = [line, offset, len(content), zlib.crc32(content)]
    values = [*place, *(_summary(trajectory) if trajectory else [None])]
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"


def checked_entry(values: Any) -> Entry:
    """Return an entry of an index; raises ValueError or TypeError if the values are not one."""
    entry = Entry(*values)
    if not all(map(contains, _TYPES, map(type, values))) or min(values[:4]) < 0 or entry.length < 1:
        raise ValueError("no entry of an index")
    return entry


def _summary(trajectory: Trajectory) -> list[Any]:
    """An entry's fields except the position."""
    scenario, exception = trajectory.scenario, trajectory.exception
    return [
        trajectory.id,
        trajectory.group_id,
        trajectory.step,
        scenario.id,
        scenario.question[:_TEXT],
        scenario.answer[:_TEXT],
        None if trajectory.final_answer is None else trajectory.final_answer[:_TEXT],
        scenario.kind,
        trajectory.reward,
        {name: trajectory.rubric[name] for name in _RUBRIC if name in trajectory.rubric},
        trajectory.stop_reason,
        None if exception is None else exception[:_TEXT],
        len(trajectory.turns),
        trajectory.num_tokens,
        sum(sum(sample.loss_mask) for sample in trajectory.samples),
        trajectory.seconds,
    ]
