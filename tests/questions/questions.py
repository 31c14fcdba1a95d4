"""Question rows and scenarios for the tests of this room."""

from __future__ import annotations

from typing import Any

from emailrl.records.trajectory import Scenario

Row = dict[str, Any]


def row(**changes: Any) -> Row:
    """A complete question row."""
    whole: Row = {"id": 7, "question": "Who leads Alpha?", "answer": "Ana Roe", "message_ids": ["<1@x>"]}
    return whole | {"how_realistic": 0.8, "inbox_address": "Me@X.org", "query_date": "2001-05-04"} | changes


def scenario(number: int, inbox: str, split: str | None = None, kind: str | None = None) -> Scenario:
    """The question with id ``q<number>`` on an inbox."""
    return Scenario(f"q{number}", f"Q{number}?", "A", [f"<{number}@x>"], inbox, "2001-05-04", 1.0, split, kind)
