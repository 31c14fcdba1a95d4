"""Hostile text made harmless for a terminal or a log, at the one place where all of it passes.

Mail, model output, errors of servers and file names may hold escape sequences, carriage returns or bidirectional
overrides. Whatever does not print as itself is shown by name instead: by ``PlainStream`` on stdout and stderr, and by
the formatter of ``training.log``. Callers escape nothing; they only decide what must fit on one line.
"""

from __future__ import annotations

import io
import re
import sys
import unicodedata
from typing import Any, TextIO

_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories shown by code point: control, format (bidi, zero width), surrogate, unassigned, separator."""

_SUSPECT = re.compile(r"[^\t\n\x20-\x7e]")  # cheap first look: most text is printable ASCII


def plain(text: str) -> str:
    """Return ``text`` with every character that a terminal would act on, or not show, replaced by something visible.
    Line feeds and tabs stay, CRLF becomes a line feed; other C0 controls become their Unicode pictures (``␛``); the
    rest of the hidden categories become ``<U+202E>``."""
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
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    return f"<U+{code:04X}>" if unicodedata.category(character) in _HIDDEN else character


# -- the gate ---------------------------------------------------------------------------------------------------------


class PlainStream(io.TextIOWrapper):
    """Stands in for stdout or stderr: all that is written is ``plain``, by whichever library."""

    def __init__(self, terminal: TextIO) -> None:
        super().__init__(terminal.buffer, terminal.encoding or "utf-8", "backslashreplace")
        self.terminal = terminal
        """The stream itself, for what may steer the terminal: a console that renders plain text in color."""

    def write(self, text: str) -> int:
        """Write the text, made plain."""
        self.terminal.write(plain(text))
        return len(text)

    def flush(self) -> None:
        """Flush the stream itself: nothing is buffered here."""
        self.terminal.flush()

    def close(self) -> None:
        """Leave the stream open; it has another owner."""


def guard_streams() -> None:
    """From now on, whatever this process prints on stdout and stderr is ``plain``."""
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if not isinstance(stream, PlainStream):
            setattr(sys, name, PlainStream(stream))


def tell(line: str) -> None:
    """Print one line on stderr."""
    print(one_line(line), file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """A human-readable duration: 90 s, 12 min, 3.4 h, 5.1 days."""
    for length, most, unit in ((1, 120, "s"), (60, 7200, "min"), (3600, 172_800, "h")):
        if seconds < most:
            return f"{seconds / length:.{0 if length < 3600 else 1}f} {unit}"
    return f"{seconds / 86_400:.1f} days"
