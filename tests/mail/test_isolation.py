"""No call of the tools sees a mail outside the inbox or after the question's date, whatever its arguments."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mail.mails import only

from emailrl.base.errors import ToolError
from emailrl.mail import open_mailbox
from emailrl.mail.build import build_database
from emailrl.mail.database import connect, driver
from emailrl.mail.mailbox import Order
from emailrl.mail.sources import RawEmail

PEOPLE = [f"p{number}@x.org" for number in range(6)]
WORDS = ["gas", "the", "budget", "OR", "not", "near", "été", "subject", "a-b", "2001"]
FIRST_DAY = date(2001, 1, 1)
Built = tuple[Path, dict[str, RawEmail]]


@pytest.fixture(scope="module")
def mailbox(tmp_path_factory: pytest.TempPathFactory, email: Callable[..., RawEmail]) -> Built:
    rng = random.Random(0)
    emails = [
        email(
            number, subject=" ".join(rng.choices(WORDS, k=3)), body=" ".join(rng.choices(WORDS, k=8)) + f" {number}",
            sender=rng.choice(PEOPLE), to=tuple(rng.sample(PEOPLE, rng.randrange(3))),
            bcc=tuple(rng.sample(PEOPLE, rng.randrange(2))),
            day=None if number % 17 == 0 else str(FIRST_DAY + timedelta(days=rng.randrange(40))),
        )
        for number in range(300)
    ]  # fmt: skip
    path = tmp_path_factory.mktemp("isolation") / "mail.db"
    build_database(emails, path)
    return path, {email.message_id: email for email in emails}


HOSTILE = [
    "gas OR the", "gas* OR parties", "NOT gas", '"', '""', '"gas', "gas)", "{subject} : the", "parties : q1", "^gas",
    "NEAR(gas the)", "-gas", "\0", "gas\0 OR the", "' OR 1=1 --", "%", "\ud800",
]  # fmt: skip
SECOND = st.sampled_from([*WORDS, '"', "*", ")", "OR gas", "\0", "\ue0001"])
ANYTHING = st.one_of(st.none(), st.integers(), st.text(), st.binary(), st.floats(), st.lists(st.text(), max_size=3))
KEYWORD = st.one_of(
    st.sampled_from(WORDS), st.text(max_size=20), st.builds("{} {}".format, st.sampled_from(WORDS), SECOND),
    st.sampled_from(HOSTILE),
    st.builds(lambda word, times: word * times, st.sampled_from(["gas ", "\U0001f600", "x"]), st.integers(1, 400)),
)  # fmt: skip
ADDRESS = st.one_of(st.none(), st.sampled_from(PEOPLE), ANYTHING)
DAY = st.one_of(st.none(), st.integers(-5, 50).map(lambda days: str(FIRST_DAY + timedelta(days=days))), ANYTHING)
CALL = st.fixed_dictionaries(
    {"keywords": st.one_of(st.lists(KEYWORD, max_size=3), ANYTHING)},
    optional={"from_addr": ADDRESS, "to_addr": ADDRESS, "sent_after": DAY, "sent_before": DAY,
              "max_results": st.one_of(st.integers(0, 11), ANYTHING)},
)  # fmt: skip
ORDER = st.sampled_from(["newest", "relevance"])
UNTIL = st.one_of(st.none(), st.integers(0, 45).map(lambda days: str(FIRST_DAY + timedelta(days=days))))


def is_visible(email: RawEmail, inbox: str, until: str | None) -> bool:
    if inbox not in (email.from_address, *email.to, *email.cc, *email.bcc):
        return False
    return until is None or (email.date is not None and email.date.strftime("%Y-%m-%d") < until)


@settings(max_examples=400, deadline=None)
@given(call=CALL, inbox=st.sampled_from(PEOPLE), until=UNTIL, order=ORDER)
def test_search_shows_nothing_it_should_not(
    mailbox: Built, call: dict[str, Any], inbox: str, until: str | None, order: Order
) -> None:
    db, emails = mailbox
    try:
        hits = open_mailbox(db, inbox, until, order=order).search(**call)
    except ToolError:
        return
    assert all(is_visible(emails[hit.message_id], inbox, until) for hit in hits)
    if order == "relevance":
        return
    dates = [emails[hit.message_id].date for hit in hits]
    known = [day for day in dates if day is not None]
    assert known == sorted(known, reverse=True)
    assert dates == known + [None] * (len(dates) - len(known)), "undated mails come last"


IDS = st.one_of(st.integers(0, 300).map("<{}@x>".format), ANYTHING)


@settings(max_examples=200, deadline=None)
@given(message_id=IDS, inbox=st.sampled_from(PEOPLE), until=UNTIL)
def test_read_shows_nothing_it_should_not(mailbox: Built, message_id: Any, inbox: str, until: str | None) -> None:
    db, emails = mailbox
    try:
        email = open_mailbox(db, inbox, until).read(message_id)
    except ToolError:
        return
    assert (email is not None) == (message_id in emails and is_visible(emails[message_id], inbox, until))


WRITES = [
    "INSERT INTO emails (message_id, subject) VALUES ('<new@x>', 'x')", "UPDATE emails SET subject = 'x'",
    "DELETE FROM recipients", "DROP TABLE emails_fts", "INSERT INTO emails_fts (emails_fts) VALUES ('delete-all')",
    "CREATE TABLE notes (x)", "PRAGMA user_version = 9", "VACUUM",
]  # fmt: skip


@pytest.mark.parametrize("write", WRITES)
def test_an_agent_s_connection_cannot_write(mailbox: Built, write: str) -> None:
    db, _ = mailbox
    before, opened = db.read_bytes(), connect(db)  # kept: collected, it would close the driver's
    connection = driver(opened)
    assert connection.execute("SELECT count(*) FROM emails").fetchone() > (0,)
    try:
        for guard in ("ON", "OFF"):  # the file itself is opened read-only, so this guard is not the only one
            connection.execute(f"PRAGMA query_only = {guard}")
            with pytest.raises(sqlite3.OperationalError, match=r"readonly|read-only|query_only"):
                connection.execute(write).fetchall()
    finally:
        connection.execute("PRAGMA query_only = ON")
    assert db.read_bytes() == before and only(db.parent) == [db.name], "no journal either"
