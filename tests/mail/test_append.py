"""Adding mail to a database: as if all had been built at once, quickly where the mail is newer, and never by halves."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mail.mails import found, only, rows, stored_emails
from sqlalchemy import Connection

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.mail import build, database, database_fingerprint, open_mailbox
from emailrl.mail.build import build_database
from emailrl.mail.database import driver
from emailrl.mail.sources import RawEmail

Make = Callable[..., RawEmail]
PEOPLE = ["ann@x.org", "bob@x.org", "cy@x.org", "dee@x.org"]


def check(db: Path) -> None:
    """The database is whole: SQLite's own checks, the index against the mails, ids against dates, all triggers."""
    assert rows(db, "PRAGMA integrity_check") == [("ok",)]
    rows(db, "INSERT INTO emails_fts(emails_fts, rank) VALUES ('integrity-check', 1)")
    dates = [date or "" for (date,) in rows(db, "SELECT date FROM emails ORDER BY id")]
    assert dates == sorted(dates, reverse=True)
    assert rows(db, "SELECT count(*) FROM recipients WHERE email_id NOT IN (SELECT id FROM emails)") == [(0,)]
    assert rows(db, "SELECT count(*) FROM sqlite_master WHERE type = 'trigger'") == [(8,)]
    assert rows(db, "SELECT value FROM meta WHERE key = 'emails'") == [(str(len(dates)),)]


MAIL = st.tuples(
    st.one_of(st.none(), st.integers(1, 28)), st.sampled_from(PEOPLE), st.sets(st.sampled_from(PEOPLE), max_size=3),
    st.sampled_from(["gas", "the gas", "budget"]),
)  # fmt: skip


@pytest.mark.parametrize("few", [1000, 2, -1])
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=st.lists(st.lists(MAIL, max_size=6), min_size=2, max_size=4))
def test_as_if_all_had_been_built_at_once(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, email: Make, few: int, batches: list
) -> None:
    monkeypatch.setattr(build, "_FEW_MAILS", few)
    monkeypatch.setattr(build, "_LARGEST_SHARE", 10**6)
    steps, once = (tmp_path_factory.mktemp("append") / name for name in ("steps.db", "once.db"))
    everything: list[RawEmail] = []
    for batch in batches:
        mails = [
            email(n, body=f"{body} {n}", sender=sender, to=tuple(sorted(to)), day=day and f"2001-05-{day:02}")
            for n, (day, sender, to, body) in enumerate(batch, len(everything))
        ]
        everything += mails
        if everything:
            build_database([*everything, *mails], steps, append=True)
            check(steps)
    if not everything:
        return
    build_database(everything, once)
    assert list(stored_emails(steps)) == list(stored_emails(once))
    assert database_fingerprint(steps) == database_fingerprint(once)
    for inbox in PEOPLE:
        for bounds in ({}, {"sent_before": "2001-05-14"}, {"sent_after": "2001-05-14"}):
            hits = [open_mailbox(db, inbox).search(["gas"], **bounds) for db in (steps, once)]
            assert hits[0] == hits[1]


def test_a_full_disk_is_said_of_the_copy_and_leaves_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, email: Make
) -> None:
    db = tmp_path / "mail.db"
    build_database([email(1)], db)
    before, connect_for_loading = db.read_bytes(), database.connect_for_loading

    def on_a_full_disk(path: Path) -> Connection:
        connection = connect_for_loading(path)
        driver(connection).execute("PRAGMA max_page_count = 2")
        return connection

    monkeypatch.setattr(database, "connect_for_loading", on_a_full_disk)
    with pytest.raises(EmailRLError, match="cannot be written: database or disk is full"):
        build_database([email(2, day="2001-05-02")], db, append=True)
    with pytest.raises(EmailRLError, match=r"disk is full\. The old database is unchanged"):
        build_database([email(2)], db, overwrite=True)
    with pytest.raises(EmailRLError, match=r"disk is full\. Nothing was written"):
        build_database([email(2)], tmp_path / "new.db")
    assert db.read_bytes() == before and only(tmp_path) == ["mail.db"]


@pytest.mark.parametrize(
    ("stored", "added", "expected"),
    [
        (  # newer mail comes before the others, undated mail by its id behind
            {1: None, 7: None, 2: "2001-05-02", 3: "2001-05-03"}, {4: None, 6: "2001-05-06", 5: "2001-05-03"},
            {-1: 6, 0: 5, 1: 3, 2: 2, 3: 7, 4: 4, 5: 1},
        ),
        (  # a mail from the future does not make every append a rewrite
            {1: "2001-05-01", 2: "2001-05-02", 9: "2037-01-01"}, {3: "2001-05-03"}, {0: 9, 1: 3, 2: 2, 3: 1}
        ),
    ],
)  # fmt: skip
def test_old_mail_keeps_its_ids(tmp_path: Path, email: Make, stored: dict, added: dict, expected: dict) -> None:
    db = tmp_path / "mail.db"
    build_database([email(n, day=day) for n, day in stored.items()], db)
    report = build_database([email(n, day=day) for n, day in added.items()], db, append=True)
    assert (report.emails, report.recipients) == (len(added), len(added))
    ids = rows(db, "SELECT id, message_id FROM emails ORDER BY id")
    assert ids == [(key, f"<{n}@x>") for key, n in expected.items()]
    check(db)


def test_a_write_that_breaks_the_order_is_refused(tmp_path: Path, email: Make) -> None:
    db = tmp_path / "mail.db"
    build_database([email(2, day="2001-05-02"), email(3, day="2001-05-03")], db)
    before = rows(db, "SELECT * FROM emails")
    for write in (
        "INSERT INTO emails(message_id, date, subject, body) VALUES ('<7@x>', '2001-05-07', 's', 'b')",
        "UPDATE emails SET date = '2001-05-07 00:00:00' WHERE message_id = '<2@x>'",
        "UPDATE emails SET id = 9 WHERE message_id = '<3@x>'",
    ):
        with pytest.raises(sqlite3.IntegrityError, match="--append"):
            rows(db, write)
    assert rows(db, "SELECT * FROM emails") == before
    check(db)


def test_addresses_keep_their_numbers_and_a_reader_what_it_opened(tmp_path: Path, email: Make) -> None:
    db = tmp_path / "mail.db"
    build_database([email(1, to=("bob@x.org", "eve@x.org"))], db)
    rows(db, "DELETE FROM addresses WHERE address = 'bob@x.org'")  # numbers with a gap
    old = open_mailbox(db, "eve@x.org")
    build_database([email(2, sender="new@x.org", to=("eve@x.org",), day="2001-05-02")], db, append=True)
    assert dict(rows(db, "SELECT address, id FROM addresses")) == {"ann@x.org": 1, "eve@x.org": 3, "new@x.org": 4}
    assert [hit.message_id for hit in old.search(["body"])] == ["<1@x>"]
    assert found(db, "eve@x.org", "body") == ["<2@x>", "<1@x>"]
    before = db.stat()
    assert build_database([email(1, to=("bob@x.org", "eve@x.org"))], db, append=True).emails == 0
    assert os.path.samestat(before, db.stat()) and before.st_mtime_ns == db.stat().st_mtime_ns, "nothing is new"


def test_the_index_stays_in_few_pieces(tmp_path: Path, email: Make) -> None:
    db = tmp_path / "mail.db"
    build_database((email(n, body="word " * 50 + str(n)) for n in range(200)), db)
    for number in range(200, 230):
        build_database([email(number, day="2001-06-01")], db, append=True)
    assert rows(db, "SELECT count(DISTINCT segid) <= 6 FROM emails_fts_idx") == [(1,)]
    assert rows(db, "SELECT k, v FROM emails_fts_config WHERE k IN ('automerge', 'usermerge', 'hashsize')") == [
        ("automerge", 4), ("hashsize", 1024 * 1024), ("usermerge", 4),
    ]  # fmt: skip


@pytest.mark.parametrize("flag", ["append", "overwrite"])
def test_what_another_program_writes_is_not_lost(tmp_path: Path, email: Make, flag: str) -> None:
    db = tmp_path / "mail.db"
    build_database([email(1)], db)
    with closing(sqlite3.connect(db)) as writer:
        writer.execute("PRAGMA journal_mode = WAL")
        writer.execute("UPDATE emails SET subject = 'changed by hand'")
        writer.commit()
        with pytest.raises(UsageError, match=r"Another program is writing .*mail\.db-wal"):
            build_database([email(2, day="2001-05-02")], db, **{flag: True})
    build_database([email(2, day="2001-05-02")], db, append=True)
    assert rows(db, "SELECT subject FROM emails ORDER BY id") == [("Subject 2",), ("changed by hand",)]
    assert rows(db, "PRAGMA journal_mode") == [("delete",)]
    check(db)


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from conftest import make_email
from emailrl.mail.build import build_database
print("ready", flush=True)
for number in range(int(sys.argv[3]), 10**6, 10):
    # One day forward, one back: mail is put in front, and moved.
    day = 2000 + number // 10 % 2
    mails = [make_email(n, day=f"{day}-05-01") for n in range(number, number + 10)]
    build_database(mails, Path(sys.argv[1]), append=True)
"""


def test_killed_at_any_moment_it_is_the_old_database_or_the_new(tmp_path: Path, email: Make) -> None:
    db, rng, stored = tmp_path / "mail.db", random.Random(0), [10]
    build_database([email(n) for n in range(10)], db)
    for _ in range(8):
        arguments = [sys.executable, "-c", KILLED, str(db), str(Path(__file__).parent), str(stored[-1])]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            time.sleep(rng.uniform(0, 0.3))
            process.send_signal(signal.SIGKILL)
        check(db)
        stored.append(len(list(stored_emails(db))))
    assert all(number % 10 == 0 for number in stored)
    assert stored == sorted(stored) and stored[-1] > 10
    build_database([email(10**6)], db, append=True)
    assert only(tmp_path) == ["mail.db"]
