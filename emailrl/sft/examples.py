"""From conversations to examples: the token ids that a rollout would have recorded, and the mask of trained ones."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from emailrl.agent.task import MailEnvironment
from emailrl.engines.dialects import DIALECTS, parse, said_in
from emailrl.records.trajectory import Message, TokenSample, ToolCall

if TYPE_CHECKING:
    from emailrl.engines.renderer import ChatRenderer


@dataclass(frozen=True, slots=True)
class Conversation:
    """The conversation on one question, ending with an assistant message."""

    id: str
    inbox: str
    split: str | None  # The question's; None if unknown
    messages: list[Message]


@dataclass(frozen=True, slots=True)
class Example:
    """One training sequence; both arrays have equal length."""

    conversation: str
    inbox: str
    token_ids: np.ndarray  # uint32
    spoken: np.ndarray  # bool: the assistant's own tokens, which are trained


def converse(environment: MailEnvironment, act: Callable[[Sequence[Message]], str]) -> list[Message]:
    """Play one environment to its end; ``act`` returns the text of the next assistant turn."""
    messages = environment.start()
    while True:
        words = act(messages)
        messages.append(Message("assistant", words, parse(words, EXPERTS)))
        result = environment.step(messages[-1])
        if result.done:
            return messages
        messages += result.messages


def next_turn(turns: Generator[str, Any, Any], messages: Sequence[Message]) -> str:
    """The next of the turns of a scripted expert, who is sent the result of the last call."""
    last = messages[-1]
    return turns.send(json.loads(last.content) if last.role == "tool" else None)


EXPERTS: Final = "hermes"
"""The dialect of scripted experts."""


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """A tool call as an expert writes it."""
    return DIALECTS[EXPERTS].write([ToolCall(name, arguments)])


def as_spoken(message: Message, dialect: str = EXPERTS, tools: Sequence[dict[str, Any]] = ()) -> Message:
    """The message with its tool calls in its text, as a policy of this dialect would write them: chat servers return
    them separately, and experts and other policies have their own dialects."""
    if message.role != "assistant" or not message.tool_calls:
        return message
    said = said_in(message, dialect, tools)
    if said == dialect:
        return message
    words = message.content
    if said is not None:  # what another dialect says before its calls
        words = re.split("|".join(map(re.escape, ("<tool_call>", *DIALECTS[said].words))), words)[0].rstrip()
        words = "" if words == message.content.rstrip() else words
    calls, line = DIALECTS[dialect].write(message.tool_calls), "\n" if words else ""
    return Message("assistant", f"{words}{line}{calls}", message.tool_calls)


def samples_of(messages: list[Message], renderer: ChatRenderer) -> list[TokenSample]:
    """The tokens a rollout of this conversation would have recorded: assistant turns as sampled, the rest as context.
    Several samples if the template does not extend the tokens so far; sampled log-probabilities are 0."""
    samples, prompt, ids = list[TokenSample](), None, list[int]()
    for position, message in enumerate(messages):
        if message.role != "assistant":
            continue
        shown = messages[:position]
        prompt = renderer.start(shown) if prompt is None else renderer.extend(prompt, ids, shown)
        if not samples or not prompt.extends:
            samples.append(TokenSample())
        ids = renderer.spoken(message)
        samples[-1].append_prompt(prompt.ids)
        samples[-1].append_sampled(ids, [0.0] * len(ids))
    return samples


def examples_of(conversation: Conversation, renderer: ChatRenderer) -> list[Example]:
    """The examples of one conversation."""
    spoken = [as_spoken(message, renderer.dialect, renderer.tools) for message in conversation.messages]
    samples = samples_of(spoken, renderer)
    arrays = [(np.array(each.token_ids, dtype=np.uint32), np.array(each.loss_mask, dtype=bool)) for each in samples]
    return [Example(conversation.id, conversation.inbox, *pair) for pair in arrays]


def fingerprint(examples: Iterable[Example]) -> str:
    """SHA-256 over the examples, in order."""
    digest = hashlib.sha256()
    for example in examples:
        name = example.conversation.encode(errors="backslashreplace")
        digest.update(name + example.token_ids.tobytes() + example.spoken.tobytes())
    return digest.hexdigest()


@contextmanager
def shared(renderer: ChatRenderer) -> Iterator[str]:
    """A folder from which other processes read the renderer: its tokenizer may be new, or have another template."""
    with tempfile.TemporaryDirectory() as folder:
        renderer.tokenizer.save_pretrained(folder)
        (Path(folder) / "tools.json").write_text(json.dumps([renderer.tools, renderer.dialect]))
        yield folder


@cache
def shared_renderer(folder: str) -> ChatRenderer:
    """The renderer of ``shared``."""
    from transformers import AutoTokenizer

    from emailrl.engines.renderer import ChatRenderer

    tools, dialect = json.loads((Path(folder) / "tools.json").read_text())
    return ChatRenderer(AutoTokenizer.from_pretrained(folder, trust_remote_code=False), tools, dialect)
