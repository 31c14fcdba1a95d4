"""One build at a time, which replaces only what it was told to, and a database whose pages are damaged."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mail.mails import found, only, rows, stored_emails

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.mail import database_fingerprint, open_mailbox
from emailrl.mail.build import build_database
from emailrl.mail.database import connect, last_day
from emailrl.mail.sources import RawEmail
from emailrl.questions.load import missing_ids
from emailrl.questions.template import generate
from emailrl.records.trajectory import Scenario

Make = Callable[..., RawEmail]


def ids(db: Path) -> list[str]:
    return sorted(email.message_id for email in stored_emails(db))


@pytest.mark.parametrize("flags", [{}, {"append": True}, {"overwrite": True}])
def test_a_second_build_ends_at_once(tmp_path: Path, email: Make, flags: dict[str, bool]) -> None:
    db = tmp_path / "mail.db"
    if flags:
        build_database([email(1)], db)
    read: list[int] = []

    def mails() -> Iterator[RawEmail]:
        yield email(2)
        with pytest.raises(EmailRLError, match=r"Another gen-db or forget is writing .*mail\.db") as refused:
            build_database((read.append(1) or email(3) for _ in range(1)), db, **flags)
        assert "\n" not in str(refused.value) and not read

    build_database(mails(), db, **flags)
    assert ids(db) == (["<1@x>", "<2@x>"] if "append" in flags else ["<2@x>"])
    assert only(tmp_path) == ["mail.db"]


def test_what_a_dead_build_left_is_cleared_up_and_no_journal_is_written(tmp_path: Path, email: Make) -> None:
    for name in ("building", "gen-db-lock", "building.txt"):
        (tmp_path / f"mail.db.{name}").write_text("half a database")
    seen: set[str] = set()
    for number in (1, 2):
        mails = [email(number)]
        build_database(mails, tmp_path / "mail.db", append=True, progress=lambda *_: seen.update(only(tmp_path)))
    assert seen == {"mail.db", "mail.db.building", "mail.db.building.txt", "mail.db.gen-db-lock"}
    assert ids(tmp_path / "mail.db") == ["<1@x>", "<2@x>"]
    assert only(tmp_path) == ["mail.db", "mail.db.building.txt"]


@pytest.mark.parametrize("name", ["building", "gen-db-lock"])
def test_nothing_is_written_through_a_planted_file(tmp_path: Path, email: Make, name: str) -> None:
    (tmp_path / "thesis").write_text("Years of work.")
    for plant in (Path.symlink_to, Path.hardlink_to):
        plant(tmp_path / f"mail.db.{name}", tmp_path / "thesis")
        with contextlib.suppress(UsageError):  # a link in the place of the lock
            build_database([email(1)], tmp_path / "mail.db", overwrite=True)
        assert (tmp_path / "thesis").read_text() == "Years of work."
        (tmp_path / f"mail.db.{name}").unlink(missing_ok=True)


def test_a_file_that_came_meanwhile_is_not_replaced(tmp_path: Path, email: Make) -> None:
    db = tmp_path / "mail.db"

    def mails() -> Iterator[RawEmail]:
        yield email(1)
        db.write_text("thesis")

    for append in (False, True):
        with pytest.raises(EmailRLError, match="exists"):
            build_database(mails(), db, append=append)
        assert db.read_text() == "thesis" and only(tmp_path) == ["mail.db"]
        db.unlink()


def refusal(db: Path, **flags: bool) -> str:
    with pytest.raises(UsageError) as refused:
        build_database([], db, **flags)
    return str(refused.value)


@pytest.mark.parametrize("flags", [{"overwrite": True}, {"append": True}, {}])
def test_what_is_no_database_is_not_replaced(tmp_path: Path, flags: dict[str, bool]) -> None:
    thesis, pipe = tmp_path / "thesis.txt", tmp_path / "pipe"
    thesis.write_text("Years of work.")
    os.mkfifo(pipe)
    for said in (refusal(thesis, **flags), refusal(pipe, **flags)):
        assert "--db" in said and "--overwrite" not in said
    with pytest.raises(UsageError, match="--db") as refused:
        open_mailbox(thesis, "a@x")
    assert "--overwrite" not in str(refused.value)
    assert thesis.read_text() == "Years of work." and pipe.is_fifo() and only(tmp_path) == ["pipe", "thesis.txt"]


def script(db: Path, statements: str) -> None:
    with contextlib.closing(sqlite3.connect(db)) as connection:
        connection.executescript(statements)


@pytest.mark.parametrize("flag", ["append", "sync", "overwrite"])
@pytest.mark.parametrize("is_committed", [False, True])
def test_a_database_that_another_program_writes_meanwhile_is_not_replaced(
    tmp_path: Path, email: Make, flag: str, is_committed: bool
) -> None:
    db = tmp_path / "mail.db"
    build_database([email(1)], db)
    with contextlib.closing(sqlite3.connect(db, isolation_level=None)) as writer:

        def mails() -> Iterator[RawEmail]:
            writer.execute("BEGIN IMMEDIATE")
            writer.execute("UPDATE emails SET file_name = 'changed'")
            if is_committed:
                writer.execute("COMMIT")
            yield from (email(1), email(2))

        if flag == "overwrite" and is_committed:  # of which nothing was read
            build_database(mails(), db, overwrite=True)
            assert ids(db) == ["<1@x>", "<2@x>"]
            return
        with pytest.raises(EmailRLError, match="has changed" if is_committed else "journal still exists"):
            build_database(mails(), db, **{flag: True})
        if not is_committed:
            writer.execute("COMMIT")
    assert rows(db, "SELECT message_id, file_name FROM emails") == [("<1@x>", "changed")]
    assert only(tmp_path) == ["mail.db"]


@pytest.mark.parametrize("mode", ["delete", "wal"])
def test_only_a_database_of_emailrl_is_replaced(tmp_path: Path, email: Make, mode: str) -> None:
    foreign, view, torn, ours = (tmp_path / f"{name}.db" for name in ("photos", "view", "torn", "ours"))
    tables = "".join(f"CREATE TABLE {name}(key, value);" for name in ("emails", "recipients", "meta", "photos"))
    script(foreign, f"PRAGMA journal_mode = {mode}; {tables}")
    script(view, f"PRAGMA journal_mode = {mode}; CREATE VIEW v AS SELECT 1")
    torn.write_bytes(foreign.read_bytes()[:600])
    for db in (foreign, view, torn):
        before = db.read_bytes()
        for flags in ({}, {"append": True}, {"overwrite": True}):  # and none tells to use another of them
            assert "away" in refusal(db, **flags) and "--" not in refusal(db, **flags).replace("--db", "")
        assert db.read_bytes() == before
    assert only(tmp_path) == ["photos.db", "torn.db", "view.db"]
    with pytest.raises(UsageError, match="--db") as refused:
        open_mailbox(view, "a@x")
    assert "--overwrite" not in str(refused.value)
    build_database([email(1)], ours)
    script(ours, "DROP TABLE emails_fts; UPDATE meta SET value = 1 WHERE key = 'schema_version'")
    for flags in ({}, {"append": True}):  # an old one can only be replaced
        assert "--overwrite" in refusal(ours, **flags) and "--append" not in refusal(ours, **flags)
    assert build_database([email(2)], ours, overwrite=True).emails == 1
    assert "--overwrite" in refusal(ours) and "--append" in refusal(ours)
    for newer in ("value + 1", "100"):
        script(ours, f"UPDATE meta SET value = {newer} WHERE key = 'schema_version'")
        assert all("Upgrade emailrl" in refusal(ours, **flags) for flags in ({}, {"append": True}, {"sync": True}))
    assert build_database([email(2)], ours, overwrite=True).emails == 1
    ours.write_bytes(b"")
    assert build_database([email(1)], ours, overwrite=True).emails == 1, "an empty file may be overwritten"


def test_a_target_that_cannot_be_written_names_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "notmail.txt").write_text("text")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    said = "notmail.txt is not a folder. Name another file with --db."
    assert said in refusal(tmp_path / "notmail.txt" / "x.db")
    assert "Name another file with --db." in refusal(tmp_path / "circle")
    os.mkfifo(tmp_path / "mail.db-wal")  # it is refused, not waited for
    assert "mail.db-wal" in refusal(tmp_path / "mail.db")
    assert only(tmp_path) == ["circle", "mail.db-wal", "notmail.txt"]


def damage(db: Path, *tables: str) -> None:
    """Overwrite the pages at which these tables begin."""
    marks = ", ".join("?" * len(tables))
    roots = rows(db, f"SELECT rootpage FROM sqlite_master WHERE rootpage > 0 AND tbl_name IN ({marks})", *tables)
    [(size,)] = rows(db, "PRAGMA page_size")
    with db.open("r+b") as file:
        for (root,) in roots:
            file.seek((root - 1) * size)
            file.write(b"\xff" * size)


def test_damage_is_an_error_with_the_remedy(tmp_path: Path, email: Make) -> None:
    db = tmp_path / "mail.db"
    build_database((email(n, body=f"word {n} " * 200) for n in range(60)), db)
    damage(db, "emails", "recipients")
    question = Scenario("q", "Q?", "A", ["<1@x>"], "bob@x.org", "2001-06-01")
    readers: list[Callable[[], object]] = [lambda: last_day(db), lambda: missing_ids([question], db)]
    readers += [lambda: generate(db), lambda: generate(db, inboxes=["bob@x.org"])]
    for read in (*readers, lambda: build_database([email(99)], db, append=True)):
        with pytest.raises(EmailRLError, match="move this one away") as error:
            read()
        assert error.value.exit_code == 1
    assert build_database([email(1)], db, overwrite=True).emails == 1
    damage(db, "meta")
    for look in (connect, database_fingerprint):
        with pytest.raises(EmailRLError, match="move this one away"):
            look(db)


def test_a_name_that_is_no_text_is_a_name_all_the_same(tmp_path: Path, email: Make) -> None:
    folder = tmp_path / "post\udcff ?%#\n"
    folder.mkdir()
    build_database([email(1)], folder / "mail.db")
    build_database([email(2)], folder / "mail.db", append=True)
    assert sorted(found(folder / "mail.db", "bob@x.org", "body")) == ["<1@x>", "<2@x>"]
