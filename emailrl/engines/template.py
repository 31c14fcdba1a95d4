"""Runs a model's chat template on messages: untrusted code that comes with the model.

transformers runs it in Jinja's sandbox, which blocks files and unsafe attributes. The sandbox does not limit run time
and output length; this module does.
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
"""Time limit per prompt; templates take milliseconds."""
MOST_CHARACTERS: Final = 50_000_000
_TEMPLATE_FILE: Final = "<template>"
"""Jinja's file name for a template made from a string."""


class _TooLongError(Exception):
    """The template exceeded its time limit."""


def apply_template(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], tools: list[Any] | None = None, *,
    add_generation_prompt: bool = False,
) -> str:  # fmt: skip
    """Render a conversation with the tokenizer's template; EmailRLError if it fails or exceeds a limit."""
    try:
        with _bounded():
            text = tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
            )
    except Exception as error:  # it may raise anything
        line = " ".join(str(error).split())[:200]
        reason = line if isinstance(error, _TooLongError) else f"{type(error).__name__}: {line}"
        raise _failed(reason) from None
    if len(str(text)) > MOST_CHARACTERS:
        raise _failed(f"it renders {len(messages)} messages as {len(str(text)):,} characters")
    return str(text)


@contextmanager
def _bounded() -> Iterator[None]:
    """Check the clock on every executed template line; works in any thread, on any system."""
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
