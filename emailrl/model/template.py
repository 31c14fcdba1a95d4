"""What a chat template is told besides messages and tools: THINKING and CHAT_TEMPLATE_KWARGS. They are written at the
head of the template, as defaults of its variables: all that renders with the tokenizer, or with a copy saved beside an
adapter, then renders alike."""

from __future__ import annotations

import copy
from typing import Any, Final

from emailrl.base.errors import UsageError
from emailrl.settings import ModelSettings

SWITCHES: Final[tuple[tuple[str, object, object], ...]] = (
    ("enable_thinking", True, False),  # Qwen, GLM, Nemotron, SmolLM
    ("thinking", True, False),  # DeepSeek, Granite
    ("reasoning_effort", "medium", "low"),  # gpt-oss, which has no way not to think
    ("reasoning_effort", "high", "none"),  # Mistral, which refuses other values
)
"""Variables by which templates switch thinking, with their values for on and off."""


def with_arguments(tokenizer: Any, model: ModelSettings) -> Any:
    """The tokenizer, or a copy whose template has the settings' arguments as defaults. UsageError if THINKING is on or
    off and the template reads no variable of ``SWITCHES``."""
    template, arguments = tokenizer.chat_template, model.template_arguments
    if model.thinking != "auto" and template:
        arguments = _switch(tokenizer, on=model.thinking == "on") | arguments
    if not arguments or not template:
        return tokenizer
    # A line of its own: what the template begins with keeps its place at the start of a line, and so its meaning.
    head = "".join(f"{{% set {k} = {k} if {k} is defined else {v!r} %}}" for k, v in arguments.items()) + "\n"
    told = copy.copy(tokenizer)
    is_named = isinstance(template, dict)
    told.chat_template = {name: head + text for name, text in template.items()} if is_named else head + template
    return told


def server_arguments(model: ModelSettings) -> dict[str, Any]:
    """The arguments for a chat server, whose template is not at hand: the switches that are true or false."""
    is_on = model.thinking == "on"
    told = {} if model.thinking == "auto" else {name: is_on for name, on, _ in SWITCHES if on is True}
    return told | model.template_arguments


def _switch(tokenizer: Any, *, on: bool) -> dict[str, object]:
    for name, when_on, when_off in SWITCHES:
        texts = [_rendered(tokenizer, {name: value}) for value in (when_on, when_off)]
        if None not in texts and texts[0] != texts[1]:
            return {name: when_on if on else when_off}
    names = ", ".join(dict.fromkeys(name for name, *_ in SWITCHES))
    what = f"THINKING={'on' if on else 'off'} has no effect: the model's chat template reads none of {names}."
    raise UsageError(what, "Unset it, or set the template's own argument with CHAT_TEMPLATE_KWARGS.")


def _rendered(tokenizer: Any, arguments: dict[str, object]) -> str | None:
    """A prompt with these arguments; None if the template refuses them."""
    try:
        asked = [{"role": "user", "content": "?"}]
        return str(tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True, **arguments))
    except Exception:  # it may raise anything
        return None
