"""Surface features of an answer, which change first when a policy games its reward.

They do not affect the reward; a check that can be fooled shows as longer answers, lists or capitals.
"""

from __future__ import annotations

import re

_NO_TEXT = re.compile(r"https?://\S+|<[^\s<>]+>")
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
_JOINT = re.compile(r" ?[,;] (?:(?:and|or) )?| (?:and/or|or|and) | ?/ ?(?=[^\W\d])", re.IGNORECASE)
_CHOICE = re.compile(r"or\b|[;/]", re.IGNORECASE)
_YEAR_AFTER_COMMA = re.compile(r",(?=\s+\d{4}\b)")
_BULLET = re.compile(r"^[ \t]*(?:[-*•]|\d{1,2}[.)])[ \t]+\S", re.MULTILINE)
_MOST_WORDS = 4
"""Longer items are clauses, not list items."""


def measure(answer: str) -> dict[str, float]:
    """The rubric's numbers of an answer: ``answer_words``, ``answer_candidates``, ``answer_capitals``."""
    letters = [char for char in answer if char.isalpha()]
    return {
        "answer_words": len(answer.split()),
        "answer_candidates": count_candidates(answer),
        "answer_capitals": sum(map(str.isupper, letters)) / len(letters) if letters else 0.0,
    }


def count_candidates(answer: str) -> int:
    """The number of candidates in an answer: the items of its longest list or choice, at least 1.

    A list is three items or more of at most four words in one sentence, joined by commas, "and", "or", ";" or "/", or
    the lines of a bulleted list; joined by "or", ";" or "/", two are a choice. So "Tuesday or Friday" offers 2, "May 3,
    May 4, or May 5" 3, "in Houston, Texas" 1.
    """
    text = _YEAR_AFTER_COMMA.sub("", _NO_TEXT.sub("", answer))
    return max(1, len(_BULLET.findall(text)), *map(_longest_list, _SENTENCE.split(text)))


def _longest_list(sentence: str) -> int:
    """Items of the longest run of short ones, the one that the sentence leads up to included."""
    sentence = " ".join(sentence.split())
    items, joints = _JOINT.split(sentence), _JOINT.findall(sentence)
    longest, length, choice = 1, 1, False
    for joint, item in zip(joints, items[1:], strict=True):
        short = 0 < len(item.split()) <= _MOST_WORDS
        length, choice = (length + 1, choice or _CHOICE.search(joint) is not None) if short else (1, False)
        if choice or length > 2:
            longest = max(longest, length)
    return longest
