"""Plays the assistant: plans and searches by the question, the prompt and the tool results alone.

The last search of a plan is good; earlier ones may be poor, as people's are.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any, TypeVar

from emailrl.agent.tools import MAX_RESULTS
from emailrl.facts.lexicon import STOPWORDS
from emailrl.questions.inbox.mailbox import topic_of
from emailrl.records.trajectory import Message
from emailrl.settings import AgentSettings
from emailrl.sft.searching.asked import Asked, ShownMail, day_of, is_called, people_of

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


Result = tuple[str, list[str]] | None
"""Answer and sources; None if nothing matches."""
EARLIEST_YEAR = 1990
"""Earliest year searched."""


def by_topic(searcher: Searcher) -> Turns[Result]:
    """Search for the topic, read likely hits, and search again with better words."""
    asked = _asked(searcher)
    sender = searcher.given.me if asked.is_mine else searcher.address
    for search in topic_searches(asked, searcher.given.question, sender, searcher.habits, searcher.rng):
        hits = yield from searcher.search(**search)
        if asked.kind == "thread_starter":
            hits = hits[::-1]
        hits = _likeliest_first(searcher, hits, topic_words(asked.topic or ""))
        if found := (yield from searcher.first_that_answers(hits, searcher.rng.randint(1, 4))):
            return found
    return None


def by_words(searcher: Searcher) -> Turns[Result]:
    """For free-form questions: search for a few of their words, then others; read all hits of the last search."""
    words = topic_words(searcher.given.question)
    hits: list[Hit] = []
    for search in word_searches(words, searcher.rng):
        hits = _likeliest_first(searcher, (yield from searcher.search(**search)), words)
        if found := (yield from searcher.first_that_answers(hits, searcher.rng.randint(1, 3))):
            return found
    return (yield from searcher.first_that_answers(hits, MAX_RESULTS))


def on_day(searcher: Searcher) -> Turns[Result]:
    """Search by the day, and by the sender where the question names one; read on until a mail fits."""
    day = _asked(searcher).day
    window: Search = {"sent_after": _iso(day), "sent_before": _iso(day, 1)}
    poor: list[Search] = [
        {"sent_after": _iso(day), "sent_before": _iso(day)},
        {"sent_after": _iso(day, -1), "sent_before": _iso(day, 2)},
        {"from_addr": searcher.address} if searcher.address else {"sent_before": _iso(day, 1)},
    ]
    if searcher.address:
        poor.append(window)
    if found := (yield from _poorly(searcher, poor)):
        return found
    if searcher.address:
        hits = yield from _by_person(searcher, **window)
    else:
        hits = yield from searcher.search(to_addr=searcher.rng.choice((None, searcher.given.me)), **window)
    return (yield from searcher.first_that_answers(hits, MAX_RESULTS))


def last_before(searcher: Searcher) -> Turns[Result]:
    """Search by the sender before the day: the newest hit is the email."""
    before: Search = {"sent_before": _iso(_asked(searcher).day)}
    if found := (yield from _poorly(searcher, [before, {"from_addr": searcher.address}])):
        return found
    return (yield from searcher.first_that_answers((yield from _by_person(searcher, **before)), 1))


def first_after(searcher: Searcher) -> Turns[Result]:
    """Search by the sender after the day: the oldest hit is the email, once all remaining hits fit in one search."""
    day = _asked(searcher).day
    after: Search = {"sent_after": _iso(day, 1)}
    weeks = [after | {"sent_before": _iso(day, 1 + days)} for days in (15, 8, 4)]
    if searcher.rng.random() < searcher.habits.poor_search:
        yield from searcher.search(**searcher.rng.choice([{"from_addr": searcher.address}, weeks[1], after]))
    start = searcher.rng.choice((0, 1)) if searcher.habits.poor_search else 0
    for window in (after, *weeks)[start:]:
        hits = yield from _by_person(searcher, max_results=MAX_RESULTS, **window)
        if 0 < len(hits) < MAX_RESULTS:
            return (yield from searcher.first_that_answers(hits[::-1], 1))
    return None


def first_contact(searcher: Searcher) -> Turns[Result]:
    """Bisect the period of the first email until one search shows all emails before its end."""
    low, high = date(EARLIEST_YEAR, 1, 1), date.fromisoformat(searcher.given.today)
    hits = yield from _by_person(searcher, max_results=MAX_RESULTS)
    if not hits:
        return None
    span = searcher.rng.choice((3, 6, 12))
    while len(hits) in (0, MAX_RESULTS):
        months = (high.year - low.year) * 12 + high.month - low.month
        back = span if low.year == EARLIEST_YEAR else months // 2
        middle = _month(high, -max(1, back))
        if middle <= low:  # the tenth email back is the best available
            break
        hits = yield from searcher.search(
            from_addr=searcher.address, sent_before=middle.isoformat(), max_results=MAX_RESULTS
        )
        low, high = (low, middle) if hits else (middle, high)
        span *= 2
    return (yield from searcher.first_that_answers(hits[::-1], 1))


def count_in_month(searcher: Searcher) -> Turns[Result]:
    """Search by the sender within the month, and count."""
    month = _asked(searcher).month
    assert month is not None
    window: Search = {"sent_after": month.isoformat(), "sent_before": _month(month, 1).isoformat()}
    if searcher.rng.random() < searcher.habits.poor_search:
        poor: list[Search] = [{"from_addr": searcher.address}, window, window | {"sent_before": _iso(month, 28)}]
        yield from searcher.search(**searcher.rng.choice(poor))
    hits = yield from _by_person(searcher, max_results=MAX_RESULTS, **window)
    if not hits:
        return None
    return str(len(hits)), [hit["message_id"] for hit in hits]


def count_on_day(searcher: Searcher) -> Turns[Result]:
    """Search by the day among the mails to the asker, and count."""
    day = _asked(searcher).day
    window: Search = {"sent_after": _iso(day), "sent_before": _iso(day, 1)}
    if searcher.rng.random() < searcher.habits.poor_search:
        yield from searcher.search(**searcher.rng.choice([window, window | {"sent_before": _iso(day)}]))
    hits = yield from searcher.search(to_addr=searcher.given.me, max_results=MAX_RESULTS, **window)
    return (str(len(hits)), [hit["message_id"] for hit in hits]) if hits else None


def thread_count(searcher: Searcher) -> Turns[Result]:
    """Search for the topic as a phrase, and count the hits that have it as their subject."""
    topic = _asked(searcher).topic or ""
    if searcher.rng.random() < searcher.habits.poor_search:
        yield from searcher.search(keywords=topic_words(topic)[:2])
    hits = yield from searcher.search(keywords=[topic], max_results=MAX_RESULTS)
    thread = [hit["message_id"] for hit in hits if topic_of(_plain(hit)).key == " ".join(topic.split()).lower()]
    return (str(len(thread)), thread) if thread else None


def both_subjects(searcher: Searcher) -> Turns[Result]:
    """Search by sender and day, read both mails, and name their subjects, the older first."""
    day = _asked(searcher).day
    hits = yield from _by_person(searcher, sent_after=_iso(day), sent_before=_iso(day, 1))
    found = []
    for hit in hits[::-1]:
        mail = yield from searcher.read(hit)
        if subject := searcher.judge(mail):
            found.append((subject, hit["message_id"]))
    if len(found) != 2:
        return None
    return " and ".join(subject for subject, _ in found), [message_id for _, message_id in found]


def reply_gap(searcher: Searcher) -> Turns[Result]:
    """Read the thread until the asker's mail and the reply to it are found, and take the days between."""
    topic, me = _asked(searcher).topic or "", searcher.given.me
    for search in topic_searches(_asked(searcher), searcher.given.question, None, searcher.habits, searcher.rng):
        hits = yield from searcher.search(**search)
        mine = reply = None
        for hit in _likeliest_first(searcher, hits, topic_words(topic))[:4]:
            mail = yield from searcher.read(hit)
            if searcher.judge(mail):
                reply = mail
            elif mail["from_address"] == me and topic_of(mail["subject"]).key == " ".join(topic.split()).lower():
                mine = mail
            if mine and reply and (first := day_of(mine)) and (last := day_of(reply)):
                return str((last - first).days), [mine["message_id"], reply["message_id"]]
    return None


def _poorly(searcher: Searcher, searches: Sequence[Search]) -> Turns[Result]:
    """At times make one of several poor searches and look at its results."""
    if searcher.rng.random() >= searcher.habits.poor_search:
        return None
    hits = yield from searcher.search(**searcher.rng.choice(searches))
    return (yield from searcher.first_that_answers(hits, searcher.rng.randint(1, 3)))


def _by_person(searcher: Searcher, **filters: str | int | None) -> Turns[list[Hit]]:
    """Search by the person; if the guessed address finds nothing, search for the name to learn the address."""
    hits = yield from searcher.search(from_addr=searcher.address, **filters)
    person = _asked(searcher).person
    if hits or person is None or "@" in person:
        return hits
    for keywords in ([person], person.split()[-1:]):
        found = yield from searcher.search(keywords=keywords)
        for hit in found[:2]:
            mail = yield from searcher.read(hit)
            for address in people_of(mail):
                if is_called(address, person) and address != searcher.address:
                    searcher.address = address
                    return (yield from searcher.search(from_addr=address, **filters))
    return []


def _likeliest_first(searcher: Searcher, hits: Sequence[Hit], words: Sequence[str]) -> list[Hit]:
    """Sort hits by matching words in their snippets; ties go to snippets that are only a subject."""
    if searcher.rng.random() < searcher.habits.careless:
        return searcher.rng.sample(hits, len(hits))
    wanted = {word.lower() for word in words}

    def worth(hit: Hit) -> tuple[int, bool]:
        snippet = _plain(hit)
        return len(wanted & topic_of(snippet).words), "..." not in snippet

    return sorted(hits, key=worth, reverse=True)


def _plain(hit: Hit) -> str:
    return hit["snippet"].replace("<b>", "").replace("</b>", "")


def _asked(searcher: Searcher) -> Asked:
    assert searcher.given.asked is not None
    return searcher.given.asked


def _iso(day: date | None, later: int = 0) -> str:
    assert day is not None
    return (day + timedelta(days=later)).isoformat()


def _month(day: date, later: int) -> date:
    """The first of the month, a number of months later."""
    months = day.year * 12 + day.month - 1 + later
    return date(months // 12, months % 12 + 1, 1)


PLANS: dict[str, SearchPlan] = {
    "subject": on_day,
    "only_sender_of_day": on_day,
    "last_before": last_before,
    "first_after": first_after,
    "first_contact": first_contact,
    "count_in_month": count_in_month,
    "count_on_day": count_on_day,
    "thread_count": thread_count,
    "both_subjects": both_subjects,
    "reply_gap": reply_gap,
}
"""By kind of question; the others are asked by topic."""
