"""Question files for the tests of loading."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from questions.questions import Row


@pytest.fixture
def question_file(tmp_path: Path) -> Callable[[list[Row]], Path]:
    """Writes rows to a JSONL file."""

    def write(rows: list[Row]) -> Path:
        path = tmp_path / "questions.jsonl"
        path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
        return path

    return write
