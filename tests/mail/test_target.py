"""One build at a time, which replaces only what it was told to, and a database whose pages are damaged."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mail.mails import found, only, rows, stored_emails
from sqlalchemy import Connection

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.cli.app import main
from emailrl.mail import build, database_fingerprint, open_mailbox
from emailrl.mail.build import build_database
from emailrl.mail.connection import connect, last_day
from emailrl.mail.sources import RawEmail
from emailrl.questions.load import missing_ids
from emailrl.questions.template import generate
from emailrl.records.trajectory import Scenario

Make = Callable[..., RawEmail]
Run = Callable[..., str]


@pytest.fixture
def gen_db(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``gen_db(*arguments) -> stderr``, one line, of the demo refused with an exit code, 2 unless named."""

    def run(*arguments: object, code: int = 2) -> str:
        source = () if "--source" in arguments or code == 1 else ("--source", "demo")
        monkeypatch.setattr(sys, "argv", ["emailrl", "gen-db", *map(str, (*source, *arguments))])
        with pytest.raises(SystemExit) as exit_:
            main()
        stderr = capsys.readouterr().err
        assert exit_.value.code == code and len(stderr.splitlines()) == 1, stderr
        return stderr

    return run


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
        with pytest.raises(EmailRLError, match=r"Another gen-db is writing .*mail\.db") as refused:
            build_database((read.append(1) or email(3) for _ in range(1)), db, **flags)
        assert "\n" not in str(refused.value) and not read

    build_database(mails(), db, **flags)
    assert ids(db) == (["<1@x>", "<2@x>"] if "append" in flags else ["<2@x>"])
    assert only(tmp_path) == ["mail.db"]


def test_a_build_of_another_process_is_seen(tmp_path: Path, email: Make) -> None:
    db = tmp_path / "mail.db"
    code = (
        "import sys; from pathlib import Path; from emailrl.mail.build import _claimed\n"
        "with _claimed(Path(sys.argv[1]), overwrite=False, append=True):\n    print('claimed', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(db)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "claimed\n"
        with pytest.raises(EmailRLError, match="Another gen-db"):
            build_database([email(1)], db, append=True)
        process.communicate("\n", timeout=30)
    build_database([email(1)], db, append=True)
    assert only(tmp_path) == ["mail.db"]


def test_what_a_dead_build_left_is_cleared_up_and_nothing_else(tmp_path: Path, email: Make) -> None:
    for name in ("building", "gen-db-lock", "building.txt"):
        (tmp_path / f"mail.db.{name}").write_text("half a database")
    build_database([email(1)], tmp_path / "mail.db")
    assert ids(tmp_path / "mail.db") == ["<1@x>"] and only(tmp_path) == ["mail.db", "mail.db.building.txt"]


@pytest.mark.parametrize("name", ["building", "gen-db-lock"])
@pytest.mark.parametrize("plant", [Path.symlink_to, Path.hardlink_to])
def test_nothing_is_written_through_a_planted_file(
    tmp_path: Path, email: Make, name: str, plant: Callable[[Path, Path], None]
) -> None:
    (tmp_path / "thesis").write_text("Years of work.")
    plant(tmp_path / f"mail.db.{name}", tmp_path / "thesis")
    with contextlib.suppress(UsageError):  # a link in the place of the lock
        build_database([email(1)], tmp_path / "mail.db")
    assert (tmp_path / "thesis").read_text() == "Years of work."


@pytest.mark.parametrize("append", [False, True])
def test_a_file_that_came_meanwhile_is_not_replaced(tmp_path: Path, email: Make, append: bool) -> None:
    db = tmp_path / "mail.db"

    def mails() -> Iterator[RawEmail]:
        yield email(1)
        db.write_text("thesis")

    with pytest.raises(UsageError, match="exists"):
        build_database(mails(), db, append=append)
    assert db.read_text() == "thesis"
    assert only(tmp_path) == ["mail.db"]


def test_loading_writes_no_journal(tmp_path: Path, email: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()
    last_step = build.create_triggers

    def watched(connection: Connection) -> None:
        for schema in ("main", "staging"):
            seen.update(connection.exec_driver_sql(f"PRAGMA {schema}.journal_mode").scalars())
        last_step(connection)

    monkeypatch.setattr(build, "create_triggers", watched)
    for number in (1, 2):
        build_database([email(number)], tmp_path / "mail.db", append=True)
        assert seen == {"off"}


@pytest.mark.parametrize("flag", ["--overwrite", "--append", "--json"])
def test_what_is_no_database_is_not_replaced(tmp_path: Path, gen_db: Run, flag: str) -> None:
    thesis, pipe = tmp_path / "thesis.txt", tmp_path / "pipe"
    thesis.write_text("Years of work.")
    os.mkfifo(pipe)
    for db in (thesis, pipe):
        stderr = gen_db("--db", db, flag)
        assert "--db" in stderr and "--overwrite" not in stderr
    with pytest.raises(UsageError, match="--db") as refused:
        open_mailbox(thesis, "a@x")
    assert "--overwrite" not in str(refused.value)
    assert thesis.read_text() == "Years of work." and pipe.is_fifo() and only(tmp_path) == ["pipe", "thesis.txt"]


@pytest.mark.parametrize("suffix", ["-wal", "-shm", "-journal"])
def test_a_pipe_beside_the_database_is_refused_not_waited_for(tmp_path: Path, gen_db: Run, suffix: str) -> None:
    os.mkfifo(tmp_path / f"mail.db{suffix}")
    gen_db("--db", tmp_path / "mail.db")
    assert only(tmp_path) == [f"mail.db{suffix}"]


def script(db: Path, statements: str) -> None:
    with contextlib.closing(sqlite3.connect(db)) as connection:
        connection.executescript(statements)


@pytest.mark.parametrize("mode", ["delete", "wal"])
def test_only_a_database_of_emailrl_is_replaced(tmp_path: Path, email: Make, gen_db: Run, mode: str) -> None:
    foreign, view, torn, ours = (tmp_path / f"{name}.db" for name in ("photos", "view", "torn", "ours"))
    tables = "".join(f"CREATE TABLE {name}(key, value);" for name in ("emails", "recipients", "meta", "photos"))
    script(foreign, f"PRAGMA journal_mode = {mode}; {tables}")
    script(view, f"PRAGMA journal_mode = {mode}; CREATE VIEW v AS SELECT 1")
    torn.write_bytes(foreign.read_bytes()[:600])
    for db in (foreign, view, torn):
        before = db.read_bytes()
        assert "--db" in gen_db("--db", db, "--overwrite") and db.read_bytes() == before
    assert only(tmp_path) == ["photos.db", "torn.db", "view.db"]
    with pytest.raises(UsageError, match="--db") as refused:
        open_mailbox(view, "a@x")
    assert "--overwrite" not in str(refused.value)
    build_database([email(1)], ours)
    script(ours, "DROP TABLE emails_fts; UPDATE meta SET value = 1 WHERE key = 'schema_version'")
    assert build_database([email(2)], ours, overwrite=True).emails == 1
    ours.write_bytes(b"")
    assert build_database([email(1)], ours, overwrite=True).emails == 1, "an empty file may be overwritten"


def test_a_target_that_cannot_be_written_names_the_remedy(tmp_path: Path, gen_db: Run) -> None:
    (tmp_path / "notmail.txt").write_text("text")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    said = "notmail.txt is not a folder. Name another file with --db."
    assert said in gen_db("--db", tmp_path / "notmail.txt" / "x.db")
    assert "Name another file with --db." in gen_db("--db", tmp_path / "circle")


@pytest.mark.parametrize("empty", ["", " "])
def test_empty_values_do_not_mean_the_current_folder(
    tmp_path: Path, gen_db: Run, monkeypatch: pytest.MonkeyPatch, empty: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "1.").write_text("From: a@x\nTo: b@x\n\nbody")
    for arguments in (["--source", empty, "--db", "mail.db"], ["--source", "1.", "--db", empty]):
        assert "empty" in gen_db(*arguments)
    assert only(tmp_path) == ["1."]


def damage(db: Path, *tables: str) -> None:
    """Overwrite the pages at which these tables begin."""
    marks = ", ".join("?" * len(tables))
    roots = rows(db, f"SELECT rootpage FROM sqlite_master WHERE rootpage > 0 AND tbl_name IN ({marks})", *tables)
    [(size,)] = rows(db, "PRAGMA page_size")
    with db.open("r+b") as file:
        for (root,) in roots:
            file.seek((root - 1) * size)
            file.write(b"\xff" * size)


def test_damage_is_one_line_with_the_remedy(tmp_path: Path, email: Make, gen_db: Run) -> None:
    db = tmp_path / "mail.db"
    build_database((email(n, body=f"word {n} " * 200) for n in range(60)), db)
    damage(db, "emails", "recipients")
    question = Scenario("q", "Q?", "A", ["<1@x>"], "bob@x.org", "2001-06-01")
    readers: list[Callable[[], object]] = [
        lambda: last_day(db),
        lambda: missing_ids([question], db),
        lambda: generate(db),
        lambda: generate(db, inboxes=["bob@x.org"]),
        lambda: build_database([email(99)], db, append=True),
    ]
    for read in readers:
        with pytest.raises(EmailRLError, match="move this one away") as error:
            read()
        assert error.value.exit_code == 1
    assert "move this one away" in gen_db("--db", db, code=1)
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
