"""A chat template run on messages: it comes with the model, from whoever made that, and is a program.

transformers runs it in Jinja's sandbox, where it reaches no file and no attribute that it should not. What the sandbox
does not bound is how long it runs and how much it says; both are here.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from emailrl.errors import EmailRLError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_SECONDS: Final = 10.0
"""For one prompt; templates take milliseconds."""
MOST_CHARACTERS: Final = 50_000_000
_TEMPLATE_FILE: Final = "<template>"
"""What Jinja calls the file of a template made from a string."""


class _TooLongError(Exception):
    """The template has run for too long."""


def apply_template(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], tools: list[Any] | None = None, *,
    add_generation_prompt: bool = False,
) -> str:  # fmt: skip
    """The text the tokenizer's template makes of a conversation; EmailRLError where it fails, or knows no end."""
    try:
        with _bounded():
            text = tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
            )
    except Exception as error:  # it may raise whatever it likes
        line = " ".join(str(error).split())[:200]
        reason = line if isinstance(error, _TooLongError) else f"{type(error).__name__}: {line}"
        raise _failed(reason) from None
    if len(str(text)) > MOST_CHARACTERS:
        raise _failed(f"it renders {len(messages)} messages as {len(str(text)):,} characters")
    return str(text)


@contextmanager
def _bounded() -> Iterator[None]:
    """Look at the clock on every line of the template that runs; in any thread, on any system."""
    end = time.monotonic() + MOST_SECONDS

    def on_line(frame: FrameType, event: str, argument: object) -> Any:
        if time.monotonic() > end:
            raise _TooLongError(f"it takes longer than {MOST_SECONDS:g} seconds")
        return on_line

    def on_call(frame: FrameType, event: str, argument: object) -> Any:
        return on_line if frame.f_code.co_filename == _TEMPLATE_FILE else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(before)


def _failed(reason: str) -> EmailRLError:
    return EmailRLError(
        f"The model's chat template cannot be used: {reason.rstrip('.')}.", "Set CHAT_TEMPLATE to one that works."
    )
