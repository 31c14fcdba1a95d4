"""Plays the assistant: knows only the question, the prompt and its tool results."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from emailrl.environment.tools import MAX_RESULTS
from emailrl.settings import AgentSettings
from emailrl.sft.searching.asked import Asked
from emailrl.sft.searching.judging import ShownMail
from emailrl.sft.searching.searches import Habits, Search, address_guess
from emailrl.trajectory import Message

T = TypeVar("T")
Turns = Generator[str, Any, T]
"""Yields assistant turns and is sent tool results; returns the outcome."""
SearchPlan = Callable[["Searcher"], Turns[tuple[str, list[str]] | None]]
"""Generates a searcher's turns; returns answer and sources, or None if nothing matches."""
Hit = dict[str, str]

I_DONT_KNOW = "I don't know"
MOST_SHOWN = 18_000
"""Characters of prompt and tool results after which a searcher gives up: a context of 8,192 tokens is nearly full."""
_SENTENCES = ("{}.", "It is {}.", "It was {}.", "The answer is {}.")


@dataclass(frozen=True, slots=True)
class Given:
    """The content of a conversation's first two messages."""

    question: str
    asked: Asked | None
    """The parsed question; None for a free-form one."""
    me: str
    """The inbox."""
    today: str
    """``YYYY-MM-DD``"""


class Searcher:
    """One question's player; ``plan`` makes its turns, ``judge`` extracts the answer from an email."""

    def __init__(
        self, given: Given, plan: SearchPlan, judge: Callable[[ShownMail], str | None], *,
        agent: AgentSettings, habits: Habits, rng: random.Random,
    ) -> None:  # fmt: skip
        self.given, self.judge, self.habits, self.rng = given, judge, habits, rng
        asked = given.asked
        self.address = address_guess(asked.person, given.me) if asked and asked.person else None
        """The person's address; a guess until an email confirms it."""
        self._any_keyword = [] if agent.search_without_keywords else ["the"]
        self._turns_left = agent.max_turns
        self._shown = 0
        self._has_read: dict[str, ShownMail] = {}
        self._playing = plan(self)

    def act(self, messages: Sequence[Message]) -> str:
        """The text of the next assistant turn."""
        last = messages[-1]
        self._turns_left -= 1
        self._shown += len(last.content)
        if not self._turns_left or self._shown > MOST_SHOWN:
            return _answer(I_DONT_KNOW, [])
        try:
            return self._playing.send(json.loads(last.content) if last.role == "tool" else None)
        except StopIteration as over:
            if over.value is None:
                return _answer(I_DONT_KNOW, [])
            text, sources = over.value
            return _answer(self._worded(text), sources)

    def search(self, **arguments: Any) -> Turns[list[Hit]]:
        """The hits of one search, with or without keywords."""
        search: Search = {"keywords": self._any_keyword} | {k: v for k, v in arguments.items() if v is not None}
        if "max_results" not in search and self.rng.random() < self.habits.few_results:
            search["max_results"] = self.rng.randint(2, MAX_RESULTS)
        return (yield _call("search_emails", search))

    def read(self, hit: Hit) -> Turns[ShownMail]:
        """The email of a hit, read only once."""
        message_id = hit["message_id"]
        if message_id not in self._has_read:
            self._has_read[message_id] = yield _call("read_email", {"message_id": message_id})
        return self._has_read[message_id]

    def first_that_answers(self, hits: Sequence[Hit], patience: int) -> Turns[tuple[str, list[str]] | None]:
        """Read hits in order, at most ``patience`` new ones, until one answers."""
        for hit in [hit for hit in hits if hit["message_id"] not in self._has_read][:patience]:
            mail = yield from self.read(hit)
            if answer := self.judge(mail):
                return answer, [hit["message_id"]]
        return None

    def _worded(self, text: str) -> str:
        """Sometimes put a short answer in a sentence; free-form answers stay as they are."""
        if self.given.asked is not None and self.rng.random() < self.habits.full_sentence:
            return self.rng.choice(_SENTENCES).format(text)
        return text


def _answer(text: str, sources: list[str]) -> str:
    return _call("return_final_answer", {"answer": text, "sources": sources})


def _call(name: str, arguments: dict[str, object]) -> str:
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"
