"""Which questions are asked if none are named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tiny import make_database

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.mail.build import build_database
from emailrl.mail.demo import demo_emails
from emailrl.mail.sources import open_source
from emailrl.questions.beside import has_enron_email, has_only_demo_email, questions_file, with_questions, write_demo
from emailrl.settings import DataSettings, StoreSettings


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return make_database(tmp_path / "mail.db")


def chosen(db: Path, questions: Path | None = None) -> tuple[Path | None, str | None]:
    data, line = with_questions(DataSettings(questions=questions), db)
    return data.questions, line


def test_the_file_beside_the_database_is_taken_and_said(db: Path) -> None:
    beside = db.parent / "mail_questions.jsonl"
    assert questions_file(db) == beside
    beside.touch()
    assert chosen(db) == (beside, f"Questions: {beside} (next to the database)")


def test_a_link_to_a_database_has_the_questions_of_its_target_unless_it_has_its_own(db: Path, tmp_path: Path) -> None:
    link = tmp_path / "links" / "mine.db"
    link.parent.mkdir()
    link.symlink_to(db)
    beside = db.parent / "mail_questions.jsonl"
    assert questions_file(link) == beside  # where gen-questions writes them
    beside.touch()
    assert chosen(link)[0] == beside
    own = link.with_name("mine_questions.jsonl")
    own.touch()
    assert questions_file(link) == chosen(link)[0] == own


def test_a_broken_link_next_to_the_database_is_named(db: Path) -> None:
    beside = questions_file(db)
    beside.symlink_to("gone.jsonl")
    with pytest.raises(UsageError, match=r"mail_questions\.jsonl is a broken link to gone\.jsonl"):
        chosen(db)


def test_a_named_file_comes_first_and_needs_no_line(db: Path, tmp_path: Path) -> None:
    (tmp_path / "mail_questions.jsonl").touch()
    assert chosen(db, tmp_path / "mine.jsonl") == (tmp_path / "mine.jsonl", None)


def test_without_a_file_only_enron_email_gets_the_questions_of_the_hub(db: Path, tmp_path: Path) -> None:
    assert not has_enron_email(db)
    with pytest.raises(UsageError, match=r"has none next to it \(mail_questions\.jsonl\)") as refused:
        chosen(db)
    assert "emailrl gen-questions" in refused.value.hint and "--questions" in refused.value.hint
    (tmp_path / "mail").mkdir()
    (tmp_path / "mail" / "1.eml").write_text("From: kay@enron.com\nTo: bob@x.org\nMessage-ID: <1@x>\n\nhello\n")
    build_database(open_source(tmp_path / "mail"), tmp_path / "enron.db")
    with pytest.raises(EmailRLError, match="could not be loaded from the hub"):
        chosen(tmp_path / "enron.db")


def test_the_demo_is_known_by_its_message_ids_not_by_its_domain(tmp_path: Path) -> None:
    demo = write_demo(tmp_path / "demo.db", settings=StoreSettings(), seed=3).db
    assert has_only_demo_email(demo)

    own = list(demo_emails(3))
    own[-1].message_id = "<a1@mail.example>"
    assert not has_only_demo_email(build_database(iter(own), tmp_path / "own.db").db)


def test_the_demo_replaces_no_questions_unasked(tmp_path: Path) -> None:
    db = tmp_path / "demo.db"
    beside = questions_file(db)
    beside.write_text("mine")
    with pytest.raises(UsageError, match="--overwrite"):
        write_demo(db, settings=StoreSettings(), seed=1, limit=40)
    assert beside.read_text() == "mine" and not db.exists()
    beside.unlink()
    os.mkfifo(beside)
    with pytest.raises(UsageError, match="device or pipe"):
        write_demo(db, settings=StoreSettings(), seed=1, limit=40, overwrite=True)
    assert beside.is_fifo() and not db.exists()
