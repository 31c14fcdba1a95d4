"""The database as others may use it by hand: ART-E's tables, and triggers that keep the index right."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from emailrl.mail import open_mailbox
from emailrl.mail.build import build_database
from emailrl.mail.schema import SNIPPET_WORDS
from emailrl.mail.sources import RawEmail
from emailrl.settings import StoreSettings


@pytest.fixture
def connection(db: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(db, isolation_level=None)) as connection:
        connection.execute("PRAGMA foreign_keys = ON")
        yield connection


def found(connection: sqlite3.Connection, match: str) -> list[str]:
    rows = connection.execute(
        "SELECT message_id FROM emails_fts f JOIN emails e ON e.id = f.rowid WHERE emails_fts MATCH ? ORDER BY date",
        (match,),
    )
    return [message_id for (message_id,) in rows]


def check_index(connection: sqlite3.Connection) -> None:
    connection.execute("INSERT INTO emails_fts(emails_fts, rank) VALUES ('integrity-check', 1)")


def search(db: Path, inbox: str, keyword: str) -> list[str]:
    return [hit.message_id for hit in open_mailbox(db, inbox).search([keyword])]


def test_art_e_columns(connection: sqlite3.Connection) -> None:
    connection.execute("SELECT id, message_id, subject, from_address, date, body, file_name FROM emails")
    connection.execute("SELECT email_id, recipient_address, recipient_type FROM recipients")
    connection.execute("SELECT subject, body FROM emails_fts")
    assert found(connection, "budget AND draft") == ["<1@x>"]
    assert found(connection, "subject : lunch") == ["<2@x>"]


def test_ids_count_from_the_newest_mail(connection: sqlite3.Connection) -> None:
    rows = connection.execute("SELECT message_id FROM emails ORDER BY id").fetchall()
    assert rows == [("<5@x>",), ("<4@x>",), ("<3@x>",), ("<2@x>",), ("<1@x>",), ("<6@x>",)]


def test_no_word_of_a_mail_finds_its_people(connection: sqlite3.Connection) -> None:
    assert [found(connection, f'"{number}"') for number in range(8)] == [[]] * 8


def test_update_reindexes(connection: sqlite3.Connection, db: Path) -> None:
    connection.execute("UPDATE emails SET body = 'Entirely rewritten.' WHERE message_id = '<3@x>'")
    assert found(connection, "final") == []
    assert search(db, "bob@x.org", "rewritten") == ["<3@x>"]
    check_index(connection)


def test_delete_unindexes(connection: sqlite3.Connection) -> None:
    connection.execute("DELETE FROM emails WHERE message_id = '<3@x>'")
    assert found(connection, "final") == []
    number = connection.execute("SELECT count(*) FROM recipients WHERE email_id NOT IN (SELECT id FROM emails)")
    assert number.fetchone() == (0,)
    check_index(connection)


def test_a_mail_inserted_by_hand_is_found_by_its_people_alone_and_in_its_place(
    connection: sqlite3.Connection, db: Path
) -> None:
    connection.execute(
        "INSERT INTO emails(message_id, subject, from_address, date, body, file_name) "
        "VALUES ('<7@x>', 'Late', 'eve@x.org', '2001-05-02 12:00:00', 'A late gas budget.', '')"
    )
    key = connection.execute("SELECT id FROM emails WHERE message_id = '<7@x>'").fetchone()[0]
    connection.execute("INSERT INTO recipients VALUES (?, 'bob@x.org', 'to')", (key,))
    assert search(db, "bob@x.org", "gas") == ["<4@x>", "<3@x>", "<7@x>", "<1@x>", "<6@x>"]
    assert search(db, "eve@x.org", "gas") == ["<7@x>"]
    assert search(db, "cy@x.org", "late") == []
    box = open_mailbox(db, "bob@x.org", until="2001-05-03")
    assert [hit.message_id for hit in box.search(["gas"])] == ["<7@x>", "<1@x>"]
    assert [hit.message_id for hit in box.search(["gas"], sent_after="2001-05-02")] == ["<7@x>"]
    check_index(connection)


def test_changes_of_people_move_a_mail(connection: sqlite3.Connection, db: Path) -> None:
    key = connection.execute("SELECT id FROM emails WHERE message_id = '<5@x>'").fetchone()[0]
    connection.execute("DELETE FROM recipients WHERE email_id = ? AND recipient_address = 'cy@x.org'", (key,))
    assert search(db, "cy@x.org", "secret") == []
    connection.execute("UPDATE recipients SET recipient_address = 'bob@x.org' WHERE email_id = ?", (key,))
    assert search(db, "bob@x.org", "secret") == ["<5@x>"]
    assert search(db, "dee@x.org", "secret") == []
    connection.execute("UPDATE emails SET from_address = 'dee@x.org' WHERE id = ?", (key,))
    assert search(db, "ann@x.org", "secret") == []
    assert search(db, "dee@x.org", "secret") == ["<5@x>"]
    check_index(connection)


@pytest.mark.parametrize("number", [1, 14, 15, 40])
def test_the_triggers_write_what_the_build_writes(tmp_path: Path, email: Callable[..., RawEmail], number: int) -> None:
    people = tuple(f"p{n}@x.org" for n in range(number))
    mails = [email(1, to=people), email(2, sender="", to=())]
    build_database(mails, tmp_path / "m.db", settings=StoreSettings(max_recipients=0))
    with contextlib.closing(sqlite3.connect(tmp_path / "m.db")) as connection:
        built = connection.execute("SELECT parties FROM emails ORDER BY message_id").fetchall()
        connection.execute("UPDATE emails SET from_address = from_address")
        again = connection.execute("SELECT parties FROM emails ORDER BY message_id").fetchall()
    assert [sorted(words.split(" ")) for (words,) in again] == [sorted(words.split(" ")) for (words,) in built]
    assert len(built[0][0].split()) == number + 1 + (SNIPPET_WORDS if number + 1 > SNIPPET_WORDS else 0)


def test_rebuild_of_the_index_keeps_every_hit(connection: sqlite3.Connection, db: Path) -> None:
    before = search(db, "bob@x.org", "gas")
    connection.execute("INSERT INTO emails_fts(emails_fts) VALUES ('rebuild')")
    assert search(db, "bob@x.org", "gas") == before == ["<4@x>", "<3@x>", "<1@x>", "<6@x>"]
