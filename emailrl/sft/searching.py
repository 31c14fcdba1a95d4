"""Experts that search by the question, the prompt and the tool results alone, read until an email matches, and cite it.
The last search of a plan is good; earlier ones may be poor, as people's are."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from random import Random
from typing import Any, TypeVar

from emailrl.agent.task import MailEnvironment, agent_mailbox
from emailrl.questions.inbox import topic_of
from emailrl.questions.load import Split, read_questions
from emailrl.records.trajectory import Message, Scenario
from emailrl.rewards.matching import match
from emailrl.settings import AgentSettings, Settings
from emailrl.settings.tree import MAX_RESULTS
from emailrl.sft.asked import Asked, ShownMail, answer_of, day_of, is_called, read_question, recipients_of, told_in
from emailrl.sft.examples import call_text, converse, next_turn

T = TypeVar("T")
Turns = Generator[str, Any, T]  # Yields assistant turns and is sent tool results; returns the outcome
Result = tuple[str, list[str]] | None  # Answer and sources; None if nothing matches
Search = dict[str, Any]  # Arguments of ``search_emails``; None values are omitted
Hit = dict[str, str]

MOST_SEARCHES = 3  # for a free-form question, before "I don't know"
FEWEST_RESULTS = 5  # that such a search asks for
FEW_HITS = 2  # so few are read whatever their snippets show
MOST_SHOWN = 18_000
"""Characters of prompt and tool results after which a searcher gives up: a context of 8,192 tokens is nearly full."""
EARLIEST_YEAR = 1990  # Earliest year searched
_SENTENCES = ("{}.", "It is {}.", "It was {}.", "The answer is {}.")


@dataclass(frozen=True, slots=True)
class Habits:
    """Probabilities of searcher actions."""

    poor_search: float = 0.5  # Start with a search that is too narrow, too broad or in other words
    with_sender: float = 0.5  # Add the sender, if the question names one, to words of the subject
    few_results: float = 0.4  # Ask for fewer hits than there may be
    careless: float = 0.2  # Open the next hit, ignoring its snippet
    full_sentence: float = 0.4  # Answer in a sentence rather than a word
    other_first: float = 0.2  # Free-form questions: begin with the second most telling words


CAREFUL = Habits(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)  # Only good searches, and the likeliest hit first


def conversations(
    settings: Settings, split: Split = "train", *, seed: int, draw: int = 0
) -> tuple[list[tuple[Scenario, list[Message]]], int]:
    """Searchers' conversations on the questions of a split that end in a correct answer, and how many were asked.
    Deterministic by ``seed``; another ``draw`` gives other routes on the same questions. Template questions are
    answered from the emails read. Free-form questions, and all if ``output_field`` is set, are answered with the
    reference answer (or that field) once one of their source emails was read."""
    data = settings.data
    limit = data.train_dataset_size if split == "train" else data.eval_dataset_size
    taught = data.model_copy(update={"answer_field": data.output_field or data.answer_field})
    questions = read_questions(None, taught).of(split, limit=limit, seed=seed).scenarios
    played = (play(one, settings, Habits(), Random(f"{seed}/{draw}/{one.id}")) for one in questions)
    return [(each.scenario, messages) for each, messages in played if is_right(each)], len(questions)


def play(scenario: Scenario, settings: Settings, habits: Habits, rng: Random) -> tuple[MailEnvironment, list[Message]]:
    """One conversation and its environment."""
    agent, free = settings.agent, bool(settings.data.output_field)
    with agent_mailbox(agent, settings.store.db, scenario.inbox_address, scenario.query_date) as mailbox:
        environment = MailEnvironment(scenario, mailbox, agent)
        return environment, converse(environment, Searcher(environment, agent, habits, rng, free=free).act)


def is_right(environment: MailEnvironment) -> bool:
    """Whether a conversation ended in the reference answer or one that agrees with it."""
    one, answer = environment.scenario, environment.final_answer
    return answer is not None and (answer == one.answer or match(one.question, one.answer, answer, kind=one.kind))


class Searcher:
    """Plays the assistant on one question by the plan for its kind."""

    def __init__(
        self, environment: MailEnvironment, agent: AgentSettings, habits: Habits, rng: Random, *, free: bool
    ) -> None:
        scenario = environment.scenario
        self.scenario, self.me, self.habits, self.rng = scenario, scenario.inbox_address, habits, rng
        self._message_id = environment.message_id
        asked = None if free else read_question(scenario.question)
        self.asked, self.is_free = asked or Asked("", is_mine=False), asked is None
        self.address: str | None = None
        """The person's address; unless an email confirms it a guess, first.last at the asker's domain."""
        if person := self.asked.person:
            guess = ".".join(person.lower().split()) + "@" + self.me.rpartition("@")[2]
            self.address = person.lower() if "@" in person else guess
        self._any_keyword = [] if agent.search_without_keywords else ["the"]
        self._turns_left = agent.max_turns
        self._shown = 0
        self._has_read: dict[str, ShownMail] = {}
        self._turns = (by_words if self.is_free else PLANS.get(self.asked.kind, by_topic))(self)

    def act(self, messages: Sequence[Message]) -> str:
        """The text of the next assistant turn."""
        self._turns_left -= 1
        self._shown += len(messages[-1].content)
        found = None
        if self._turns_left and self._shown <= MOST_SHOWN:
            try:
                return next_turn(self._turns, messages)
            except StopIteration as over:
                found = over.value
        answer, sources = found or ("I don't know", [])
        # Free-form answers stay as they are.
        if found and not self.is_free and self.rng.random() < self.habits.full_sentence:
            answer = self.rng.choice(_SENTENCES).format(answer)
        return call_text("return_final_answer", {"answer": answer, "sources": sources})

    def judge(self, mail: ShownMail) -> str | None:
        """The answer in an email; None if it is not the right one."""
        if not self.is_free:
            return answer_of(self.asked, mail, self.me)
        return self.scenario.answer if self._message_id(mail["message_id"]) in self.scenario.evidence else None

    def is_poor(self) -> bool:
        """Draw whether to begin with a poor search."""
        return self.rng.random() < self.habits.poor_search

    def search(self, **arguments: Any) -> Turns[list[Hit]]:
        """The hits of one search, with or without keywords."""
        search: Search = {"keywords": self._any_keyword} | {k: v for k, v in arguments.items() if v is not None}
        if "max_results" not in search and self.rng.random() < self.habits.few_results:
            search["max_results"] = self.rng.randint(FEWEST_RESULTS if self.is_free else 2, MAX_RESULTS)
        result = yield call_text("search_emails", search)
        return result["emails"] if isinstance(result, dict) else result

    def read(self, hit: Hit) -> Turns[ShownMail]:
        """The email of a hit, read only once."""
        message_id = hit["message_id"]
        if message_id not in self._has_read:
            mail = yield call_text("read_email", {"message_id": message_id})
            self._has_read[message_id] = {field: _bare(value, field) for field, value in mail.items()}
        return self._has_read[message_id]

    def first_that_answers(self, hits: Sequence[Hit], patience: int) -> Turns[Result]:
        """Read hits in order, at most ``patience`` new ones, until one answers."""
        for hit in [hit for hit in hits if hit["message_id"] not in self._has_read][:patience]:
            mail = yield from self.read(hit)
            if answer := self.judge(mail):
                return answer, [hit["message_id"]]
        return None

    def poorly(self, searches: Sequence[Search], *, reads: bool = True) -> Turns[Result]:
        """At times make one of several poor searches, and read some of its results."""
        if not self.is_poor():
            return None
        hits = yield from self.search(**self.rng.choice(searches))
        return (yield from self.first_that_answers(hits, self.rng.randint(1, 3))) if reads else None

    def by_person(self, **filters: str | int | None) -> Turns[list[Hit]]:
        """Search by the person; if the guessed address finds nothing, search for the name to learn the address."""
        hits = yield from self.search(from_addr=self.address, **filters)
        person = self.asked.person
        if hits or person is None or "@" in person:
            return hits
        for keywords in ([person], person.split()[-1:]):
            found = yield from self.search(keywords=keywords)
            for hit in found[:2]:
                mail = yield from self.read(hit)
                for address in (mail["from_address"], *recipients_of(mail)):
                    if is_called(address, person) and address != self.address:
                        self.address = address
                        return (yield from self.search(from_addr=address, **filters))
        return []

    def likeliest_first(self, hits: Sequence[Hit], words: Sequence[str]) -> list[Hit]:
        """Sort hits by matching words in their snippets; ties go to snippets that are only a subject."""
        if self.rng.random() < self.habits.careless:
            return self.rng.sample(hits, len(hits))
        wanted, snippets = {word.lower() for word in words}, [_plain(hit) for hit in hits]
        worths = [(len(wanted & topic_of(snippet).words), "..." not in snippet) for snippet in snippets]
        return [hits[at] for at in sorted(range(len(hits)), key=worths.__getitem__, reverse=True)]

    def topic_searches(self, sender: str | None) -> Iterator[Search]:
        """Searches for a mail by its topic: often poor ones first, then better ones, without repeats."""
        topic, rng, habits = self.asked.topic or "", self.rng, self.habits
        words = topic_words(topic)
        by_sender = {"from_addr": sender} if sender else {}
        tried: list[Search] = []
        for chance in (habits.poor_search, habits.poor_search / 2):
            if rng.random() < chance:  # too broad: one word, or only the sender; too narrow: a word of the question
                few = rng.sample(words, min(2, len(words)))
                others = [word for word in re.findall(r"\w{4,}", self.scenario.question) if word not in words]
                poor: list[Search] = [{"keywords": few[:1]}, {"keywords": few}]
                poor += [{"keywords": few[:1], **by_sender}, by_sender] if by_sender else []
                poor += [{"keywords": [*few, rng.choice(others)]}] if others else []
                tried.append(rng.choice(poor))
        some = rng.sample(words, rng.randint(min(2, len(words)), min(4, len(words))))
        good = [[topic], words[:5] if habits is CAREFUL else some]
        if habits is not CAREFUL:
            rng.shuffle(good)
        for at, keywords in enumerate(good):
            filters = by_sender if at == 0 and rng.random() < habits.with_sender else {}
            tried.append({"keywords": keywords, **filters})
        tried.append({"keywords": sorted(words, key=len)[-2:]})
        yield from (search for at, search in enumerate(tried) if search not in tried[:at])


def topic_words(topic: str) -> list[str]:
    """A topic's distinct content words, in order and original spelling."""
    telling = topic_of(topic).words
    words = dict.fromkeys(re.findall(r"[^\W_]+(?:['’][^\W_]+)*", topic))
    return [word for word in words if word.lower() in telling] or list(words)


def by_topic(searcher: Searcher) -> Turns[Result]:
    """Search for the topic, read likely hits, and search again with better words."""
    asked = searcher.asked
    for search in searcher.topic_searches(searcher.me if asked.is_mine else searcher.address):
        hits = yield from searcher.search(**search)
        if asked.kind == "thread_starter":
            hits = hits[::-1]
        hits = searcher.likeliest_first(hits, topic_words(asked.topic or ""))
        if found := (yield from searcher.first_that_answers(hits, searcher.rng.randint(1, 4))):
            return found
    return None


def by_words(searcher: Searcher) -> Turns[Result]:
    """For free-form questions: search for one name, number or word at a time, the most telling first, and read hits
    whose snippets show more of the question than was searched for. If the first two find many, both are searched for
    together. At the end the likeliest of the other hits is read too."""
    rng, told = searcher.rng, told_in(searcher.scenario.question, searcher.me)
    if rng.random() < searcher.habits.other_first:
        told[:2] = told[1::-1]
    asked = set(_words(" ".join(itertools.chain(*told))))
    hits, shown = dict[str, Hit](), defaultdict[str, set[str]](set)
    ranked, are_many = list[Hit](), True
    for number, keywords in enumerate(told[:MOST_SEARCHES]):
        if number == 2 and are_many:
            keywords = list(dict.fromkeys(told[0] + told[1]))
        found = yield from searcher.search(keywords=keywords)
        are_many &= len(found) >= FEWEST_RESULTS
        for hit in found:
            hits[hit["message_id"]] = hit
            shown[hit["message_id"]] |= asked.intersection(_words(_plain(hit)))
        ranked = sorted(hits.values(), key=lambda hit: -len(shown[hit["message_id"]]))
        few = found if len(found) <= FEW_HITS else []
        likely = [hit for hit in ranked if len(shown[hit["message_id"]]) > len(keywords) or hit in few]
        if answer := (yield from searcher.first_that_answers(likely, rng.randint(1, 2))):
            return answer
    return (yield from searcher.first_that_answers(ranked, 1))


def on_day(searcher: Searcher) -> Turns[Result]:
    """Search by the day, and by the sender where the question names one; read on until a mail fits."""
    day, address = searcher.asked.day, searcher.address
    window, before = _days(day), {"sent_before": _iso(day, 1)}
    poor = [_days(day, 0, 0), _days(day, -1, 2), *([{"from_addr": address}, window] if address else [before])]
    if found := (yield from searcher.poorly(poor)):
        return found
    if searcher.address:
        hits = yield from searcher.by_person(**window)
    else:
        hits = yield from searcher.search(to_addr=searcher.rng.choice((None, searcher.me)), **window)
    return (yield from searcher.first_that_answers(hits, MAX_RESULTS))


def last_before(searcher: Searcher) -> Turns[Result]:
    """Search by the sender before the day: the newest hit is the email."""
    before: Search = {"sent_before": _iso(searcher.asked.day)}
    if found := (yield from searcher.poorly([before, {"from_addr": searcher.address}])):
        return found
    return (yield from searcher.first_that_answers((yield from searcher.by_person(**before)), 1))


def first_after(searcher: Searcher) -> Turns[Result]:
    """Search by the sender after the day: the oldest hit is the email, once all remaining hits fit in one search."""
    day = searcher.asked.day
    after: Search = {"sent_after": _iso(day, 1)}
    weeks = [after | {"sent_before": _iso(day, 1 + days)} for days in (15, 8, 4)]
    yield from searcher.poorly([{"from_addr": searcher.address}, weeks[1], after], reads=False)
    start = searcher.rng.choice((0, 1)) if searcher.habits.poor_search else 0
    for window in (after, *weeks)[start:]:
        hits = yield from searcher.by_person(max_results=MAX_RESULTS, **window)
        if 0 < len(hits) < MAX_RESULTS:
            return (yield from searcher.first_that_answers(hits[::-1], 1))
    return None


def first_contact(searcher: Searcher) -> Turns[Result]:
    """Bisect the period of the first email until one search shows all emails before its end."""
    low, high = date(EARLIEST_YEAR, 1, 1), date.fromisoformat(searcher.scenario.query_date)
    hits = yield from searcher.by_person(max_results=MAX_RESULTS)
    if not hits:
        return None
    span = searcher.rng.choice((3, 6, 12))
    while len(hits) in (0, MAX_RESULTS):
        months = (high.year - low.year) * 12 + high.month - low.month
        back = span if low.year == EARLIEST_YEAR else months // 2
        middle = _month(high, -max(1, back))
        if middle <= low:  # the tenth email back is the best available
            break
        until = middle.isoformat()
        hits = yield from searcher.search(from_addr=searcher.address, sent_before=until, max_results=MAX_RESULTS)
        low, high = (low, middle) if hits else (middle, high)
        span *= 2
    return (yield from searcher.first_that_answers(hits[::-1], 1))


def count_in_month(searcher: Searcher) -> Turns[Result]:
    """Search by the sender within the month, and count."""
    month = searcher.asked.month
    assert month is not None
    window: Search = {"sent_after": month.isoformat(), "sent_before": _month(month, 1).isoformat()}
    poor: list[Search] = [{"from_addr": searcher.address}, window, window | {"sent_before": _iso(month, 28)}]
    yield from searcher.poorly(poor, reads=False)
    return _counted((yield from searcher.by_person(max_results=MAX_RESULTS, **window)))


def count_on_day(searcher: Searcher) -> Turns[Result]:
    """Search by the day among the mails to the asker, and count."""
    day = searcher.asked.day
    window = _days(day)
    yield from searcher.poorly([window, _days(day, 0, 0)], reads=False)
    return _counted((yield from searcher.search(to_addr=searcher.me, max_results=MAX_RESULTS, **window)))


def thread_count(searcher: Searcher) -> Turns[Result]:
    """Search for the topic as a phrase, and count the hits that have it as their subject."""
    asked, topic = searcher.asked, searcher.asked.topic or ""
    if searcher.is_poor():
        yield from searcher.search(keywords=topic_words(topic)[:2])
    hits = yield from searcher.search(keywords=[topic], max_results=MAX_RESULTS)
    return _counted([hit for hit in hits if asked.is_about(_plain(hit))])


def both_subjects(searcher: Searcher) -> Turns[Result]:
    """Search by sender and day, read both mails, and name their subjects, the older first."""
    hits = yield from searcher.by_person(**_days(searcher.asked.day))
    found = {}
    for hit in hits[::-1]:
        if subject := searcher.judge((yield from searcher.read(hit))):
            found[hit["message_id"]] = subject
    return (" and ".join(found.values()), list(found)) if len(found) == 2 else None


def reply_gap(searcher: Searcher) -> Turns[Result]:
    """Read the thread until the asker's mail and the reply to it are found, and take the days between."""
    asked = searcher.asked
    for search in searcher.topic_searches(None):
        hits = yield from searcher.search(**search)
        mine = reply = None
        for hit in searcher.likeliest_first(hits, topic_words(asked.topic or ""))[:4]:
            mail = yield from searcher.read(hit)
            if searcher.judge(mail):
                reply = mail
            elif mail["from_address"] == searcher.me and asked.is_about(mail["subject"]):
                mine = mail
            if mine and reply and (first := day_of(mine)) and (last := day_of(reply)):
                return str((last - first).days), [mine["message_id"], reply["message_id"]]
    return None


def _counted(hits: Sequence[Hit]) -> Result:
    return (str(len(hits)), [hit["message_id"] for hit in hits]) if hits else None


def _bare(value: Any, field: str) -> Any:
    """A field of an email, its addresses without names (``SHOW_NAMES``)."""
    if isinstance(value, list):
        return [_bare(each, field) for each in value]
    return re.sub(r".* <([^<>]*)>", r"\1", value) if "_address" in field else value


def _plain(hit: Hit) -> str:
    return hit["snippet"].replace("<b>", "").replace("</b>", "")


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _iso(day: date | None, later: int = 0) -> str:
    assert day is not None
    return (day + timedelta(days=later)).isoformat()


def _days(day: date | None, first: int = 0, end: int = 1) -> Search:
    """The window of a day, or of so many days before and after it."""
    return {"sent_after": _iso(day, first), "sent_before": _iso(day, end)}


def _month(day: date, later: int) -> date:
    """The first of the month, a number of months later."""
    months = day.year * 12 + day.month - 1 + later
    return date(months // 12, months % 12 + 1, 1)


_OWN_PLANS = (  # of the kind of question that each is named after
    last_before, first_after, first_contact, count_in_month, count_on_day, thread_count, both_subjects, reply_gap,
)  # fmt: skip
PLANS: dict[str, Callable[[Searcher], Turns[Result]]] = {"subject": on_day, "only_sender_of_day": on_day}
PLANS |= {plan.__name__: plan for plan in _OWN_PLANS}  # the others are asked by topic
