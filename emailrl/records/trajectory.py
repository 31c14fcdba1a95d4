"""The shared dataclasses (scenario, message, turn, trajectory, group), a trajectory's line in a JSONL file, and what
training records beside it: metrics per step, and notes on a step's trajectories.

A trajectory is one rollout of one scenario. Its tokens are authoritative: ``samples`` hold the ids exactly as the
policy sampled them, with the mask recorded at that time; ``messages`` are for people and chat servers.

The types say what a file may hold: pydantic checks them when a line is read, not when code makes an object.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self, get_type_hints

import pydantic
from pydantic import AfterValidator, BaseModel, Field, GetPydanticSchema, PlainValidator, TypeAdapter

from emailrl.base.disk import replace_bytes
from emailrl.base.errors import EmailRLError
from emailrl.records.lines import JsonlWriter, Record, checked, numbered_lines, parse_line, readable

Integer = Annotated[int, Field(strict=True, ge=-(2**53), le=2**53)]  # larger integers are not exact in a browser
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]
Logprobs = Annotated[list[float], GetPydanticSchema(lambda _, schema: schema(list[Number | None]))]
"""Files hold null where an engine reported NaN."""


def _ints(below: int, passes: Callable[[list[int]], object]) -> PlainValidator:
    """Accepts a list of thousands as ``passes`` does, in a fifth of pydantic's time; pydantic names a wrong item."""
    exact = TypeAdapter(list[Annotated[int, Field(strict=True, ge=0, lt=below)]])

    def check(value: Any) -> list[int]:
        try:
            is_right = type(value) is list and passes(value) is not False
        except (TypeError, ValueError, OverflowError):
            is_right = False
        return value if is_right else exact.validate_python(value)

    return PlainValidator(check)


TokenIds = Annotated[list[int], _ints(2**32, lambda ids: array("I", ids))]
Mask = Annotated[list[int], _ints(2, lambda mask: not bytes(mask).strip(b"\0\1"))]


class _Counts(BaseModel, defer_build=True):
    """The rubric entries that are summed."""

    prompt_tokens: Number | None = None
    completion_tokens: Number | None = None


_Rubric = Annotated[dict[str, Any], AfterValidator(lambda rubric: _Counts.model_validate(rubric) and rubric)]
_closed = pydantic.with_config(extra="forbid")


class StopReason(StrEnum):
    """Why a trajectory ended."""

    ANSWERED = "answered"
    RAN_OUT_OF_TURNS = "ran_out_of_turns"
    CANT_PARSE_TOOL_CALL = "cant_parse_tool_call"
    BAD_TOOL_CALL_NAME = "bad_tool_call_name"
    BAD_TOOL_CALL_ARGS = "bad_tool_call_args"
    TRUNCATED = "truncated"  # the completion hit the token limit, or the prompt no longer fits the context window
    COMPLETED = "completed"  # a single completion on a static prompt (mode ``simple``) reached its end
    EXCEPTION = "exception"


@_closed
@dataclass(slots=True)
class Scenario:
    """One question about one mailbox, with its answer and the ids of the source emails (ART-E's fields)."""

    id: str
    question: str
    answer: str
    message_ids: list[str]
    inbox_address: str
    query_date: str  # ``YYYY-MM-DD``, UTC; the agent sees no email from that day or later
    how_realistic: Number = 1.0
    split: str | None = None
    kind: str | None = None  # the template that produced the question; None for other questions
    answerable: Flag = True
    """False if the mailbox does not contain the answer: ``message_ids`` is then empty, and "I don't know" is right."""
    needs_all: Flag = False  # whether the answer takes all source emails; otherwise each of them contains it
    shares_inbox: Flag = False
    """Whether the splits of its question file share inboxes, as allowed when the file was generated."""
    twins: list[str] = field(default_factory=list)
    """Other emails of the inbox that say the same as the source emails: finding, reading or citing one is as good."""

    @property
    def evidence(self) -> list[str]:
        """The ids of all emails that hold the answer, the twins last."""
        return [*self.message_ids, *self.twins]


_USUAL = {"answerable": True, "needs_all": False, "shares_inbox": False, "twins": []}


def scenario_fields(scenario: Scenario) -> dict[str, Any]:
    """Return a question's fields by name for files and fingerprints; those of ``_USUAL`` only where they differ."""
    return {name: value for name, value in asdict(scenario).items() if name not in _USUAL or value != _USUAL[name]}


@_closed
@dataclass(slots=True)
class ToolCall:
    """One call as the model requested it: a tool's name and its unchecked arguments."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


@_closed
@dataclass(slots=True)
class Message:
    """One chat message. In an assistant turn from a token engine, ``content`` is the raw sampled text including
    tool-call markup, and ``tool_calls`` is what was parsed from it."""

    role: str
    content: str
    tool_calls: list[ToolCall] = field(default_factory=list)
    tool_call_id: str | None = None
    name: str | None = None  # the tool's name in messages with ``role="tool"``
    parse_error: str | None = None  # set if the text contains tool-call markup that cannot be parsed


@_closed
@dataclass(slots=True)
class Turn:
    """One completion and the environment's response to it."""

    completion_ids: TokenIds  # sampled ids, including the sampled stop token; empty for engines that return only text
    logprobs: Logprobs
    finish_reason: str  # ``stop`` or ``length``, as reported by the engine
    tool_name: str | None = None
    tool_args: dict[str, Any] | None = None
    tool_result: str | None = None
    seconds: Number = 0.0
    tool_seconds: Number = 0.0
    prompt_tokens: Integer = 0
    completion_tokens: Integer = 0  # number of sampled tokens; counted by the server if it returns only text
    thinking_tokens: Integer | None = None  # those of its thought; None if a server does not report them
    cost: Number | None = None  # US dollars; None for engines without a price
    policy_version: str = ""
    adapter_sha256: str | None = None
    """The weights that sampled this span: policy version, and hash of the adapter (None: the bare base model)."""


@_closed
@dataclass(slots=True)
class TokenSample:
    """One training sequence: three lists of equal length. ``loss_mask`` is 1 where the policy sampled the id; elsewhere
    ``sampler_logprobs`` is None. Several if its chat template does not extend the tokens so far."""

    token_ids: TokenIds = field(default_factory=list)
    loss_mask: Mask = field(default_factory=list)
    sampler_logprobs: list[Number | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.loss_mask) == len(self.sampler_logprobs):
            raise ValueError("token_ids, loss_mask and sampler_logprobs differ in length")

    def append_prompt(self, ids: list[int]) -> None:
        self.token_ids += ids
        self.loss_mask += [0] * len(ids)
        self.sampler_logprobs += [None] * len(ids)

    def append_sampled(self, ids: list[int], logprobs: list[float]) -> None:
        if len(ids) != len(logprobs):
            raise ValueError(f"{len(ids)} sampled ids but {len(logprobs)} log-probabilities")
        self.token_ids += ids
        self.loss_mask += [1] * len(ids)
        self.sampler_logprobs += logprobs


@dataclass(slots=True)
class Trajectory:
    """One rollout of one scenario, from the first prompt to the reward."""

    id: str
    group_id: str
    scenario: Scenario
    run_id: str = ""
    step: Integer = 0
    mode: str = "masked"
    policy_version: str = ""
    adapter_sha256: str | None = None
    messages: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    samples: list[TokenSample] = field(default_factory=list)
    reward: Number = 0.0
    reward_terms: dict[str, Number] = field(default_factory=dict)  # named parts of the reward, which sum to ``reward``
    rubric: _Rubric = field(default_factory=dict)
    """ART-E's rubric fields (``environment.rubric.Rubric`` as a dict)."""
    final_answer: str | None = None
    final_sources: list[str] = field(default_factory=list)
    stop_reason: StopReason | None = None
    seconds: Number = 0.0
    exception: str | None = None
    """``Type: message`` if the rollout itself raised (engine, database, judge); it is then never trained."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all samples; for engines that return only text, the server's count in the rubric."""
        if self.samples:
            return sum(len(sample.token_ids) for sample in self.samples)
        return sum(int(self.rubric.get(name) or 0) for name in ("prompt_tokens", "completion_tokens"))


@dataclass(slots=True)
class TrajectoryGroup:
    """The rollouts of one scenario under one policy version; advantages compare them with each other."""

    id: str
    scenario: Scenario
    trajectories: list[Trajectory]


def trajectory_to_dict(trajectory: Trajectory) -> Record:
    """Return the trajectory in its JSONL form. A single sample is stored at the top level as ``token_ids``,
    ``loss_mask`` and ``sampler_logprobs`` (without one, empty lists), several in ``samples``."""
    record = {name: getattr(trajectory, name) for name in _FIRST} | {
        "scenario": scenario_fields(trajectory.scenario),
        "messages": [_message_to_dict(message) for message in trajectory.messages],
        "turns": [_fields(turn) for turn in trajectory.turns],
    }
    if len(trajectory.samples) > 1:
        record["samples"] = [_fields(sample) for sample in trajectory.samples]
    else:
        record |= _fields(trajectory.samples[0] if trajectory.samples else TokenSample())
    return record | {name: getattr(trajectory, name) for name in _LAST}


_FIRST = ("id", "group_id", "run_id", "step", "mode", "policy_version", "adapter_sha256")
_LAST = ("reward", "reward_terms", "rubric", "final_answer", "final_sources", "stop_reason", "seconds", "exception")


def _fields(node: Message | ToolCall | Turn | TokenSample) -> Record:
    # dataclasses.asdict copies every token id one by one; these lists run to thousands.
    return {name: getattr(node, name) for name in node.__slots__}


def _message_to_dict(message: Message) -> Record:
    calls = [{key: item for key, item in _fields(call).items() if item or key != "id"} for call in message.tool_calls]
    record = _fields(message) | {"tool_calls": calls}
    return {name: value for name, value in record.items() if value is not None and value != []}


class _Tokens(BaseModel, defer_build=True):
    """A line's samples: ``samples``, or the three lists of a single one."""

    samples: list[TokenSample] = []
    token_ids: TokenIds = []
    loss_mask: Mask = []
    sampler_logprobs: list[Number | None] = []

    @pydantic.model_validator(mode="after")
    def _joined(self) -> Self:
        if "samples" not in self.model_fields_set:
            if absent := [name for name in TokenSample.__slots__ if name not in self.model_fields_set]:
                raise ValueError(f"{absent[0]} is missing")
            self.samples = [TokenSample(self.token_ids, self.loss_mask, self.sampler_logprobs)]
        return self


_OPTIONAL: dict[str, Any] = {"final_answer": None, "final_sources": [], "exception": None}
_FIELDS = {name: kind for name, kind in get_type_hints(Trajectory, include_extras=True).items() if name != "samples"}
_REQUIRED: dict[str, Any] = {name: (kind, _OPTIONAL.get(name, ...)) for name, kind in _FIELDS.items()}
_LINE = TypeAdapter(pydantic.create_model("Line", __base__=_Tokens, **_REQUIRED))
"""Unlike the dataclass, a line has all fields but ``_OPTIONAL``; further ones are ignored."""


def trajectory_in_line(path: Path, number: int, content: bytes) -> Trajectory:
    """Return the trajectory in a line; ``EmailRLError`` names file, line and field if it holds none."""
    line = checked(_LINE, "a trajectory", path, number, content)
    samples = [sample for sample in line.samples if sample.token_ids]
    return Trajectory(**{name: getattr(line, name) for name in _FIELDS}, samples=samples)


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    """Yield the trajectories of a JSONL file in order; ``EmailRLError`` names file and line of an invalid one."""
    for number, content in numbered_lines(path):
        yield trajectory_in_line(path, number, content)


class _Metrics(BaseModel, defer_build=True, extra="allow"):
    """The fields of a metrics record; all others are a number or null."""

    __pydantic_extra__: dict[str, Number | None] = Field(init=False)
    step: Integer
    seconds: dict[str, Number] = {}
    dropped: dict[str, Number] = {}


_METRICS = TypeAdapter(Annotated[Record, AfterValidator(lambda record: _Metrics.model_validate(record) and record)])


class MetricsWriter(JsonlWriter):
    """``metrics.jsonl``: one object per step, in order; non-finite values are null."""

    def __init__(self, path: Path, *, after_step: int | None = None) -> None:
        """Open for appending, after removing the lines of steps past ``after_step`` that an interrupted run left."""
        if after_step is not None and path.exists():
            kept = []
            for number, line in numbered_lines(path):
                step = parse_line(path, number, line).get("step", 0)
                if not isinstance(step, int):
                    raise EmailRLError(f"{path}: the step {step!r:.40} is not a whole number.", "Delete that line.")
                if step <= after_step:
                    kept.append(line)
            replace_bytes(path, b"".join(kept))  # the bytes of each line as they were
        super().__init__(path)


def read_metrics(path: Path) -> tuple[list[Record], list[str]]:
    """Return the lines of metrics or evaluations, and errors for skipped ones."""
    return readable(path, partial(checked, _METRICS, "a metrics record"))


class SampleNote(BaseModel, defer_build=True):
    """Training's numbers on one sequence: lists with a value per token, null where it was not trained."""

    loss_mask: Mask = []
    old_logprobs: list[Number | None] = []
    ratio: list[Number | None] = []
    advantages: list[Number | None] = []  # empty if all trained tokens have the trajectory's advantage


class TrainingNote(BaseModel, defer_build=True):
    """Training's note on a trajectory."""

    id: str
    advantage: Number | None = None
    """Advantage of all its trained tokens; None if they differ by token, or it was not trained."""
    dropped: str | None = None  # why it was not trained, if recorded
    samples: list[SampleNote] = []

    @property
    def token_advantages(self) -> list[float]:
        """The advantages of the trained tokens, if they differ (PPO, whitening, a KL in the reward)."""
        return [each for sample in self.samples for each in sample.advantages if each is not None]


def notes_path(trajectories: Path) -> Path:
    return trajectories.parent.parent / "training" / trajectories.name


def training_notes(trajectories: Path, *, brief: bool = False) -> tuple[dict[str, TrainingNote], list[str]]:
    """Return the notes on the trajectories of a file by id, and errors for skipped lines. ``brief`` leaves out
    ``samples`` as far as possible, for lists: they hold nearly all of the file's bytes."""
    notes, complaints = readable(notes_path(trajectories), _brief_note if brief else _note)
    return {note.id: note for note in notes}, [f"training/{each}" for each in complaints]


_note = partial(checked, TypeAdapter(TrainingNote), "a training note")


def _brief_note(path: Path, number: int, line: bytes) -> TrainingNote:
    """The part of a note before its samples, or the whole if advantages differ by token."""
    head, samples, _ = line.partition(b',"samples":')
    note = _note(path, number, head + b"}" if samples else line)
    return _note(path, number, line) if note.advantage is None and note.dropped is None else note
