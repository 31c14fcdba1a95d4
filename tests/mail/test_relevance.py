"""The order by relevance: BM25 as SQLite documents it, the subject five times, people not at all."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from mail.mails import found

from emailrl.agent.play import Stage
from emailrl.agent.task import MailEnvironment
from emailrl.agent.tools import call_tool
from emailrl.mail import open_mailbox
from emailrl.mail.build import build_database
from emailrl.mail.sources import RawEmail
from emailrl.records.trajectory import Message, Scenario, StopReason, ToolCall
from emailrl.settings import load_settings

Make = Callable[..., RawEmail]
by_relevance = partial(found, order="relevance")


def bm25(mails: list[RawEmail], keywords: list[str]) -> dict[str, float]:
    """https://www.sqlite.org/fts5.html#the_bm25_function, k1 = 1.2 and b = 0.75; the mails that hold every keyword."""
    texts = {m.message_id: (m.subject.lower().split(), m.body.lower().split()) for m in mails}
    marks = 2  # of words that are not plainly English
    lengths = {m.message_id: marks + len({m.from_address, *m.to}) + sum(map(len, texts[m.message_id])) for m in mails}
    average = sum(lengths.values()) / len(mails)
    scores = {key: 0.0 for key, (subject, body) in texts.items() if {*keywords} <= {*subject, *body}}
    for word in keywords:
        holding = sum(word in subject + body for subject, body in texts.values())
        idf = max(math.log((len(mails) - holding + 0.5) / (holding + 0.5)), 1e-6)
        for key in scores:
            frequency = 5 * texts[key][0].count(word) + texts[key][1].count(word)
            scores[key] += idf * frequency * 2.2 / (frequency + 1.2 * (0.25 + 0.75 * lengths[key] / average))
    return scores


def test_by_hand(tmp_path: Path, email: Make) -> None:
    db = tmp_path / "mail.db"
    bodies = {
        1: "a b c d e",  # and in the subject, so five times
        2: "gas gas c d e", 3: "gas b c d e",
        4: "gas b c d f",  # as 3, and newer
        5: "gas " + "word " * 40,  # one word of many
    }  # fmt: skip
    mails = [email(n, subject="Gas" if n == 1 else "a", body=body, day=f"2001-05-0{n}") for n, body in bodies.items()]
    build_database([*mails, *(email(n, subject="a", body=f"nothing of it {n}") for n in range(6, 20))], db)
    assert by_relevance(db, "bob@x.org", "gas") == ["<1@x>", "<2@x>", "<4@x>", "<3@x>", "<5@x>"]
    assert open_mailbox(db, "bob@x.org", order="relevance").search(["gas"])[1].snippet == "<b>gas</b> <b>gas</b> c d e"
    best = by_relevance(db, "bob@x.org", "gas", max_results=3)
    assert best == ["<1@x>", "<2@x>", "<4@x>"], "of equals the newest are kept"
    assert by_relevance(db, "bob@x.org", "gas", until="2001-05-04", max_results=2) == ["<1@x>", "<2@x>"]


def test_the_ten_best_by_the_published_formula(tmp_path: Path, email: Make) -> None:
    rng, db = random.Random(0), tmp_path / "mail.db"
    words = ["gas", "deal", *(f"w{n}" for n in range(60))]
    mails = [
        email(
            number, subject=" ".join(rng.choices(words, k=rng.randint(1, 5))), sender=rng.choice(["ann@x", "bob@x"]),
            body=" ".join(rng.choices(words, k=rng.randint(5, 60))),
            to=tuple(f"p{n}@x" for n in range(rng.randint(1, 5))),
            day=f"2001-05-{1 + number % 28:02}",
        )
        for number in range(200)
    ]  # fmt: skip
    build_database(mails, db)
    dates = {mail.message_id: str(mail.date)[:10] for mail in mails}
    senders = {mail.message_id: mail.from_address for mail in mails}
    for keywords in (["gas"], ["gas", "deal"], ["w1", "w2"], ["w3"]):
        scores = bm25(mails, keywords)
        best = sorted(sorted(scores, key=dates.__getitem__, reverse=True), key=lambda key: -round(scores[key], 12))
        assert len(best) > 10
        assert by_relevance(db, "p0@x", *keywords) == best[:10]
        ann = [key for key in best if senders[key] == "ann@x" and dates[key] < "2001-05-20"]
        assert by_relevance(db, "p0@x", *keywords, from_addr="ann@x", sent_before="2001-05-20") == ann[:10]


def test_order_and_searches_without_keywords_are_settings(tmp_path: Path, email: Make) -> None:
    db = tmp_path / "mail.db"
    filling = [email(number, subject="a", body=f"nothing of it {number}") for number in range(3, 9)]
    build_database([email(1, subject="Gas", body="old"), email(2, body="gas and more", day="2001-05-02"), *filling], db)
    search = ToolCall("search_emails", {"keywords": [], "from_addr": "ann@x.org"})
    for order, allowed, expected in (("newest", True, ["<2@x>", "<1@x>"]), ("relevance", False, ["<1@x>", "<2@x>"])):
        with ExitStack() as opened:
            settings = {"search_order": order, "search_without_keywords": allowed, "emailrl_db": str(db)}
            agent = load_settings(settings).agent
            stage = Stage(agent, db, partial(MailEnvironment, agent=agent), None)
            environment = stage.open_environment(Scenario("q", "?", "", [], "bob@x.org", "2002-01-01"), opened)
            hits = call_tool(environment.mailbox, "search_emails", {"keywords": ["gas"]})  # type: ignore[attr-defined]
            environment.start()
            reason = environment.step(Message("assistant", "", [search])).stop_reason
        assert [hit["message_id"] for hit in hits] == expected
        assert reason == (None if allowed else StopReason.BAD_TOOL_CALL_ARGS)
