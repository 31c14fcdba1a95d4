"""The real archive: every message accounted for, read as the standard library reads it, found as ART-E finds it."""

from __future__ import annotations

import email
import json
import re
import sqlite3
import sys
from contextlib import closing
from email.utils import getaddresses, parsedate_to_datetime
from pathlib import Path
from unittest.mock import patch

import pytest
from mail.mails import rows

from emailrl.cli.app import main
from emailrl.mail import open_mailbox
from emailrl.mail.build import BuildReport, build_database
from emailrl.mail.sources import RawEmail, message, open_source, parse_message

# ART-E's query, on the tables and columns that it shares with ours.
ART_E_QUERY = """
    SELECT e.message_id, e.date, snippet(emails_fts, -1, '<b>', '</b>', ' ... ', 15)
    FROM emails e JOIN emails_fts fts ON e.id = fts.rowid
    WHERE fts.emails_fts MATCH ?
    AND (e.from_address = ? OR EXISTS (
        SELECT 1 FROM recipients r WHERE r.recipient_address = ? AND r.email_id = e.id))
    AND e.date < ?
    ORDER BY e.date DESC LIMIT 10"""


@pytest.fixture(scope="module")
def archive(shared_data: Path) -> Path:
    return shared_data / "enron" / "enron_mail_subset.tar.gz"


@pytest.fixture(scope="module")
def built(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> BuildReport:
    return build_database(open_source(archive), tmp_path_factory.mktemp("real") / "enron.db")


def test_every_message_is_stored_or_counted(built: BuildReport) -> None:
    # Counted once more by tarfile, the standard library's parser and the filters written anew.
    assert built.skipped == {"long_body": 1664, "many_recipients": 1544, "duplicate": 7217}
    # Four mails to a group (<"the.desk":@enron.com>) have no recipient, where the standard library sees two each.
    assert (built.emails, built.recipients) == (23585, 120481)
    assert built.emails + sum(built.skipped.values()) == 34010
    assert built.defects == {}


def test_the_index_agrees_with_the_mails(built: BuildReport) -> None:
    rows(built.db, "INSERT INTO emails_fts(emails_fts, rank) VALUES ('integrity-check', 1)")
    disorder = "emails a JOIN emails b ON b.id = a.id + 1 WHERE (a.date, a.message_id) <= (b.date, b.message_id)"
    assert rows(built.db, f"SELECT count(*) FROM {disorder}") == [(0,)]


def test_messages_are_read_as_the_standard_library_reads_them(archive: Path) -> None:
    different = []
    for number, (name, raw) in enumerate(open_source(archive).items):  # type: ignore[misc]
        if number % 15:
            continue
        message = email.message_from_bytes(raw)
        people = [
            [address.lower() for _, address in getaddresses(message.get_all(kind, []))]
            for kind in ("from", "to", "cc", "bcc")
        ]
        mine = parse_message(raw, name)
        assert isinstance(mine, RawEmail)
        same = (
            mine.message_id == message["message-id"]
            and mine.subject.split() == str(message["subject"]).split()
            and [[mine.from_address], mine.to, mine.cc, mine.bcc] == people
            and mine.date == parsedate_to_datetime(message["date"])
            and mine.body.encode() == message.get_payload(decode=True)
        )
        if not same and raw.isascii() and b"=?" not in raw:
            different.append(name)
    assert different == []


def test_the_quick_path_reads_as_the_library_does(archive: Path) -> None:
    for number, (item, mail) in enumerate(zip(open_source(archive).items, open_source(archive), strict=True)):
        name, raw = item  # type: ignore[misc]
        if number % 5 == 0:
            with patch.object(message, "_plain", return_value=None):
                assert mail == parse_message(raw, name), name


@pytest.fixture(scope="module")
def questions(shared_data: Path) -> list[dict[str, str]]:
    lines = (shared_data / "enron" / "art_e_questions.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_searches_find_what_art_e_s_query_finds(built: BuildReport, questions: list[dict[str, str]]) -> None:
    hits = 0
    with closing(sqlite3.connect(built.db)) as connection:
        dates = dict(connection.execute("SELECT message_id, date FROM emails"))
        for number, row in enumerate(questions[::2]):
            words = re.findall(r"[\w'-]{3,}", row["question"])
            keywords = [words[(number * 7 + k * 3) % len(words)] for k in range(1 + number % 3)]
            inbox, until = row["inbox_address"].lower(), row["query_date"][:10]
            quoted = " ".join(f'"{keyword}"' for keyword in keywords)
            expected = connection.execute(ART_E_QUERY, (quoted, inbox, inbox, until)).fetchall()
            found = [(hit.message_id, hit.snippet) for hit in open_mailbox(built.db, inbox, until).search(keywords)]
            last = expected[-1][1] if len(expected) == 10 else None
            sure = [(message_id, snippet) for message_id, date, snippet in expected if date != last]
            assert len(found) == len(expected), keywords
            # Equally dated mails stand in no order of ART-E's, and may change places at the end of a full page.
            assert set(sure) <= set(found), keywords
            assert [dates[message_id] for message_id, _ in found] == [date for _, date, _ in expected]
            hits += len(found)
    assert len(questions) == 859 and hits > 2000


def test_most_source_mails_of_the_questions_can_be_read(built: BuildReport, questions: list[dict[str, str]]) -> None:
    boxes = ((open_mailbox(built.db, row["inbox_address"], row["query_date"][:10]), row) for row in questions)
    assert sum(box.read(row["message_ids"][0]) is not None for box, row in boxes) > 0.9 * len(questions)


def test_the_archive_that_breaks_off(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(shared_data / "enron" / "enron_mail_truncated.tar.gz")
    arguments = ["emailrl", "gen-db", "--source", source, "--db", str(tmp_path / "mail.db"), "--json"]
    for code, more in ((1, []), (0, ["--allow-truncated"])):
        monkeypatch.setattr(sys, "argv", [*arguments, *more])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == code
        printed = capsys.readouterr()
        if code:
            assert "after 3,936 complete messages (2,424,832 of its 2,424,832 bytes read)" in printed.err
            assert list(tmp_path.iterdir()) == []
    value = json.loads(printed.out)
    assert value["skipped"]["truncated"] == 1
    assert value["emails"] + sum(value["skipped"].values()) == 3937
