"""Whatever a model calls, and however often, it is shown no word of a mail outside its inbox or its time."""

from __future__ import annotations

import json
import random
import re
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mail_calls import call

from emailrl.agent import MailEnvironment
from emailrl.agent.tools import TOOLS
from emailrl.mail import open_mailbox
from emailrl.mail.build import build_database
from emailrl.mail.sources import RawEmail
from emailrl.records.trajectory import Message, Scenario, StopReason

PEOPLE = [f"p{number}@x.org" for number in range(5)]
WORDS = ["gas", "the", "budget", "pier", "NOT", "subject"]
FIRST_DAY = date(2001, 1, 1)


@pytest.fixture(scope="module")
def mails(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[RawEmail]]:
    """Two hundred mails, each with words of its own in subject and body: ``subj7x``, ``body7x``."""
    rng, emails = random.Random(1), list[RawEmail]()
    for n in range(200):
        day = datetime.combine(FIRST_DAY, time(23, 59, tzinfo=UTC)) + timedelta(days=rng.randrange(40))
        to, cc, bcc = (rng.sample(PEOPLE, rng.randrange(most)) for most in (3, 2, 2))
        subject, body = f"{rng.choice(WORDS)} subj{n}x", f"{' '.join(rng.choices(WORDS, k=6))} body{n}x"
        date = day if n % 19 else None
        emails.append(RawEmail(f"<id{n}x@x>", subject, rng.choice(PEOPLE), to, cc, bcc, date, body, f"file{n}x"))
    path = tmp_path_factory.mktemp("isolation") / "mail.db"
    build_database(emails, path)
    return path, emails


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FTS_SYNTAX = st.sampled_from(
    ["gas OR the", "gas* OR parties", "NOT gas", '"', '""', '"gas', "gas)", "{subject} : the", "parties : p", "^gas",
     "NEAR(gas the)", "-gas", "gas AND", "\0", "gas\0 OR the", "' OR 1=1 --", "%", "\ue000", "q1", "e\u0301t\u00e9",
     "\ud800", "x" * 1001, "gas " * 250, "\U0001f4a9" * 300]
)  # fmt: skip
KEYWORDS = st.lists(st.sampled_from(WORDS) | FTS_SYNTAX | st.text(max_size=20), max_size=4) | st.lists(
    st.sampled_from(WORDS), min_size=30, max_size=40
)
DAYS = st.integers(-3, 45).map(lambda days: str(FIRST_DAY + timedelta(days=days))) | st.sampled_from(
    ["", "2001-02-30", "2001-1-1", "0000-00-00", "9999-12-31", "tomorrow", "2001-01-05T00:00", "²⁰⁰¹-01-01", "-1"]
)
ADDRESSES = st.sampled_from([*PEOPLE, "%", "P1@X.ORG ", "p1@x.org' OR '1'='1", ""]) | st.text(max_size=10)
IDS = st.integers(0, 200).map("<id{}x@x>".format) | st.sampled_from(["", "%", "<id1x@x>\0", "' OR 1=1 --"]) | st.text()
CALLS = st.one_of(
    st.fixed_dictionaries(
        {"keywords": KEYWORDS | JSON},
        optional={
            "from_addr": ADDRESSES | JSON, "to_addr": ADDRESSES | JSON, "sent_after": DAYS | JSON,
            "sent_before": DAYS | JSON, "max_results": st.integers(-1, 12) | JSON, "inbox": ADDRESSES, "until": DAYS,
        },
    ).map(lambda arguments: call("search_emails", **arguments)),
    IDS.map(lambda message_id: call("read_email", message_id=message_id)),
    st.builds(lambda name, arguments: call(name, **arguments), st.sampled_from([*TOOLS, "sql", ""]),
              st.dictionaries(st.sampled_from(["keywords", "message_id", "answer", "sources", "mailbox", "db"]), JSON)),
    st.text().map(lambda text: Message("assistant", text)),
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    messages=st.lists(CALLS, min_size=1, max_size=5),
    inbox=st.sampled_from(PEOPLE),
    until=st.integers(0, 42).map(lambda days: str(FIRST_DAY + timedelta(days=days))),
    order=st.sampled_from(["newest", "relevance"]),
)
def test_no_call_shows_a_word_of_a_hidden_mail(
    mails: tuple[Path, list[RawEmail]], messages: list[Message], inbox: str, until: str, order: Any
) -> None:
    db, emails = mails
    visible = {
        str(number)
        for number, email in enumerate(emails)
        if inbox in (email.from_address, *email.to, *email.cc, *email.bcc)
        and email.date is not None
        and email.date.strftime("%Y-%m-%d") < until
    }
    for message in messages:  # a bad call ends a trajectory, so each plays in one of its own
        scenario = Scenario("1", "Q?", "A", ["<id1x@x>"], inbox, until)
        environment = MailEnvironment(scenario, open_mailbox(db, inbox, until=until, order=order))
        environment.start()
        result = environment.step(message)
        told = result.tool_result or ""
        if result.stop_reason not in (None, StopReason.ANSWERED):
            assert list(json.loads(told)) == ["error"]
            calls: Any = message.tool_calls
            named = bool(calls) and re.search(r"(?:id|subj|body|file)\d+x", repr(calls[0].arguments))
            told = "" if named else told  # an error may repeat what the call itself said
        shown = set(re.findall(r"(?:id|subj|body|file)(\d+)x", told))
        assert shown <= visible
        assert environment.rubric.ever_found_right_email <= ("1" in visible)
        assert environment.rubric.ever_read_right_email <= ("1" in visible)


def test_the_words_of_visible_mails_are_shown(mails: tuple[Path, list[RawEmail]]) -> None:
    """The property above could not fail if nothing were ever shown."""
    db, _ = mails
    scenario = Scenario("1", "Q?", "A", ["<id1x@x>"], PEOPLE[0], "2001-02-10")
    environment = MailEnvironment(scenario, open_mailbox(db, PEOPLE[0], until="2001-02-10"))
    environment.start()
    hits = json.loads(environment.step(call("search_emails", keywords=["gas"])).tool_result or "")
    assert len(hits) == 10
    number = int(re.findall(r"\d+", hits[0]["message_id"])[0])
    read = environment.step(call("read_email", message_id=hits[0]["message_id"])).tool_result or ""
    assert f"body{number}x" in read and f"subj{number}x" in read
