"""Searches for a question: good ones, and poor ones that people also make."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from emailrl.facts.lexicon import STOPWORDS
from emailrl.questions.inbox.mail import topic_of
from emailrl.sft.searching.asked import Asked

Search = dict[str, Any]
"""Arguments of ``search_emails``; None values are omitted."""


MOST_WORDS = 5
"""Maximum words of a free-form question to search for."""


@dataclass(frozen=True, slots=True)
class Habits:
    """Probabilities of searcher actions."""

    poor_search: float = 0.5
    """Start with a search that is too narrow, too broad or in other words."""
    with_sender: float = 0.5
    """Add the sender, if the question names one, to words of the subject."""
    few_results: float = 0.4
    """Ask for fewer hits than there may be."""
    careless: float = 0.2
    """Open the next hit, ignoring its snippet."""
    full_sentence: float = 0.4
    """Answer in a sentence rather than a word."""


CAREFUL = Habits(0.0, 0.0, 0.0, 0.0, 0.0)
"""Only good searches, and the likeliest hit first."""


def address_guess(person: str, me: str) -> str:
    """Guess an address from a name: first.last at the asker's domain; addresses are unchanged."""
    if "@" in person:
        return person.lower()
    return ".".join(person.lower().split()) + "@" + me.rpartition("@")[2]


def topic_words(topic: str) -> list[str]:
    """A topic's distinct content words, in order and original spelling."""
    telling = topic_of(topic).words
    words = dict.fromkeys(re.findall(r"[^\W_]+(?:['’][^\W_]+)*", topic))
    return [word for word in words if word.lower() in telling] or list(words)


def topic_searches(
    asked: Asked, question: str, sender: str | None, habits: Habits, rng: random.Random
) -> Iterator[Search]:
    """Searches for a mail by its topic: often poor ones first, then better ones, without repeats."""
    assert asked.topic is not None
    words = topic_words(asked.topic)
    given = {"from_addr": sender} if sender else {}
    tried: list[Search] = []
    for chance in (habits.poor_search, habits.poor_search / 2):
        if rng.random() < chance:
            tried.append(_poor_topic_search(question, words, given, rng))
    some = rng.sample(words, rng.randint(min(2, len(words)), min(4, len(words))))
    good = [[asked.topic], words[:5] if habits is CAREFUL else some]
    if habits is not CAREFUL:
        rng.shuffle(good)
    for at, keywords in enumerate(good):
        filters = given if at == 0 and rng.random() < habits.with_sender else {}
        tried.append({"keywords": keywords, **filters})
    tried.append({"keywords": sorted(words, key=len)[-2:]})
    yield from (search for at, search in enumerate(tried) if search not in tried[:at])


def _poor_topic_search(question: str, words: list[str], given: Search, rng: random.Random) -> Search:
    """Too broad: one word, or only the sender. Too narrow: with a word that only the question may have."""
    few = rng.sample(words, min(2, len(words)))
    others = [word for word in re.findall(r"\w+", question) if len(word) >= 4 and word not in words]
    poor: list[Search] = [{"keywords": few[:1]}, {"keywords": few}]
    if given:
        poor += [{"keywords": few[:1], **given}, given]
    if others:
        poor.append({"keywords": [*few, rng.choice(others)]})
    return rng.choice(poor)


def word_searches(words: list[str], rng: random.Random) -> Iterator[Search]:
    """Searches for some of a free-form question's words, names and long words first: two at a time, then one.

    The last search is for the most telling word alone: an email may share no other word with the question.
    """
    content = [word for word in words if word.lower() not in STOPWORDS] or words
    told = sorted(content, key=lambda word: (word[0].islower(), -len(word)))[:MOST_WORDS]
    pairs = [list(pair) for pair in itertools.combinations(told, 2)]
    rng.shuffle(pairs)
    for keywords in (*pairs[:3], *([word] for word in told[1::-1])):
        yield {"keywords": keywords}
