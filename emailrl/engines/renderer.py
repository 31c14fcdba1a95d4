"""The only place that knows chat templates and tool-call markup: messages → token ids, sampled ids → message. A
conversation is never tokenized twice: if the text of the next prompt, by the tokenizer's own template, extends the
previous text, only the difference is tokenized and appended to the ids; if not (templates that strip ``<think>`` from
history), the caller starts a new training sample. Email is untrusted: strings that the tokenizer would turn into
control tokens (``<|im_end|>``, ``<tool_call>``) are broken by a space in all that the model did not write itself."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from emailrl.base.errors import EmailRLError
from emailrl.records.trajectory import Message, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Tags with a meaning in Qwen / Hermes templates, whether or not they are control tokens."""
MAX_DEPTH = 64  # maximum nesting of a call's arguments; Python's own JSON parser stops at some hundreds
REMEMBERED = 256
"""Size of the tokenization cache: a group's rollouts share their prompt, and often their first tool results."""
_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_PROBE = "emailrl-probe"


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt: ``text`` is the whole conversation so far, ``ids`` the part of it not yet tokenized."""

    ids: list[int]
    text: str
    extends: bool = True  # False: the text does not extend the previous one, and ``ids`` cover the whole new prompt


class ChatRenderer:
    """Renders one model's conversations with its tokenizer's chat template and the given tools. ``tools`` are OpenAI
    function schemas; an empty list renders no tools. Raises EmailRLError when the tokenizer has no chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[dict[str, Any]] = ()) -> None:
        if not tokenizer.chat_template:
            hint = "Use an instruction-tuned model, or add a chat template."
            raise EmailRLError("The model's tokenizer has no chat template.", hint)
        self.tokenizer = tokenizer
        self.tools: list[Any] = list(tools)
        # All special tokens, all added tokens in angle brackets, and the tags of ``MARKUP``, longest first.
        added = tokenizer.added_tokens_decoder.values()
        controls = {t.content for t in added if t.special or (t.content.startswith("<") and t.content.endswith(">"))}
        controls = {control for control in controls | set(MARKUP) if len(control) > 1}
        ordered = sorted(controls, key=lambda control: (-len(control), control))
        self._controls = re.compile("|".join(map(re.escape, ordered)))
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._normalizer = backend.normalizer if backend is not None else None
        self.stop_ids = stop_ids(tokenizer)
        # No length warning: the runner checks whether a prompt fits the context window.
        self._ids_of = lru_cache(REMEMBERED)(partial(tokenizer.encode, add_special_tokens=False, verbose=False))

    def start(self, messages: Sequence[Message]) -> Rendered:
        """Render the first prompt of a conversation, ending with the generation prompt."""
        text = self.render(messages)
        return Rendered(self.tokenize(text), text)

    def extend(self, text_so_far: str, messages: Sequence[Message]) -> Rendered:
        """Render the next prompt, given the text of the last prompt plus its completion. ``messages`` are the whole
        conversation. The suffix is tokenized alone, so no id already sampled can change."""
        text = self.render(messages)
        if text.startswith(text_so_far):
            return Rendered(self.tokenize(text[len(text_so_far) :]), text)
        return Rendered(self.tokenize(text), text, extends=False)

    def parse(self, completion_ids: Sequence[int]) -> Message:
        """Read sampled ids as an assistant message: raw text, tool calls (Hermes format) and parse errors."""
        ids = list(completion_ids)
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        message = Message("assistant", self.text_of(ids))
        try:
            message.tool_calls = parse_tool_calls(message.content)
        except ValueError as error:
            message.parse_error = str(error)
        return message

    def text_of(self, ids: Sequence[int]) -> str:
        """The exact text of ids, control tokens included."""
        text = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    def tokenize(self, text: str) -> list[int]:
        """The ids of rendered text; control tokens become control ids and nothing is added."""
        return list(self._ids_of(text))

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The template's text for a conversation, with control strings in untrusted content neutralized."""
        plain = []
        for message in messages:
            # The system prompt names an inbox, and addresses come from mail; the model's own text stays as it is.
            content = message.content if message.role == "assistant" else self.harmless(message.content)
            told: dict[str, Any] = {"role": message.role, "content": content}
            if message.name is not None:
                told["name"] = message.name
            if message.tool_calls and "<tool_call>" not in message.content:
                # Handwritten or from a chat server; sampled text already holds its calls and must not change.
                functions = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
                told["tool_calls"] = [{"type": "function", "function": function} for function in functions]
            plain.append(told)
        return apply_template(self.tokenizer, plain, self.tools or None, add_generation_prompt=add_generation_prompt)

    def harmless(self, text: str) -> str:
        """Insert a space after the first character of each control string, so that none is left."""
        text = self._broken(text)
        if self._normalizer is not None:
            normal = self._normalizer.normalize_str(text)
            if self._controls.search(normal):  # spelled with characters that the tokenizer normalizes
                text = self._broken(normal)
        return text

    def _broken(self, text: str) -> str:
        while self._controls.search(text):
            text = self._controls.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)
        return text


def parse_tool_calls(text: str) -> list[ToolCall]:
    """Read every ``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` outside ``<think>``. ``parameters``, as Llama
    3 spells it, is read as ``arguments``. A complete last call may omit its ``</tool_call>`` at the end of the text:
    base models end so, and vLLM's parser accepts it. Raises ValueError if the markup holds anything else, or is closed
    without being opened."""
    _, closed, answer = text.rpartition("</think>")
    if not closed and "<think>" in text:
        return []  # stopped while thinking: there is no reply
    calls = []
    for body, end in _CALL.findall(answer):
        try:
            calls.append(_read_call(body, is_closed=bool(end)))
        except ValueError as error:
            if end:
                raise
            raise ValueError("<tool_call> is not closed, and what there is of it is no call") from error
    if not calls and "</tool_call>" in answer:
        raise ValueError("</tool_call> without <tool_call>")
    return calls


def _read_call(body: str, *, is_closed: bool) -> ToolCall:
    try:
        call = json.loads(body)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise ValueError("tool call has no name")
        given = [call[key] for key in ("arguments", "parameters") if key in call]
        # Some models write the arguments as a JSON string.
        given = [json.loads(value) if isinstance(value, str) else value for value in given]
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"tool call is not JSON: {error}") from error
    if len(given) == 2 and given[0] != given[1]:
        raise ValueError("tool call has both arguments and parameters, and they differ: give arguments only")
    if not given and call.keys() - {"name", "id", "type"}:
        raise ValueError('tool call has no "arguments"')
    return ToolCall(call["name"], checked_arguments(given[0] if given else {} if is_closed else None))


def checked_arguments(value: Any) -> dict[str, Any]:
    """A call's arguments; ValueError if they are not an object, or nested too deep to be recorded."""
    if not isinstance(value, dict):
        raise ValueError("tool call's arguments are not an object")
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [item for node in level for item in (node.values() if isinstance(node, dict) else node)]
        level = [item for item in level if isinstance(item, (dict, list))]
    if level:
        raise ValueError("tool call's arguments are nested too deep")
    return value


def apply_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, Any]],
    tools: list[Any] | None = None,
    *,
    add_generation_prompt: bool = False,
) -> str:
    """Render a conversation with the tokenizer's template, in Jinja's sandbox; EmailRLError if it fails."""
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except Exception as error:  # it may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200].rstrip(".")
        hint = "Set CHAT_TEMPLATE to one that works."
        raise EmailRLError(f"The model's chat template cannot be used: {reason}.", hint) from None
    return str(text)


def stop_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids that end a completion: the end of text, and the token that the template puts after a reply."""
    ids = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    text = apply_template(tokenizer, [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}])
    after = tokenizer.encode(text.rpartition(_PROBE)[2], add_special_tokens=False)
    if after and after[0] in tokenizer.added_tokens_decoder:
        ids.add(after[0])
    if not ids:
        raise EmailRLError("The model's tokenizer defines no end-of-turn token.", "Set its eos_token.")
    return frozenset(ids)
