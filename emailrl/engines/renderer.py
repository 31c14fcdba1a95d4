"""The only place that knows chat templates: messages → token ids, sampled ids → message. A conversation is never
tokenized twice: what the tokenizer's own template puts after a sampled turn is found by rendering a placeholder in
place of the turn, and only that is tokenized and appended to the ids. So a turn stays as it was sampled, however the
template would spell it. If the template changes what comes before (most strip thoughts from history), the caller starts
a new training sample. Email is untrusted: strings that the tokenizer would turn into control tokens (``<|im_end|>``),
and those of the dialect (``<tool_call>``), are broken by a space in all that the model did not write itself."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.engines.dialects import DIALECTS, MARKUP, choose, parse, said_in
from emailrl.records.trajectory import Message, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REMEMBERED = 256
"""Size of the caches of texts: a group's rollouts share their prompt, and often their first tool results."""
_PROBE = "emailrl-probe"
_ASKED = ({"role": "user", "content": "?"},)
_ENDS = ("<|call|>", "<|eom_id|>", "<|tool_response>", "<start_function_response>")
"""Tokens that end a turn with a call only: harmony's, Llama's, and those with which Gemma asks for the result."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt: ``text`` is the whole conversation so far, ``ids`` the part of it not yet tokenized."""

    ids: list[int]
    text: str
    extends: bool = True  # False: the text does not extend the previous one, and ``ids`` cover the whole new prompt
    outline: str = ""  # the text with placeholders for assistant turns


class ChatRenderer:
    """Renders one model's conversations with its tokenizer's chat template and the given tools. ``tools`` are OpenAI
    function schemas; an empty list renders no tools. ``dialect`` is that of TOOL_DIALECT. Raises EmailRLError when the
    tokenizer has no chat template, UsageError when it shows the model no tools, or asks for calls in an unknown form,
    and none is set."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[dict[str, Any]] = (), dialect: str = "auto"
    ) -> None:
        if not tokenizer.chat_template:
            hint = "Use an instruction-tuned model, or add a chat template."
            raise EmailRLError("The model's tokenizer has no chat template.", hint)
        self.tokenizer = tokenizer
        self.tools: list[Any] = list(tools)
        self.stop_ids = stop_ids(tokenizer)
        bare = apply_template(tokenizer, _ASKED, add_generation_prompt=True)
        if dialect == "auto" and self.tools and self._asked() == bare:
            hint = "Set CHAT_TEMPLATE to one that does, or TOOL_DIALECT to what your own prompt asks for."
            raise UsageError("The chat template shows the model no tools, so it cannot know how to call them.", hint)
        self.dialect = choose(tokenizer, self.tools, dialect)
        self._spoken = DIALECTS[self.dialect]
        # All special tokens, all added tokens in angle brackets, and the words of the dialect, longest first.
        added = tokenizer.added_tokens_decoder.values()
        controls = {t.content for t in added if t.special or (t.content.startswith("<") and t.content.endswith(">"))}
        controls = {control for control in {*controls, *MARKUP, *self._spoken.words} if len(control) > 1}
        ordered = sorted(controls, key=lambda control: (-len(control), control))
        self._controls = re.compile("|".join(map(re.escape, ordered)))
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._normalizer = backend.normalizer if backend is not None else None
        # No length warning: the runner checks whether a prompt fits the context window.
        self._ids_of = lru_cache(REMEMBERED)(partial(tokenizer.encode, add_special_tokens=False, verbose=False))
        self._harmless = lru_cache(REMEMBERED)(self.harmless)
        self._ends = sorted((self.text_of([end]) for end in self.stop_ids), key=len, reverse=True)
        self._calls_apart, self.end_of_call = self._tried()
        opens, _ = self._spoken.thought
        _, opened, begun = self._asked().rpartition(opens)
        self.opening = opens + begun if opened and not begun.strip() else ""
        """The begin of a thought that a prompt ends with."""

    def start(self, messages: Sequence[Message]) -> Rendered:
        """Render the first prompt of a conversation, ending with the generation prompt."""
        text = self.render(messages)
        is_new = all(message.role != "assistant" for message in messages)
        return Rendered(self.tokenize(text), text, outline=text if is_new else self._outline(messages))

    def extend(self, prompt: Rendered, completion_ids: Sequence[int], messages: Sequence[Message]) -> Rendered:
        """Render the prompt that follows ``prompt`` and its completion. ``messages`` are the whole conversation: those
        of ``prompt``, the completion's, and others. The suffix is tokenized alone, so no id already sampled can
        change."""
        said, outline = self.text_of(completion_ids), self._outline(messages)
        following = self._after_turn(prompt.outline, said, outline, messages)
        if following is not None:
            return Rendered(self.tokenize(following), prompt.text + said + following, outline=outline)
        text = self.render(messages)
        return Rendered(self.tokenize(text), text, extends=False, outline=outline)

    def _after_turn(self, before: str, said: str, whole: str, messages: Sequence[Message]) -> str | None:
        """What the template puts after the last assistant turn, beyond a stop token that was sampled; None if it
        changes what comes ``before``, or ends the turn otherwise."""
        last = max(place for place, message in enumerate(messages) if message.role == "assistant")
        place = whole.find(_mark("said", last), len(before))  # the first: mail may hold the placeholder too
        ends = [found for end in self._ends if (found := whole.find(end, place)) >= 0]
        if place < 0 or not ends or not whole.startswith(before):
            return None
        end, thinks = min(ends), self._has_thought(messages[last])
        sampled = next((word for word in self._ends if said.endswith(word)), "")
        kept = not thinks or _mark("thought", last) in whole[len(before) : end]
        return whole[end + len(sampled) :] if kept and whole.startswith(sampled, end) else None

    def parse(self, completion_ids: Sequence[int]) -> Message:
        """Read sampled ids as an assistant message: raw text, tool calls in the dialect, and parse errors."""
        ids = list(completion_ids)
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        message = Message("assistant", self.text_of(ids))
        try:
            message.tool_calls = self.read(message.content)
        except ValueError as error:
            message.parse_error = str(error)
        return message

    def read(self, text: str) -> list[ToolCall]:
        """The calls in the text of a turn; ValueError as ``dialects.parse``."""
        return parse(self.opening + text, self.dialect, self.tools)

    def spoken(self, message: Message) -> list[int]:
        """The ids of an assistant turn that was not sampled, as if it were; it does not think unless its text does."""
        text, (_, closes) = message.content, self._spoken.thought
        text = f"\n{closes}\n\n{text}" if self.opening and closes not in text else text
        ends = bool(message.tool_calls and self.end_of_call)
        return self.tokenize(text) + (self.tokenize(self.end_of_call) if ends else [self.tokenizer.eos_token_id])

    def text_of(self, ids: Sequence[int]) -> str:
        """The exact text of ids, control tokens included."""
        text = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    def tokenize(self, text: str) -> list[int]:
        """The ids of rendered text; control tokens become control ids and nothing is added."""
        return list(self._ids_of(text))

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The template's text for a conversation, with control strings in untrusted content neutralized."""
        return self._text(self._told(messages, marked=False), add_generation_prompt)

    def _outline(self, messages: Sequence[Message]) -> str:
        return self._text(self._told(messages, marked=True), True)

    def _text(self, told: Sequence[dict[str, Any]], ask: bool) -> str:
        return apply_template(self.tokenizer, told, self.tools or None, add_generation_prompt=ask)

    def _told(self, messages: Sequence[Message], *, marked: bool) -> list[dict[str, Any]]:
        """The messages as the template takes them; ``marked``: with placeholders for assistant turns."""
        told, answered = list[dict[str, Any]](), None
        for place, message in enumerate(messages):
            # The system prompt names an inbox, and addresses come from mail; the model's own text stays as it is.
            own = message.role == "assistant"
            said = {"role": message.role, "content": message.content if own else self._harmless(message.content)}
            if message.name is not None:
                said["name"] = message.name
            if message.role == "tool" and answered is not None:
                said["tool_call_id"] = answered
            if own:
                made: dict[str, Any] = self._marked(message, place) if marked else self._written(message)
                answered = f"call{place:05}" if "tool_calls" in made else None  # Mistral takes nine characters
                made["tool_calls"] = [
                    {"type": "function", "id": answered, "function": {"name": name, "arguments": arguments}}
                    for name, arguments in made.get("tool_calls", ())
                ]
                said |= {key: value for key, value in made.items() if value or key != "tool_calls"}
            told.append(said)
        return told

    def _marked(self, message: Message, place: int) -> dict[str, Any]:
        spoken, mark, made = self._spoken, _mark("said", place), dict[str, Any]()
        thought = _mark("thought", place) if self._has_thought(message) else ""
        if thought and spoken.field == "content":
            opens, closes = spoken.thought
            thought = f"{opens}\n{thought}\n{closes}\n\n"
        if self._calls_apart and message.tool_calls:  # of several, only the first is answered
            made, mark = {"tool_calls": [(message.tool_calls[0].name, {"x": mark})]}, ""
        content = thought + mark if spoken.field == "content" else mark
        return made | {"content": content} | ({spoken.field: thought} if thought and content == mark else {})

    def _written(self, message: Message) -> dict[str, Any]:
        """Sampled text already holds its calls and must not change, unless the template takes calls only apart; calls
        written by hand or from a chat server do not stand in the text."""
        calls = [(call.name, call.arguments) for call in message.tool_calls]
        if not self._calls_apart:
            said = said_in(message, self.dialect, self.tools) == self.dialect
            return {"content": message.content, "tool_calls": [] if said else calls}
        thought, rest = self._spoken.split(self.opening + message.content)
        made: dict[str, Any] = {"content": "" if calls else rest, "tool_calls": calls[:1]}
        return made | ({self._spoken.field: thought} if thought and self._spoken.field != "content" else {})

    def _has_thought(self, message: Message) -> bool:
        return self._spoken.split(self.opening + message.content)[0] is not None

    def _asked(self) -> str:
        return self._text(_ASKED, True)

    def _tried(self) -> tuple[bool, str]:
        """Whether the template takes calls only apart from the text, and how it ends a turn with one: Mistral's and
        Gemma's render no result after text alone, harmony's refuses it. A template that takes no calls gets them in the
        text, as LFM2's."""
        name = self.tools[0]["function"]["name"] if self.tools else "f"
        result = {"role": "tool", "content": f"{_PROBE}-result", "name": name, "tool_call_id": "call00000"}
        after = list[str | None]()
        for apart in (False, True):
            mark = {"x": _mark("said", 0)} if apart else _mark("said", 0)
            call = {"type": "function", "id": "call00000", "function": {"name": name, "arguments": mark}}
            said = {"role": "assistant"} | ({"content": "", "tool_calls": [call]} if apart else {"content": mark})
            try:
                text = self._text([*_ASKED, *[said, result] * 2], True)
            except EmailRLError:
                text = ""
            place = text.rfind(_mark("said", 0))
            ends = [found for end in self._ends if (found := text.find(end, place)) >= 0] if place >= 0 else []
            after.append(text[min(ends) :] if ends and text.count(result["content"]) == 2 else None)
        in_text, separate = after
        best = separate or in_text or ""
        end = next((end for end in self._ends if best.startswith(end)), "")
        return separate is not None and in_text != separate, end

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


def _mark(kind: str, place: int) -> str:
    return f"{_PROBE}-{kind}-{place}-"


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
    """The ids that end a completion: the end of text, the token that the template puts after a reply, or after one that
    a tool's result follows, and ``_ENDS``."""
    ids = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    ids |= {tokenizer.convert_tokens_to_ids(end) for end in _ENDS if end in tokenizer.added_tokens_encoder}
    reply = [*_ASKED, {"role": "assistant", "content": _PROBE}]
    texts = [apply_template(tokenizer, reply)]
    with suppress(EmailRLError):  # a template that takes no result after text alone
        texts.append(apply_template(tokenizer, [*reply, {"role": "tool", "content": "?"}]))
    for text in texts:
        after = tokenizer.encode(text.rpartition(_PROBE)[2], add_special_tokens=False)
        if after and after[0] in tokenizer.added_tokens_decoder:
            ids.add(after[0])
    if not ids:
        raise EmailRLError("The model's tokenizer defines no end-of-turn token.", "Set its eos_token.")
    return frozenset(ids)
