"""Hostile text made harmless for a terminal.

Mail bodies, model output and file names may hold escape sequences, carriage returns that overwrite a line, or
bidirectional overrides that reorder what is read. Everything that does not print as itself is shown by name instead.
"""

from __future__ import annotations

import re
import unicodedata

_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories shown by code point: control, format (bidi, zero width), surrogate, unassigned, separator."""

_SUSPECT = re.compile(r"[^\n\x20-\x7e]")
"""Cheap first look: most text is printable ASCII."""


def plain(text: str) -> str:
    """Return ``text`` with every character that a terminal would act on, or not show, replaced by something visible.

    Line feeds stay, CRLF becomes a line feed, a tab four spaces; other C0 controls become their Unicode pictures
    (``␛``); the rest of the hidden categories become ``<U+202E>``. Rich markup stays: show the result in a
    ``rich.text.Text``, which reads none.
    """
    return _SUSPECT.sub(_visible, text.replace("\r\n", "\n"))


def plain_line(text: str) -> str:
    """Return ``plain(text)`` on one line: line feeds become ``⏎``."""
    return plain(text).replace("\n", "⏎")


def one_line(text: str) -> str:
    """Return ``text`` on one line, a space for whatever is not printed as itself: for what is said and logged."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def cut(text: str, most: int) -> str:
    """Return ``text``, or its first ``most`` characters and an ellipsis if it is longer."""
    return text if len(text) <= most else f"{text[:most]}…"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the error's type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 step``, ``1,589 emails``, ``2 inboxes``, ``2 trajectories``."""
    if number != 1:
        noun = f"{noun[:-1]}ies" if noun.endswith("ry") else f"{noun}es" if noun.endswith("x") else f"{noun}s"
    return f"{number:,} {noun}"


def _visible(match: re.Match[str]) -> str:
    character = match.group()
    code = ord(character)
    if character == "\t":
        return "    "
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    return f"<U+{code:04X}>" if unicodedata.category(character) in _HIDDEN else character
