"""``docs/guides/troubleshooting.md`` names the symptoms people search for, and messages that the code really prints."""

from __future__ import annotations

import pytest
from documents.pages import DOCS, ROOT

PAGE = (DOCS / "guides/troubleshooting.md").read_text(encoding="utf-8")
SOURCE = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "emailrl").rglob("*.py"))


@pytest.mark.parametrize(
    "symptom",
    [
        *("exceptions=100", "Request timed out", "CUDA out of memory", "FileNotFoundError: enron_emails.db"),
        *("Too slow", "Accuracy does not rise", "Out of memory", "Time-outs"),
    ],
)
def test_symptoms(symptom: str) -> None:
    assert symptom in PAGE


@pytest.mark.parametrize(
    "message",
    ["Every rollout failed", "no complete reply within", "Out of memory on a single sample", "No such mail database"],
)
def test_messages_are_those_of_the_code(message: str) -> None:
    assert message in PAGE and message in SOURCE
