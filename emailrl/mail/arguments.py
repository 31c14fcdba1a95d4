"""Checks the arguments of an agent's mailbox queries; a bad one raises ``ToolError``."""

from __future__ import annotations

import re
from datetime import date

from emailrl.errors import ToolError

MAX_RESULTS = 10
MAX_KEYWORDS = 32
MAX_KEYWORD_CHARS = 1000

_DAY = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)


def check_text(name: str, value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ToolError(f"{name} holds characters that are no text.") from None


def text_match(keywords: object) -> str | None:
    """Return the FTS5 expression of keywords, each quoted: an implicit AND, as in ART-E; None without keywords."""
    if not isinstance(keywords, list | tuple):
        raise ToolError("keywords must be a list of strings.")
    if not keywords:
        return None
    if len(keywords) > MAX_KEYWORDS:
        raise ToolError(f"There are more than {MAX_KEYWORDS} keywords.")
    for keyword in keywords:
        if not isinstance(keyword, str):
            raise ToolError("keywords must be a list of strings.")
        if len(keyword) > MAX_KEYWORD_CHARS:
            raise ToolError(f"A keyword is longer than {MAX_KEYWORD_CHARS} characters.")
        check_text("keywords", keyword)
    return f"{{subject body}} : ({' '.join(map(quoted, keywords))})"


def quoted(keyword: str) -> str:
    """Return a keyword as an FTS5 phrase."""
    # NUL would end the expression inside SQLite; to the tokenizer it is no letter, like the space put in its place.
    return '"' + keyword.replace('"', '""').replace("\0", " ") + '"'


def check_address(name: str, value: object) -> str | None:
    """Return an address in its stored form; None if missing or empty."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise ToolError(f"{name} must be an address.")
    check_text(name, value)
    return value.strip().lower() or None


def check_day(name: str, value: object) -> str | None:
    """Return a validated day unchanged; None if missing or empty."""
    if value is None or value == "":
        return None
    if isinstance(value, str) and _DAY.fullmatch(value):
        try:
            date.fromisoformat(value)
        except ValueError:
            raise ToolError(f"{name} is no day of the calendar: {value}.") from None
        return value
    raise ToolError(f"{name} must be a date as YYYY-MM-DD.")


def check_count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ToolError("max_results must be a whole number of at least 1.")
    if value > MAX_RESULTS:
        raise ToolError(f"max_results must be less than or equal to {MAX_RESULTS}.")
    return value
