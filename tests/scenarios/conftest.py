"""Question rows and files for the tests of loading."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from emailrl.trajectory import Scenario

Row = dict[str, Any]


def row(**changes: Any) -> Row:
    """A complete question row."""
    whole: Row = {
        "id": 7,
        "question": "Who leads Alpha?",
        "answer": "Ana Roe",
        "message_ids": ["<1@x>"],
        "how_realistic": 0.8,
        "inbox_address": "Me@X.org",
        "query_date": "2001-05-04",
    }
    return whole | changes


def scenario(number: int, inbox: str, split: str | None = None, kind: str | None = None) -> Scenario:
    """The question with id ``q<number>`` on an inbox."""
    return Scenario(f"q{number}", f"Q{number}?", "A", [f"<{number}@x>"], inbox, "2001-05-04", 1.0, split, kind)


@pytest.fixture
def question_file(tmp_path: Path) -> Callable[[list[Row]], Path]:
    """Writes rows to a JSONL file."""

    def write(rows: list[Row]) -> Path:
        path = tmp_path / "questions.jsonl"
        path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
        return path

    return write
