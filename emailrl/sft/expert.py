"""Scripted experts: play demo scenarios as a person would, with deliberate mistakes.

They teach an untrained policy the format of the task (``emailrl sft``), not how to solve it: usually they search poorly
(a single keyword) and rarely well, so that reinforcement learning has something to find.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

from emailrl.store.demo import ProjectFact
from emailrl.trajectory import Message

MAX_RESULTS = 3
"""Hits that experts request: few enough that one keyword often misses the right email."""

USUAL = frozenset(("room", "flight"))
"""Topics for which most experts search well; for the others few do."""

GIVE_UP = "I don't know."


@dataclass(frozen=True, slots=True)
class Habits:
    """Probabilities of expert actions."""

    two_keywords: float = 0.15
    """Search for project and topic together (the good habit) rather than for the project alone."""
    two_keywords_usual: float = 0.8
    """The same for the few topics where it is common (``USUAL``)."""
    topic_only: float = 0.04
    """Search for the topic alone."""
    open_first: float = 0.10
    """Open the newest hit, ignoring its snippet."""
    search_again: float = 0.12
    """If no hit looks right, search with both keywords instead of giving up."""
    try_next: float = 0.5
    """After a wrong email, open another hit instead of giving up."""


class Expert:
    """Plays one scenario, knowing the fact behind the question."""

    def __init__(self, fact: ProjectFact, rng: random.Random, habits: Habits) -> None:
        self.fact = fact
        self.rng = rng
        self.habits = habits
        self.unread: list[dict[str, str]] = []
        self.searches: list[list[str]] = []
        self.opened = ""

    def act(self, messages: Sequence[Message]) -> str:
        """The text of the next assistant turn."""
        last = messages[-1]
        if last.role != "tool":
            return self._search(self._first_keywords())
        result = json.loads(last.content)
        if isinstance(result, list):
            self.unread = list(result)
            return self._open(careless=self.rng.random() < self.habits.open_first)
        if self.opened == self.fact.message_id:
            return self._answer(self.fact.value, [self.opened])
        if self.unread and self.rng.random() < self.habits.try_next:
            return self._open(careless=False)
        return self._give_up_or_search()

    def _first_keywords(self) -> list[str]:
        draw = self.rng.random()
        usual = self.fact.topic.name in USUAL
        two_keywords = self.habits.two_keywords_usual if usual else self.habits.two_keywords
        if draw < two_keywords:
            return [self.fact.project, self.fact.topic.keyword]
        if draw < two_keywords + self.habits.topic_only:
            return [self.fact.topic.keyword]
        return [self.fact.project]

    def _open(self, *, careless: bool) -> str:
        right = [hit for hit in self.unread if hit["message_id"] == self.fact.message_id]
        alike = [hit for hit in self.unread if self.fact.topic.keyword in hit["snippet"].lower()]
        choice = self.unread[:1] if careless else right or alike
        if not choice:
            return self._give_up_or_search()
        self.unread.remove(choice[0])
        self.opened = choice[0]["message_id"]
        return _call("read_email", {"message_id": self.opened})

    def _give_up_or_search(self) -> str:
        both = [self.fact.project, self.fact.topic.keyword]
        if both not in self.searches and self.rng.random() < self.habits.search_again:
            return self._search(both)
        return self._answer(GIVE_UP, [])

    def _search(self, keywords: list[str]) -> str:
        self.searches.append(keywords)
        return _call("search_emails", {"keywords": keywords, "max_results": MAX_RESULTS})

    def _answer(self, answer: str, sources: list[str]) -> str:
        return _call("return_final_answer", {"answer": answer, "sources": sources})


def _call(name: str, arguments: dict[str, object]) -> str:
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"
