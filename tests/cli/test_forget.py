"""``emailrl forget``: after a mailbox was used from end to end, no byte of its address and no sentence is left."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sqlite3
import tarfile
from base64 import encodebytes
from pathlib import Path

import pytest
from pyarrow import CompressedOutputStream

from emailrl.mail import database_fingerprint, open_mailbox
from emailrl.mail.database import locked
from emailrl.measure.forget import _opened, _Traces
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
    for form in ("atif", "sts", "openai", "inspect"):
        for how in ("--redact", "--no-redact"):
            name = f"{form}{how}" + {"openai": ".jsonl", "inspect": ".eval"}.get(form, "")
            assert emailrl("convert", "rollouts/r.jsonl", "--to", form, how, "--out", name)[0] == 0
    (tmp_path / "mine.jsonl.gz").write_bytes(gzip.compress((tmp_path / "rollouts/r.jsonl").read_bytes()))
    with CompressedOutputStream(tmp_path / "mine.zst", "zstd") as packed:
        packed.write(sentences_of(db, inbox)[0].encode())
    (tmp_path / "coded.eml").write_bytes(b"From: x@y\n\n" + encodebytes(sentences_of(db, inbox)[1].encode() * 2))
    (tmp_path / "wide.txt").write_text(sentences_of(db, inbox)[2], "utf-16")
    with tarfile.open(tmp_path / "packed.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "wide.txt", "wide.txt")
    (tmp_path / f"of {inbox}").mkdir()
    (tmp_path / f"of {inbox}" / "empty.txt").touch()
    assert emailrl("export", "--questions", "some.jsonl", "--out", "dataset")[0] == 0
    with sqlite3.connect(db) as connection:  # as the name of an attached file does
        connection.execute("UPDATE emails SET extra = ? WHERE from_address = ?", (f"{inbox}.pdf", other.inbox_address))
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
    left = {path.name: path for path in map(Path, said["left"])}
    packed_files = {"mine.jsonl.gz", "mine.zst", "packed.tar.gz", "coded.eml"}
    assert set(left) == {"archive.mbox", "wide.txt", "empty.txt", "pipe.jsonl", *packed_files}
    for name in set(left) - {"pipe.jsonl"}:
        left[name].unlink()
    assert [*tmp_path.glob("*.eval")] == []  # each held a trajectory of this mailbox
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
    assert emailrl("benchmark", *play[:-2], "--limit", "1", "--out", "anew")[0] == 0
    code, _, error = emailrl("forget", "--inbox", inbox, "--yes")
    assert code == 2 and "Nothing below" in error and (tmp_path / "anew/results.json").exists()


def test_whoever_has_a_longer_address_or_other_mail_keeps_theirs_and_a_quotation_goes(emailrl, tmp_path: Path) -> None:
    said = "The auditors will visit the old mill on the first Monday of June zu Kündigungen"
    mails = [
        ("ann@example.com", said),
        ("joann@example.com", "Please find the usual disclaimer about our offices below"),
    ]
    for number, (sender, text) in enumerate(
        [*mails, ("bob@example.com", "Nothing else happened at all this week here")]
    ):
        head = f"From: {sender}\nTo: bob@example.com\nMessage-ID: <{number}@x>\nDate: 3 Mar 2003 10:00:00 +0000\n"
        (tmp_path / f"{number}.eml").write_text(f"{head}Subject: s\n\n{text}.\n")
    assert emailrl("gen-db", "--source", tmp_path, "--db", "mail.db")[0] == 0
    quoted = {
        "harness": "emailrl",
        "text": f"He said: {said.replace(' ', chr(10))}",
    }  # a conversion without address and id
    (tmp_path / "session.jsonl").write_text(json.dumps(quoted, separators=(",", ":")) + "\n")
    (tmp_path / "other.json").write_text('{"agent":{"name":"emailrl"},"text":"' + mails[1][1] + '"}')
    code, told, _ = emailrl("forget", "--inbox", "ann@example.com", "--yes", "--json")
    told = json.loads(told.splitlines()[-1])
    assert (code, told["removed"], list(told["left"])) == (1, {str(tmp_path / "mail.db"): 1}, [str(tmp_path / "0.eml")])
    assert told["deleted"] == [str(tmp_path / "session.jsonl")]
    with open_mailbox(tmp_path / "mail.db", "joann@example.com") as mailbox:
        assert mailbox.read("<1@x>") is not None
    assert b"kundigung" not in (tmp_path / "mail.db").read_bytes(), "stems of its words go, too"


def test_lines_go_in_any_spelling_and_a_refusal_changes_nothing(emailrl, tmp_path: Path) -> None:
    lines = ['{"inbox_address": "ann@example.com"}', '{"to": "\\u0061nn@example.com"}', "{torn", '{"id": 1}']
    (tmp_path / "q.jsonl").write_text("\n".join(lines) + "\n")
    assert emailrl("forget", "--inbox", "ann@example.com")[0] != 0  # nobody answers
    assert (tmp_path / "q.jsonl").read_text() == "\n".join(lines) + "\n"
    assert emailrl("forget", "--inbox", "ann@example.com", "--yes")[0] == 0
    assert (tmp_path / "q.jsonl").read_text() == "{torn\n" + '{"id": 1}\n'


def test_forget_and_gen_db_exclude_each_other(emailrl, tmp_path: Path) -> None:
    db, mail = tmp_path / "mail.db", tmp_path / "ann.eml"
    mail.write_text("From: ann@example.com\nTo: bob@example.com\nMessage-ID: <a@x>\nSubject: s\n\nLunch.\n")
    assert emailrl("gen-db", "--source", mail, "--db", db)[0] == 0
    before = db.read_bytes()
    lock = locked(db)
    code, _, error = emailrl("forget", "--inbox", "ann@example.com", "--yes")
    lock.close(remove=True)
    assert code == 2 and "gen-db" in error and db.read_bytes() == before

    with _opened(db, _Traces("ann@example.com")):
        code, _, error = emailrl("gen-db", "--source", mail, "--db", db, "--append")
    assert code == 1 and "forget" in error and db.read_bytes() == before
    assert emailrl("forget", "--inbox", "ann@example.com", "--yes")[0] == 1  # her mail is the user's own
    assert b"ann@example.com" not in db.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ann.eml", "mail.db"]
