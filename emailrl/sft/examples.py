"""From conversations to examples: the token ids that a rollout would have recorded, and the mask of trained ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from emailrl.agent.mail_env import StepResult
from emailrl.engines.renderer import parse_tool_calls
from emailrl.records.trajectory import Message, TokenSample

if TYPE_CHECKING:
    import numpy as np

    from emailrl.engines.renderer import ChatRenderer


@dataclass(frozen=True, slots=True)
class Conversation:
    """The conversation on one question, ending with an assistant message."""

    id: str
    inbox: str
    split: str | None
    """The question's kind; None if unknown."""
    messages: list[Message]


@dataclass(frozen=True, slots=True)
class Example:
    """One training sequence; both arrays have equal length."""

    conversation: str
    inbox: str
    token_ids: np.ndarray
    """uint32"""
    spoken: np.ndarray
    """bool: the assistant's own tokens, which are trained."""


class Acts(Protocol):
    """Plays the assistant's part."""

    def act(self, messages: Sequence[Message]) -> str:
        """The text of the next assistant turn."""
        ...


class Plays(Protocol):
    """An expert's environment: the mail environment, or a custom one."""

    def start(self) -> list[Message]: ...

    def step(self, message: Message) -> StepResult: ...


def converse(environment: Plays, expert: Acts) -> list[Message]:
    """Let an expert play one environment to its end."""
    messages = environment.start()
    while True:
        words = expert.act(messages)
        messages.append(Message("assistant", words, parse_tool_calls(words)))
        result = environment.step(messages[-1])
        if result.done:
            return messages
        messages += result.messages


def as_spoken(message: Message) -> Message:
    """The message with its tool calls as text, as a policy would write them: chat servers return them separately."""
    if message.role != "assistant" or not message.tool_calls or "<tool_call>" in message.content:
        return message
    calls = (json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
             for call in message.tool_calls)  # fmt: skip
    text = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    return Message("assistant", f"{message.content}\n{text}" if message.content else text, message.tool_calls)


def samples_of(messages: list[Message], renderer: ChatRenderer) -> list[TokenSample]:
    """The tokens a rollout of this conversation would have recorded: assistant turns as sampled, the rest as context.

    Several samples if the template does not extend the tokens so far; sampled log-probabilities are 0.
    """
    end = renderer.tokenizer.eos_token_id
    samples: list[TokenSample] = []
    text = ""
    for position, message in enumerate(messages):
        if message.role != "assistant":
            continue
        shown = messages[:position]
        prompt = renderer.extend(text, shown) if samples else renderer.start(shown)
        if not samples or not prompt.extends:
            samples.append(TokenSample())
        ids = [*renderer.tokenize(message.content), end]
        samples[-1].append_prompt(prompt.ids)
        samples[-1].append_sampled(ids, [0.0] * len(ids))
        text = prompt.text + renderer.text_of(ids)
    return samples


def examples_of(conversation: Conversation, renderer: ChatRenderer) -> list[Example]:
    """The examples of one conversation."""
    import numpy as np

    messages = [as_spoken(message) for message in conversation.messages]
    return [
        Example(
            conversation.id,
            conversation.inbox,
            np.array(sample.token_ids, dtype=np.uint32),
            np.array(sample.loss_mask, dtype=bool),
        )
        for sample in samples_of(messages, renderer)
    ]


def fingerprint(examples: Iterable[Example]) -> str:
    """SHA-256 over the examples, in order."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(example.conversation.encode(errors="backslashreplace"))
        digest.update(example.token_ids.tobytes())
        digest.update(example.spoken.tobytes())
    return digest.hexdigest()
