"""Chat templates of strangers: whatever they do ends in text, or in one line."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

import pytest
from transformers import PreTrainedTokenizerBase

from emailrl.engines import template
from emailrl.engines.renderer import ChatRenderer
from emailrl.errors import EmailRLError
from emailrl.trajectory import Message

Make = Callable[[str], PreTrainedTokenizerBase]


@pytest.fixture
def tokenizer_with(qwen: PreTrainedTokenizerBase) -> Make:
    def make(text: str) -> PreTrainedTokenizerBase:
        own = type(qwen).from_pretrained(qwen.name_or_path)
        own.chat_template = text
        return own

    return make


NESTED = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{% for i in range(10**9) %}{% endfor %}", "OverflowError: Range too big"),
        (NESTED, "it takes longer than 0.2 seconds"),
        (NESTED.replace("%}{% endfor", "%}x{% endfor"), "it takes longer than 0.2 seconds"),
        ("{% macro f() %}{% for a in range(99999) %}{{ g() }}{% endfor %}{% endmacro %}"
         "{% macro g() %}{% for a in range(99999) %}{% endfor %}{% endmacro %}{{ f() }}", "it takes longer than"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "SecurityError: access to attribute 'append'"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "(RecursionError: max|it takes longer)"),
        ("{{ raise_exception('no\\nsystem role') }}", "TemplateError: no system role"),
        ("{{ 'x' * 200 }}", "it renders 2 messages as 200 characters"),
    ],
)  # fmt: skip
def test_a_template_that_fails_or_knows_no_end_is_one_line(
    tokenizer_with: Make, monkeypatch: pytest.MonkeyPatch, text: str, reason: str
) -> None:
    if "takes longer" in reason:  # a template that ends must not be cut off on a busy machine
        monkeypatch.setattr(template, "MOST_SECONDS", 0.2)
    monkeypatch.setattr(template, "MOST_CHARACTERS", 150)
    began = time.monotonic()
    with pytest.raises(EmailRLError) as caught:
        ChatRenderer(tokenizer_with(text))
    assert re.match(f"The model's chat template cannot be used: {reason}", caught.value.message)
    assert "\n" not in str(caught.value) and time.monotonic() - began < 5


def test_the_bound_holds_in_any_thread_and_for_every_prompt(
    tokenizer_with: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template, "MOST_SECONDS", 0.2)
    endless_later = "{% if messages|length > 2 %}" + NESTED + "{% endif %}<|im_end|>"
    renderer = ChatRenderer(tokenizer_with(endless_later))
    assert renderer.render([Message("user", "?")]) == "<|im_end|>"
    said: list[str] = []

    def play() -> None:
        try:
            renderer.render([Message("user", "?")] * 3)
        except EmailRLError as error:
            said.append(error.message)

    thread = threading.Thread(target=play)
    thread.start()
    thread.join(20)
    assert said == ["The model's chat template cannot be used: it takes longer than 0.2 seconds."]
