"""``emailrl forget``: after a mailbox was used from end to end, no byte of its address and no sentence is left."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from emailrl.mail import database_fingerprint, open_mailbox
from emailrl.questions.load import questions_file, read_jsonl, write_demo, write_scenarios
from emailrl.settings import StoreSettings


def bytes_below(folder: Path) -> bytes:
    return b"\n".join(path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def sentences_of(db: Path, inbox: str) -> list[str]:
    """Twenty lines of mails of this mailbox that stand in no other mail."""
    with sqlite3.connect(db) as connection:
        own = "(from_address = ?1 OR id IN (SELECT email_id FROM recipients WHERE recipient_address = ?1))"
        rows = connection.execute(f"SELECT body, {own} FROM emails", (inbox,)).fetchall()
    others = "\n".join(body for body, is_own in rows if not is_own)
    lines = [line for body, is_own in rows if is_own for line in body.splitlines() if len(line) > 25]
    found = [line for line in dict.fromkeys(lines) if line not in others]
    assert len(found) >= 20
    return found[:20]


def test_nothing_of_a_used_mailbox_is_left(emailrl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMAILRL_JUDGE", "offline")
    db = tmp_path / "mail.db"
    write_demo(db, settings=StoreSettings(), seed=42)
    asked = [each for each in read_jsonl(questions_file(db)) if each.split == "test"]
    inbox = asked[0].inbox_address
    other = next(each for each in asked if each.inbox_address != inbox)
    own = [each for each in asked if each.inbox_address == inbox]
    write_scenarios(tmp_path / "some.jsonl", [*own[:2], other])
    play = ("--model", "nano", "--db", db, "--questions", "some.jsonl", "--split", "test")
    assert emailrl("rollout", *play, "--num-generations", "1", "--out", "rollouts/r.jsonl")[0] == 0
    assert emailrl("benchmark", *play[:-2], "--limit", "3", "--out", "bench")[0] == 0
    assert emailrl("report", "rollouts/r.jsonl", "--html", "page.html")[0] == 0
    assert emailrl("ask", "Where is lunch?", "--model", "nano", "--db", db, "--inbox", inbox)[0] == 0
    cache = sqlite3.connect(tmp_path / "judge_cache.sqlite")
    cache.execute("CREATE TABLE kept (key, model, value)")
    cache.execute("INSERT INTO kept VALUES ('k', 'm', ?)", (sentences_of(db, inbox)[0],))
    cache.commit()
    cache.close()
    (tmp_path / "archive.mbox").write_text(f"From: {inbox}\n")
    (tmp_path / "elsewhere").symlink_to("/etc")
    (tmp_path / "mine.csv").write_text("a,b\n")
    (tmp_path / "mine.html").write_text("<p>mine</p>")
    os.mkfifo(tmp_path / "pipe.jsonl")
    fingerprint = database_fingerprint(db)
    sentences, before = sentences_of(db, inbox), bytes_below(tmp_path)

    code, told, error = emailrl("forget", "--inbox", inbox.upper(), "--dry-run")
    assert code == 0 and "mail.db" in told and "W&B" in error
    assert bytes_below(tmp_path) == before and inbox.encode() in before

    code, told, error = emailrl("forget", "--inbox", inbox, "--yes", "--json")
    assert code == 1  # the archive is the user's own
    said = json.loads(told.splitlines()[-1])
    assert {Path(path).name for path in said["left"]} == {"archive.mbox", "elsewhere", "pipe.jsonl"}
    (tmp_path / "archive.mbox").unlink()
    after = bytes_below(tmp_path).lower()
    assert inbox.encode() not in after
    assert all(each.question.lower().encode() not in after for each in own)
    with sqlite3.connect(shutil.copy(db, tmp_path / "anew.db")) as connection:
        size = "SELECT sum(length(block)) FROM emails_fts_data"  # an index not made anew keeps words of removed mails
        (left,) = connection.execute(size).fetchone()
        assert connection.execute("PRAGMA freelist_count").fetchone() == (0,)  # pages that would keep what stood there
        connection.execute("INSERT INTO emails_fts(emails_fts) VALUES ('rebuild')")
        connection.commit()
        assert connection.execute(size).fetchone() == (left,)
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        noted = dict(connection.execute("SELECT key, value FROM meta"))
        assert int(noted["emails"]) == connection.execute("SELECT count(*) FROM emails").fetchone()[0] > 0
    assert database_fingerprint(db) != fingerprint
    (tmp_path / "anew.db").unlink()
    assert [
        each for each in sentences if each.lower().encode() in after or json.dumps(each).lower()[1:-1].encode() in after
    ] == []
    kept = [json.loads(line) for line in (tmp_path / "rollouts/r.jsonl").read_text().splitlines()]
    assert [each["scenario"]["inbox_address"] for each in kept] == [other.inbox_address]
    with open_mailbox(db, other.inbox_address) as mailbox:
        assert mailbox.read(other.message_ids[0]) is not None and mailbox.search(["the"])
    assert (tmp_path / "mine.csv").exists() and (tmp_path / "mine.html").exists()
    code, _, error = emailrl("forget", "--inbox", inbox, "--yes")
    assert code == 2 and "Nothing below" in error


def test_what_cannot_be_read_is_reported_and_a_refusal_changes_nothing(emailrl, tmp_path: Path) -> None:
    lines = ['{"inbox_address": "ann@example.com"}', '{"to": "\\u0061nn@example.com"}', "{torn", '{"id": 1}']
    (tmp_path / "q.jsonl").write_text("\n".join(lines) + "\n")
    code, _, error = emailrl("forget", "--inbox", "ann@example.com")  # nobody answers
    assert code != 0 and (tmp_path / "q.jsonl").read_text() == "\n".join(lines) + "\n"
    code, _, error = emailrl("forget", "--inbox", "ann@example.com", "--yes")
    assert code == 1 and "1 of its lines cannot be read" in error
    assert (tmp_path / "q.jsonl").read_text() == "{torn\n" + '{"id": 1}\n'
