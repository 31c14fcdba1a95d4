"""Whether an answer agrees with a reference answer, without a model."""

from __future__ import annotations

import re
import unicodedata

from emailrl.environment.rubric import is_i_dont_know


def match(question: str, reference: str, answer: str) -> bool:
    """True if ``answer`` gives what ``reference`` gives."""
    expected, given = _words(reference), _words(answer)
    if is_i_dont_know(answer) or not given:
        return False
    return f" {' '.join(expected)} " in f" {' '.join(given)} "


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", unicodedata.normalize("NFKC", text).lower())
