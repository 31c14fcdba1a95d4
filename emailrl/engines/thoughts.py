"""Thoughts: where one ends in a turn, and whether a chat template keeps them in the history, as ``ChatRenderer.extend``
needs to go on in one training sample."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.plain import cut
from emailrl.engines.dialects import DIALECTS, choose
from emailrl.engines.renderer import ChatRenderer
from emailrl.model.template import with_arguments
from emailrl.records.trajectory import Message, ToolCall
from emailrl.settings import ModelSettings

OPENS: Final = r"(?:<think>|\[THINK\]|<\|channel>thought|<\|channel\|>analysis)"
CLOSES: Final = re.compile(r"</think>|\[/THINK\]|<channel\|>|<\|channel\|>(?:commentary|final)")
"""What begins a thought, and what ends it; harmony (gpt-oss) ends it by a change of channel."""
KEEPING: Final = ({"preserve_thinking": True}, {"clear_thinking": False}, {"truncate_history_thinking": False})
"""Arguments by which templates keep the thoughts of earlier turns."""
_OPENED, _OPENING = re.compile(rf"{OPENS}\s*\Z"), re.compile(rf"\s*{OPENS}")
_NO_THOUGHT = re.compile(rf"\A\s*{OPENS}\s*(?:{CLOSES.pattern})\s*")
_THOUGHT: Final = "<think>\nhm\n</think>\n\n"
_ASKED: Final = (Message("system", "You search email."), Message("user", "When?"))


def thought_of(renderer: ChatRenderer, prompt: str, ids: Sequence[int]) -> tuple[int, bool]:
    """How many of a turn's ``ids`` after the text ``prompt`` are its thought, up to the first end of one, and whether
    it goes on. Nothing sampled yet may become a thought; a turn that begins otherwise has none."""
    text = renderer.text_of(ids)
    closed, begins = CLOSES.search(text), _OPENED.search(prompt) or _OPENING.match(text)
    if closed is None:
        return (len(ids), True) if begins or not ids else (0, False)
    if not begins and closed[0].startswith("<|channel|>"):  # harmony names the channel of every message
        return 0, False
    token = renderer.tokenizer.added_tokens_encoder.get(closed[0])
    if token in ids:
        return ids.index(token) + 1, False
    lengths = range(len(ids) + 1)
    return bisect_left(lengths, True, key=lambda n: CLOSES.search(renderer.text_of(ids[:n])) is not None), False


def prefix_note(renderer: ChatRenderer, model: ModelSettings, max_turns: int) -> str | None:
    """What to know before rollouts of up to ``max_turns``: that their template changes earlier turns, what that costs,
    and which setting avoids it, tried out; None if it changes none."""
    try:
        replies = _replies(renderer, model) if max_turns > 1 else {}
        broken = [when for when, thought in replies.items() if not keeps_prefix(renderer, thought)]
    except EmailRLError as error:
        return f"the chat template cannot render a tool's result: {cut(error.message.partition(': ')[2], 120)}"
    if not broken:
        return None
    when = f" {broken[0]}" if len(broken) < len(replies) else ""
    cost = f"each turn begins a new training sample with its whole prompt, up to {max_turns} a rollout instead of one"
    remedy = next(_remedies(renderer, model), "a CHAT_TEMPLATE that keeps them")
    return f"the chat template changes earlier turns{when}: {cost}; to avoid it, set {remedy}"


def template_notes(renderer: ChatRenderer, model: ModelSettings, max_turns: int = 1) -> list[str]:
    """What to know of the template before rollouts of up to ``max_turns``: the prefix's note, a TOOL_DIALECT that it
    does not ask for, and the names in CHAT_TEMPLATE_KWARGS that do not stand in it."""
    found, own, template = prefix_note(renderer, model, max_turns), renderer.dialect, renderer.tokenizer.chat_template
    notes = [] if found is None else [found]
    with suppress(UsageError):  # it asks for none that is known
        if renderer.tools and (asked := choose(renderer.tokenizer, renderer.tools)) != own:
            notes.append(f"TOOL_DIALECT={own}, but the chat template asks for calls as {asked}, which are not read")
    # The first line sets the arguments themselves.
    text = str(template).partition("\n")[2] if isinstance(template, str) else "\n".join(template.values())
    if unread := [name for name in model.template_arguments if not re.search(rf"\b{re.escape(name)}\b", text)]:
        notes.append(f"CHAT_TEMPLATE_KWARGS: the chat template does not read {', '.join(unread)}")
    return notes


def keeps_prefix(renderer: ChatRenderer, thought: str) -> bool:
    """Whether every prompt extends the one before and its reply, in a conversation of two tool calls, each after
    ``thought``, as the template itself writes them. Raises EmailRLError if the template cannot render it."""
    messages = list(_ASKED)
    prompt = renderer.start(messages)
    for _ in range(2):
        ids = renderer.tokenize(_reply(renderer, messages, prompt.text, thought))
        ends = [place for place, token in enumerate(ids, 1) if token in renderer.stop_ids]
        ids = ids[: ends[0]] if ends else ids  # some templates write no end of a turn: the next role ends it
        messages += [renderer.parse(ids), Message("tool", "[]", tool_call_id="call", name="search_emails")]
        prompt = renderer.extend(prompt, ids, messages)
        if not prompt.extends:
            return False
    return True


def _replies(renderer: ChatRenderer, model: ModelSettings) -> dict[str, str]:
    """How replies begin under these settings: with a thought or without; either if the template has no switch."""
    both = {"on": ("with a thought", _THOUGHT), "off": ("without a thought", "")}
    ways = both if model.thinking == "auto" else {model.thinking: both[model.thinking]}
    if model.thinking == "auto":
        with suppress(UsageError):  # without a switch
            prompt = renderer.start(_ASKED).text
            told = {way: _told(renderer, model.model_copy(update={"thinking": way})) for way in both}
            ways = {way: both[way] for way in both if told[way].start(_ASKED).text == prompt} or both
    return dict(ways.values())


def _told(renderer: ChatRenderer, model: ModelSettings) -> ChatRenderer:
    return ChatRenderer(with_arguments(renderer.tokenizer, model), renderer.tools, renderer.dialect)


def _remedies(renderer: ChatRenderer, model: ModelSettings) -> Iterator[str]:
    """Settings with which the template keeps the prefix."""
    given = model.template_arguments
    kwargs = [{"chat_template_kwargs": json.dumps(given | argument)} for argument in KEEPING]
    changes: list[dict[str, Any]] = [*kwargs, *({"thinking": way} for way in ("off", "on", "auto"))]
    for change in changes:
        changed = model.model_copy(update=change)
        try:
            told = _told(renderer, changed)
            if all(keeps_prefix(told, thought) for thought in _replies(told, changed).values()):
                [(name, value)] = change.items()
                yield f"{name.upper()}='{value}'" if name == "chat_template_kwargs" else f"{name.upper()}={value}"
        except EmailRLError:  # it has no switch for thinking, or refuses its value
            continue


def _reply(renderer: ChatRenderer, messages: list[Message], prompt: str, thought: str) -> str:
    """A call after a thought in the template's own form, else, if it takes no calls, in the model's dialect."""
    call = ToolCall("search_emails", {"keywords": ["lease"]})
    try:
        text = renderer.render([*messages, Message("assistant", thought, [call])], add_generation_prompt=False)
    except EmailRLError:
        text = ""
    if text.startswith(prompt) and call.name in text[len(prompt) :]:
        reply = text[len(prompt) :]
        return reply if thought else _NO_THOUGHT.sub("", reply)
    thought = _OPENING.sub("", thought).lstrip() if _OPENED.search(prompt) else thought
    return thought + DIALECTS[renderer.dialect].write([call])
