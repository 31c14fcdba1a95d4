"""The database as others may use it by hand: ART-E's tables, and triggers that keep the index right."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mail.mails import found, rows

from emailrl.mail.build import build_database
from emailrl.mail.database import SNIPPET_WORDS
from emailrl.mail.sources import RawEmail
from emailrl.settings import StoreSettings

BOB = "bob@x.org"


@pytest.fixture
def run(db: Path) -> Iterator[Callable[..., list[tuple]]]:
    """Runs SQL as others do, and checks the index at the end."""
    with contextlib.closing(sqlite3.connect(db, isolation_level=None)) as connection:
        connection.execute("PRAGMA foreign_keys = ON")
        yield lambda sql, *values: connection.execute(sql, values).fetchall()
        connection.execute("INSERT INTO emails_fts(emails_fts, rank) VALUES ('integrity-check', 1)")


Run = Callable[..., list[tuple]]


def matches(run: Run, match: str) -> list[str]:
    query = "SELECT message_id FROM emails_fts f JOIN emails e ON e.id = f.rowid WHERE emails_fts MATCH ? ORDER BY date"
    return [message_id for (message_id,) in run(query, match)]


def test_art_e_columns(run: Run) -> None:
    run("SELECT id, message_id, subject, from_address, date, body, file_name FROM emails")
    run("SELECT email_id, recipient_address, recipient_type FROM recipients")
    run("SELECT subject, body FROM emails_fts")
    assert matches(run, "budget AND draft") == ["<1@x>"]
    assert matches(run, "subject : lunch") == ["<2@x>"]
    ids = [message_id for (message_id,) in run("SELECT message_id FROM emails ORDER BY id")]
    assert ids == ["<5@x>", "<4@x>", "<3@x>", "<2@x>", "<1@x>", "<6@x>"], "they count from the newest mail"
    assert [matches(run, f'"{number}"') for number in range(8)] == [[]] * 8, "no word of a mail finds its people"


def test_changes_of_a_mail_reindex_it(run: Run, db: Path) -> None:
    run("UPDATE emails SET body = 'Entirely rewritten.' WHERE message_id = '<3@x>'")
    assert matches(run, "final") == [] and found(db, BOB, "rewritten") == ["<3@x>"]
    run("DELETE FROM emails WHERE message_id = '<3@x>'")
    assert matches(run, "rewritten") == []
    assert run("SELECT count(*) FROM recipients WHERE email_id NOT IN (SELECT id FROM emails)") == [(0,)]
    before = found(db, BOB, "gas")
    run("INSERT INTO emails_fts(emails_fts) VALUES ('rebuild')")
    assert found(db, BOB, "gas") == before == ["<4@x>", "<1@x>", "<6@x>"]


def test_a_mail_inserted_by_hand_is_found_by_its_people_alone_and_in_its_place(run: Run, db: Path) -> None:
    run(
        "INSERT INTO emails(id, message_id, subject, from_address, date, body, file_name) "
        "VALUES (0, '<7@x>', 'Late', 'eve@x.org', '2001-05-06 12:00:00', 'A late gas budget.', '')"
    )
    run("INSERT INTO recipients SELECT id, 'bob@x.org', 'to' FROM emails WHERE message_id = '<7@x>'")
    assert found(db, BOB, "gas") == ["<7@x>", "<4@x>", "<3@x>", "<1@x>", "<6@x>"]
    assert found(db, "eve@x.org", "gas") == ["<7@x>"] and found(db, "cy@x.org", "late") == []
    assert found(db, BOB, "gas", sent_after="2001-05-04") == ["<7@x>", "<4@x>"]
    assert found(db, BOB, "gas", until="2001-05-06", sent_after="2001-05-04") == ["<4@x>"]


def test_changes_of_people_move_a_mail(run: Run, db: Path) -> None:
    [(key,)] = run("SELECT id FROM emails WHERE message_id = '<5@x>'")
    run("DELETE FROM recipients WHERE email_id = ? AND recipient_address = 'cy@x.org'", key)
    assert found(db, "cy@x.org", "secret") == []
    run("UPDATE recipients SET recipient_address = 'bob@x.org' WHERE email_id = ?", key)
    assert found(db, BOB, "secret") == ["<5@x>"] and found(db, "dee@x.org", "secret") == []
    run("UPDATE emails SET from_address = 'dee@x.org' WHERE id = ?", key)
    assert found(db, "ann@x.org", "secret") == [] and found(db, "dee@x.org", "secret") == ["<5@x>"]


def test_the_triggers_write_what_the_build_writes(tmp_path: Path, email: Callable[..., RawEmail]) -> None:
    db, numbers = tmp_path / "m.db", (1, 14, 15, 40)
    parties = "SELECT parties FROM emails ORDER BY message_id"
    mails = [email(n, to=tuple(f"p{p}@x.org" for p in range(number))) for n, number in enumerate(numbers, 1)]
    build_database([*mails, email(9, sender="", to=())], db, settings=StoreSettings(max_recipients=0))
    built = [sorted(words.split(" ")) for (words,) in rows(db, parties)]
    rows(db, "UPDATE emails SET from_address = from_address")
    assert [sorted(words.split(" ")) for (words,) in rows(db, parties)] == built
    assert [len(words) for words in built] == [2, 15, 16 + SNIPPET_WORDS, 41 + SNIPPET_WORDS, 1]
