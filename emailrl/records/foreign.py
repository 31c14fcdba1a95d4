"""Reads conversations of other programs as trajectories to imitate: chat messages in OpenAI's form, and ATIF documents.
They hold text alone, no tokens. A line of a ``.jsonl`` file is one conversation, of any of these forms or our own; a
``.json`` file is one document; a folder has such files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, TypeAdapter

from emailrl.base.plain import cut
from emailrl.records.lines import checked, numbered_lines, parse_line
from emailrl.records.trajectory import Message, Number, Scenario, ToolCall, Trajectory, Turn, trajectory_in_line

_NAME = 80  # characters of a question in its id


def _text(content: Any) -> Any:
    """The text of a content: a string, parts of which some are text, or nothing."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if isinstance(part, dict) and part.get("type") == "text")
    return "" if content is None else content


def _object(arguments: Any) -> Any:
    return json.loads(arguments or "{}") if isinstance(arguments, str) else arguments


Text = Annotated[str, BeforeValidator(_text)]
Arguments = Annotated[dict[str, Any], BeforeValidator(_object)]


class _Known(BaseModel):
    """What a file may say of a conversation, as ``emailrl convert`` writes it."""

    id: str = ""
    inbox_address: str = ""
    split: str | None = None


class _Function(BaseModel):
    name: str
    arguments: Arguments = {}


class _Call(BaseModel):
    id: str | None = None
    function: _Function


class _ChatMessage(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text = ""
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class _Metadata(BaseModel):
    scenario: _Known = Field(default_factory=_Known)
    reward: Number = 0.0


class _Chat(BaseModel, defer_build=True):
    messages: list[_ChatMessage]
    metadata: _Metadata = Field(default_factory=_Metadata)

    def read(self) -> list[Message]:
        return [
            Message(
                "system" if said.role == "developer" else said.role,
                spoken(said.reasoning_content, said.content),
                [ToolCall(call.function.name, call.function.arguments, call.id) for call in said.tool_calls or ()],
                said.tool_call_id,
                said.name,
            )
            for said in self.messages
        ]


class _AtifCall(BaseModel):
    tool_call_id: str
    function_name: str
    arguments: Arguments


class _AtifResult(BaseModel):
    source_call_id: str | None = None
    content: Text = ""


class _AtifObservation(BaseModel):
    results: list[_AtifResult] = []


class _AtifStep(BaseModel):
    source: Literal["system", "user", "agent"]
    message: Text
    reasoning_content: str | None = None
    tool_calls: list[_AtifCall] | None = None
    observation: _AtifObservation = Field(default_factory=_AtifObservation)
    is_copied_context: bool | None = None  # which ATIF forbids to train on


class _Atif(BaseModel, defer_build=True):
    schema_version: Annotated[str, Field(pattern=r"^ATIF-v1\.")]
    steps: list[_AtifStep]
    metadata: _Metadata = Field(default_factory=_Metadata, alias="extra")

    def read(self) -> list[Message]:
        messages = list[Message]()
        for step in self.steps:
            if step.is_copied_context:
                continue
            calls = [ToolCall(call.function_name, call.arguments, call.tool_call_id) for call in step.tool_calls or ()]
            role = "assistant" if step.source == "agent" else step.source
            messages.append(Message(role, spoken(step.reasoning_content, step.message), calls))
            names = {call.id: call.name for call in calls}
            messages += [
                Message("tool", result.content, [], result.source_call_id, names.get(result.source_call_id))
                for result in step.observation.results
            ]
        return messages


_CHAT, _ATIF = TypeAdapter(_Chat), TypeAdapter(_Atif)


def spoken(thought: str | None, text: str) -> str:
    """A message's text with its thought, as Qwen's templates write it."""
    return text if not thought else f"<think>\n{thought}\n</think>\n\n{text}"


def conversations_in(path: Path) -> Iterator[Trajectory]:
    """Yield the trajectories of a file or folder, in order; ``EmailRLError`` names file and line of an invalid one."""
    if path.is_dir():
        for each in sorted(path.iterdir()):
            if each.suffix in (".json", ".jsonl") and each.is_file():
                yield from conversations_in(each)
    elif path.suffix == ".json":
        yield _in_line(path, 1, path.read_bytes())
    else:
        for number, content in numbered_lines(path):
            yield _in_line(path, number, content)


def _in_line(path: Path, number: int, content: bytes) -> Trajectory:
    record = parse_line(path, number, content)
    if "schema_version" not in record and ("turns" in record or "messages" not in record):
        return trajectory_in_line(path, number, content)
    found: _Atif | _Chat
    if "schema_version" in record:
        found = checked(_ATIF, "an ATIF document", path, number, content)
    else:
        found = checked(_CHAT, "a conversation", path, number, content)
    messages, known = found.read(), found.metadata.scenario
    question = next((said.content for said in messages if said.role == "user"), "")
    own = known.id or f"{cut(question, _NAME)} {hashlib.sha256(question.encode('utf-8', 'replace')).hexdigest()[:8]}"
    # Without an inbox, what is held out is decided by question.
    scenario = Scenario(own, question, "", [], known.inbox_address or own, "", split=known.split)
    turns = [Turn([], [], "stop") for said in messages if said.role == "assistant"]
    name = f"{path.name}:{number}"
    return Trajectory(name, name, scenario, messages=messages, turns=turns, reward=found.metadata.reward)
