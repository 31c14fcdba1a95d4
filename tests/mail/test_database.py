"""The ways into a database file: what its connections are, what they leave open, and how they fail."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Connection, inspect, select, text

import emailrl
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.mail import database_fingerprint, open_mailbox
from emailrl.mail.build import build_database
from emailrl.mail.database import connect, emails, metadata, opened
from emailrl.mail.sources import RawEmail

Make = Callable[..., RawEmail]
OTHERS = {"base/cache.py", "cli/doctor.py", "mail/snippets.py", "measure/forget.py"}
"""Other databases than those of gen-db; the doctor, which imports nothing that it looks at; forget, which opens any."""

OPEN_AT_EXIT = """
import sys, threading
from emailrl.mail import open_mailbox
kept = open_mailbox(sys.argv[1], "bob@x.org")
thread = threading.Thread(target=lambda: open_mailbox(sys.argv[1], "bob@x.org").search(["gas"]))
thread.start()
thread.join()
"""
ENDLESS_QUERY = """
import asyncio, sys
from pathlib import Path
from emailrl.mail.database import opened
def query():
    with opened(Path(sys.argv[1])) as connection:
        print("running", flush=True)
        connection.exec_driver_sql("WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x FROM n) SELECT count(*) FROM n")
async def conversation():
    query()
async def conversations():
    await asyncio.gather(conversation())
"""


@pytest.mark.parametrize("start", ["query()", "asyncio.run(conversations())"])
def test_ctrl_c_interrupts_a_running_query(db: Path, start: str) -> None:
    command = [sys.executable, "-c", ENDLESS_QUERY + start, str(db)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "running\n"
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGINT and errors.endswith("KeyboardInterrupt\n")


def test_the_mail_database_is_opened_in_one_place() -> None:
    package = Path(emailrl.__file__).parent
    by_hand = re.compile(r"sqlite3\.connect\(")
    assert {
        str(path.relative_to(package)) for path in package.rglob("*.py") if by_hand.search(path.read_text())
    } == OTHERS


def test_a_connection_is_an_engine_s_and_reads_alone_what_the_schema_says(db: Path) -> None:
    with connect(db) as connection:
        assert isinstance(connection, Connection)
        assert connection.exec_driver_sql("PRAGMA query_only").scalar_one() == 1
        assert len(connection.scalars(select(emails.c.id)).all()) > 0
        there = inspect(connection)
        for table in metadata.sorted_tables:
            assert [column["name"] for column in there.get_columns(table.name)] == table.columns.keys()
            assert {index["name"] for index in there.get_indexes(table.name)} == {index.name for index in table.indexes}


def open_files(path: Path) -> int:
    return sum(os.path.realpath(f"/proc/self/fd/{name}") == str(path) for name in os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="no /proc")
def test_no_file_stays_open_and_another_may_take_its_name(db: Path, tmp_path: Path, email: Make) -> None:
    before = database_fingerprint(db)
    build_database([email(50)], tmp_path / "other.db")
    with opened(db):
        assert open_files(db.resolve()) == 1
    assert open_files(db.resolve()) == 0
    shutil.move(tmp_path / "other.db", db)
    assert database_fingerprint(db) != before
    (tmp_path / "empty.db").touch()
    with pytest.raises(UsageError, match=r"empty\.db is empty\. .* move this one away"):
        connect(tmp_path / "empty.db")


def test_a_relative_name_is_that_of_the_folder_one_is_in(
    tmp_path: Path, email: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for number in (1, 2):
        build_database([email(number)], tmp_path / str(number) / "mail.db")
        monkeypatch.chdir(tmp_path / str(number))
        with opened(Path("mail.db")) as connection:
            found += connection.scalars(select(emails.c.message_id)).all()
    assert found == ["<1@x>", "<2@x>"]


def test_a_reader_between_two_statements_holds_no_lock_and_errors_have_sqlites_words(db: Path) -> None:
    with pytest.raises(EmailRLError) as caught, opened(db) as reader:
        reader.execute(select(emails.c.id)).all()
        with closing(sqlite3.connect(db, timeout=0)) as writer, writer:
            writer.execute("DELETE FROM meta WHERE key = 'fingerprint'")
        reader.execute(text("SELECT body FROM nowhere"))
    assert caught.value.message == f"The database {db} cannot be read: no such table: nowhere."


@pytest.mark.parametrize("read", [connect, lambda db: open_mailbox(db, "bob@x.org")])
def test_a_pipe_in_place_of_the_journal_is_not_waited_for(db: Path, read: Callable[[Path], object]) -> None:
    journal = Path(f"{db}-journal")
    os.mkfifo(journal)
    held = os.open(journal, os.O_RDWR)  # so that SQLite, if it opens the pipe, does not wait forever
    with pytest.raises(UsageError, match=r"-journal is a device or pipe\. Remove it\."):
        read(db)
    os.close(held)


def test_a_program_may_end_with_mailboxes_open(db: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", OPEN_AT_EXIT, db], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
