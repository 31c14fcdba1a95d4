"""Turn-by-turn plans for each kind of question.

The last search of a plan is good; earlier ones may be poor.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, timedelta

from emailrl.environment.tools import MAX_RESULTS
from emailrl.questions.inbox.mail import topic_of
from emailrl.sft.searching.asked import Asked
from emailrl.sft.searching.judging import day_of, is_called, people_of
from emailrl.sft.searching.searcher import Hit, Searcher, SearchPlan, Turns
from emailrl.sft.searching.searches import Search, topic_searches, topic_words, word_searches

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
