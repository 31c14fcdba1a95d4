"""Parses a trajectory from one JSON object, checking every field: the file may be damaged or foreign."""

from __future__ import annotations

import json
import math
import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from emailrl.errors import EmailRLError
from emailrl.records.lines import Record
from emailrl.records.trajectory import Message, Scenario, StopReason, TokenSample, ToolCall, Trajectory, Turn

_LARGEST_INT = 2**53
"""Larger integers are not exact in a browser."""
_SHOWN = 40
"""Maximum characters of a wrong value quoted in an error."""


class WrongField(ValueError):
    """A field of a record that is missing, unknown or of the wrong type; ``str`` names it by its path."""

    def __init__(self, path: str, complaint: str) -> None:
        super().__init__(f"{path} {complaint}".strip())
        self.path, self.complaint = path, complaint

    def within(self, outer: str) -> WrongField:
        """The same error for a field of a nested object."""
        return WrongField(f"{outer}.{self.path}".rstrip("."), self.complaint)


@dataclass(frozen=True, slots=True)
class _Kind:
    """The values that a field may have."""

    expected: str
    accepts: Callable[[Any], bool]
    item: _Kind | None = None
    """The kind of the items, if the value is a ``container`` of them."""
    container: type[Any] = list
    types: frozenset[type] = frozenset()
    """Python types whose values are all accepted, as a fast path."""

    def check(self, name: str, value: Any) -> None:
        if self.accepts(value):
            return
        if self.item is not None and type(value) is self.container:
            named = value.items() if self.container is dict else enumerate(value)
            bad = next((at for at, each in named if not self.item.accepts(each)), None)
            if bad is None:
                return
            self.item.check(f"{name}.{bad}" if self.container is dict else f"{name}[{bad}]", value[bad])
        raise WrongField(name, f"must be {self.expected}, not {_found(value)}")

    def optional(self) -> _Kind:
        accepts = lambda value: value is None or self.accepts(value)  # noqa: E731
        return _Kind(f"{self.expected} or null", accepts, self.item, self.container, self.types | {NoneType})


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _is_int(value: Any) -> bool:
    return type(value) is int and abs(value) <= _LARGEST_INT


def _are_ids(value: Any) -> bool:
    try:
        array("I", value)
    except (TypeError, OverflowError):
        return False
    return type(value) is list


def _is_mask(value: Any) -> bool:
    try:
        return type(value) is list and not bytes(value).strip(b"\0\1")
    except (TypeError, ValueError):
        return False


def _are_logprobs(value: Any) -> bool:
    """Fast, for lists of thousands: only numbers can be summed. If the sum overflows, each item is checked."""
    try:
        return type(value) is list and math.isfinite(sum([each for each in value if each is not None]))
    except (TypeError, OverflowError):
        return False


def _of_type(expected: str, wanted: type) -> _Kind:
    return _Kind(expected, lambda value: type(value) is wanted, types=frozenset({wanted}))


def _list_of(item: _Kind, accepts: Callable[[Any], bool] | None = None) -> _Kind:
    each = accepts or (lambda value: type(value) is list and all(map(item.accepts, value)))
    return _Kind("a list", each, item)


_LIST = _of_type("a list", list)
_TEXT = _of_type("text", str)
_NUMBER = _Kind("a finite number", _is_number)
_OBJECT = _of_type("an object", dict)
_IDS = _list_of(_Kind("a token id", lambda value: _are_ids([value])), _are_ids)
_NUMBER_OR_NULL = _NUMBER.optional()
_LOGPROBS = _list_of(_NUMBER_OR_NULL, _are_logprobs)
_KINDS: dict[Any, _Kind] = {
    str: _TEXT,
    int: _Kind("an integer", _is_int),
    float: _NUMBER,
    bool: _of_type("true or false", bool),
    list[str]: _list_of(_TEXT),
    list[int]: _IDS,
    list[float]: _LOGPROBS,
    list[float | None]: _LOGPROBS,
    dict[str, Any]: _OBJECT,
    dict[str, float]: _Kind(
        "an object of finite numbers",
        lambda value: type(value) is dict and all(map(_is_number, value.values())),
        _NUMBER,
        dict,
    ),
}
_MASK = _list_of(_Kind("0 or 1", lambda value: _is_mask([value])), _is_mask)


def _kind(annotation: Any) -> _Kind | None:
    """The kind of a field's annotation; None of one that holds other dataclasses."""
    if annotation in _KINDS:
        return _KINDS[annotation]
    match [each for each in get_args(annotation) if each is not NoneType]:
        case [inner] if inner in _KINDS:
            return _KINDS[inner].optional()
    return None


def _kinds(node: type) -> dict[str, _Kind]:
    found = {name: _kind(annotation) for name, annotation in get_type_hints(node).items()}
    return {name: kind for name, kind in found.items() if kind} | ({"loss_mask": _MASK} if node is TokenSample else {})


_FIELDS: dict[type, dict[str, _Kind]] = {
    node: _kinds(node) for node in (Scenario, ToolCall, Message, Turn, TokenSample, Trajectory)
}
_PLAIN = ("id", "group_id", "run_id", "step", "mode", "policy_version", "adapter_sha256", "reward", "reward_terms",
          "rubric", "seconds")  # fmt: skip
"""The fields of a trajectory stored unchanged in its line; those in ``_OPTIONAL`` may be missing."""
_OPTIONAL = ("final_answer", "final_sources", "exception")
_COUNTS = ("prompt_tokens", "completion_tokens")
"""The rubric entries that are summed."""
_NOTE = {
    "id": _TEXT,
    "advantage": _NUMBER_OR_NULL,
    "dropped": _TEXT.optional(),
    "samples": _list_of(_OBJECT),
}
_METRICS = dict.fromkeys(("seconds", "dropped"), _KINDS[dict[str, float]]) | {"step": _KINDS[int]}
"""The fields of a metrics record that are not a number or null."""
_SAMPLE = tuple(each.name for each in fields(TokenSample))

Node = TypeVar("Node", Scenario, ToolCall, Message, Turn, TokenSample)


def trajectory_from_dict(record: Record) -> Trajectory:
    """The inverse of ``trajectory_to_dict``; ``WrongField`` if the record is not a trajectory."""
    kinds = _FIELDS[Trajectory]
    plain = {name: _present(record, name) for name in _PLAIN}
    plain |= {name: record[name] for name in _OPTIONAL if name in record}
    for name, value in plain.items():
        kinds[name].check(name, value)
    for name in _COUNTS:
        if plain["rubric"].get(name) is not None:
            _NUMBER.check(f"rubric.{name}", plain["rubric"][name])
    [scenario] = _each("scenario", [_present(record, "scenario")], partial(_build, Scenario))
    samples = _samples(record)
    return Trajectory(
        **plain,
        scenario=scenario,
        messages=_each("messages[{}]", _present(record, "messages"), _message),
        turns=_each("turns[{}]", _present(record, "turns"), partial(_build, Turn)),
        samples=[sample for sample in samples if sample.token_ids],
        stop_reason=_stop_reason(_present(record, "stop_reason")),
    )


def trajectory_in_line(path: Path, number: int, record: Record) -> Trajectory:
    """The trajectory in one line's object; ``EmailRLError`` names file, line and field if invalid."""
    try:
        return trajectory_from_dict(record)
    except WrongField as error:
        raise EmailRLError(f"{path}, line {number}: not a trajectory ({error}).") from None


def check_note(path: Path, number: int, record: Record) -> Record:
    """Return training's note on a trajectory, with all its fields; ``EmailRLError`` names file, line and field."""
    note: Record = {"advantage": None, "dropped": None, "samples": []} | record
    try:
        for name, kind in _NOTE.items():
            kind.check(name, _present(note, name))
        for number_of, sample in enumerate(note["samples"]):
            for name in sample:
                (_MASK if name == "loss_mask" else _LOGPROBS).check(f"samples[{number_of}].{name}", sample[name])
    except WrongField as error:
        raise EmailRLError(f"{path}, line {number}: not a training note ({error}).") from None
    return note


def check_metrics(path: Path, number: int, record: Record) -> Record:
    """Return a line of metrics or of an evaluation; ``EmailRLError`` names file, line and field if a type is wrong."""
    try:
        _present(record, "step")
        for name, value in record.items():
            _METRICS.get(name, _NUMBER_OR_NULL).check(name, value)
    except WrongField as error:
        raise EmailRLError(f"{path}, line {number}: not a metrics record ({error}).") from None
    return record


def _samples(record: Record) -> list[TokenSample]:
    if "samples" in record:
        return _each("samples[{}]", record["samples"], _sample)
    return [_sample({name: _present(record, name) for name in _SAMPLE})]


def _sample(record: Any) -> TokenSample:
    sample = _build(TokenSample, record)
    if not len(sample.token_ids) == len(sample.loss_mask) == len(sample.sampler_logprobs):
        raise WrongField("token_ids, loss_mask and sampler_logprobs", "differ in length")
    return sample


def _message(record: Any) -> Message:
    if type(record) is not dict or "tool_calls" not in record:
        return _build(Message, record)
    message = _build(Message, {name: value for name, value in record.items() if name != "tool_calls"})
    message.tool_calls = _each("tool_calls[{}]", record["tool_calls"], partial(_build, ToolCall))
    return message


def _stop_reason(value: Any) -> StopReason | None:
    try:
        return None if value is None else StopReason(value)
    except ValueError:
        raise WrongField("stop_reason", f"must be one of {', '.join(StopReason)}, not {_found(value)}") from None


def _each(path: str, values: Any, build: Callable[[Any], Node]) -> list[Node]:
    """Apply ``build`` to every item; errors get the item's ``path``, with its number in the braces."""
    _LIST.check(path.partition("[")[0], values)
    made: list[Node] = []
    try:
        for value in values:
            made.append(build(value))
    except WrongField as error:
        raise error.within(path.format(len(made))) from None
    return made


def _build(node: type[Node], record: Any) -> Node:
    """A dataclass of checked fields."""
    _OBJECT.check("", record)
    kinds = _FIELDS[node]
    for name, value in record.items():
        kind = kinds.get(name)
        if kind is None:
            raise WrongField(name, "is not a known field")
        if type(value) not in kind.types:
            kind.check(name, value)
    try:
        return node(**record)
    except TypeError:
        required = (each.name for each in fields(node) if each.default is each.default_factory)  # both are MISSING
        raise WrongField(next(name for name in required if name not in record), "is missing") from None


def _present(record: Record, name: str) -> Any:
    if name not in record:
        raise WrongField(name, "is missing")
    return record[name]


def _found(value: Any) -> str:
    """A wrong value as truncated JSON."""
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
