"""Which questions a split gives, which are asked if none are named, what is left out, and what the tables must say."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from questions.questions import Row, row
from tiny import make_database

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.mail.build import build_database
from emailrl.mail.demo import demo_emails
from emailrl.mail.sources import RawEmail, open_source
from emailrl.questions.load import (
    Questions,
    Split,
    coverage_notes,
    fingerprint,
    has_enron_email,
    has_only_demo_email,
    missing_ids,
    questions_file,
    read_questions,
    with_questions,
    write_demo,
)
from emailrl.records.trajectory import Scenario
from emailrl.settings import DataSettings, StoreSettings

Write = Callable[[list[Row]], Path]


def load(path: Path | None, split: Split | None, limit: int | None = None, **data: object) -> Questions:
    return read_questions(path, DataSettings(**data)).of(split, limit=limit, seed=3)  # type: ignore[arg-type]


def rows(inboxes: str, split: str | None = None, start: int = 1000) -> list[Row]:
    """One row for every letter, on the inbox of that letter."""
    named = {} if split is None else {"split": split}
    return [row(id=start + n, inbox_address=f"{inbox}@x", **named) for n, inbox in enumerate(inboxes)]


def ids(found: Questions) -> list[str]:
    return [scenario.id for scenario in found.scenarios]


def inboxes(found: Questions) -> set[str]:
    return {scenario.inbox_address for scenario in found.scenarios}


def test_named_splits_are_taken_as_they_stand(question_file: Write) -> None:
    path = question_file(rows("ab", "train", 1) + rows("c", "val", 10) + rows("d", "test", 20))
    splits: tuple[Split | None, ...] = ("train", "val", "test", None)
    assert [ids(load(path, split)) for split in splits] == [["1", "2"], ["10"], ["20"], ["1", "2", "10", "20"]]
    assert load(path, "test").notes == []


def test_a_set_without_val_gets_one_from_its_train_inboxes(question_file: Write) -> None:
    path = question_file(rows("aabbccddee", "train") + rows("f", "test", 1))
    train, val = load(path, "train"), load(path, "val")
    assert (len(train.scenarios), len(val.scenarios)) == (8, 2) and not inboxes(train) & inboxes(val)
    assert ids(load(path, "test")) == ["1"]


def test_a_set_that_names_no_splits_is_one_pool(question_file: Write) -> None:
    path = question_file(rows("aabbccddee"))
    test = load(path, "test")
    assert len(test.scenarios) == 10 and "has no splits" in test.notes[0]
    train, val = load(path, "train"), load(path, "val")
    assert len(train.scenarios + val.scenarios) == 10 and not inboxes(train) & inboxes(val)
    assert len(load(path, None).scenarios) == 10


def test_a_shared_inbox_is_an_error_where_splits_are_compared(question_file: Write) -> None:
    path = question_file(rows("aab", "train", 1) + rows("ac", "test", 10))
    for split in ("train", "val", "test"):
        with pytest.raises(UsageError, match=r"inbox a@x is in the splits train and test.*--allow-shared-inbox"):
            load(path, split)
        assert load(path, split, allow_shared_inbox=True).notes
    assert len(load(path, None).scenarios) == 5
    alone = read_questions(path, DataSettings()).of("test", limit=None, seed=3, check_inboxes=False).scenarios
    assert [s.id for s in alone] == ["10", "11"]


def test_a_file_generated_with_shared_inboxes_needs_no_flag_but_a_setting_against_it_wins(question_file: Write) -> None:
    marked = [one | {"shares_inbox": True} for one in rows("a", "train", 1) + rows("ac", "test", 10)]
    path = question_file(marked)
    for allowed in (None, True):
        assert "splits share an inbox (a@x)" in load(path, "test", allow_shared_inbox=allowed).notes[0]
    with pytest.raises(UsageError, match="--allow-shared-inbox"):
        load(path, "test", allow_shared_inbox=False)
    with pytest.raises(UsageError, match="--allow-shared-inbox"):  # rows of another file among them
        load(question_file([*marked, *rows("a", "val", 20)]), "test")


def test_an_empty_split_says_what_there_is(question_file: Write) -> None:
    path = question_file(rows("ab", "train"))
    with pytest.raises(UsageError, match=r"no questions of split 'test'. It has 2 train\."):
        load(path, "test")


def test_known_bad_questions_are_dropped_from_art_e_s_set_alone(question_file: Write) -> None:
    enron = {"inbox_address": "ana.roe@enron.com"}
    loaded = load(
        question_file([row(id=49, **enron), row(id=50, **enron), row(id=101), row(id=327, kind="x", **enron)]), None
    )
    assert ids(loaded) == ["50", "101", "327"] and loaded.dropped == {"known_bad_id": 1}


def test_questions_with_many_sources_are_dropped_and_counted(question_file: Write) -> None:
    three = ["<1@x>", "<2@x>", "<3@x>"]
    needed = row(id=4, message_ids=three, needs_all=True)
    path = question_file([row(id=1), row(id=2, message_ids=three[:2]), row(id=3, message_ids=three), needed])
    assert load(path, None).dropped == {"too_many_sources": 2}
    assert ids(load(path, None)) == ["1", "4"]
    assert load(path, None).notes == ["dropped questions with more source emails than MAX_SOURCE_MAILS: 2"]
    assert ids(load(path, None, max_source_mails=2)) == ["1", "2", "4"]
    with pytest.raises(UsageError, match=r"no questions left \(dropped .* MAX_SOURCE_MAILS: 1\)"):
        load(question_file([row(message_ids=["<1@x>", "<2@x>"])]), None)


def drawn(path: Path, split: Split | None, seed: int, limit: int = 10) -> list[str]:
    return ids(read_questions(path, DataSettings()).of(split, limit=limit, seed=seed))


def test_a_limit_takes_the_same_sample_for_a_seed(question_file: Write) -> None:
    path = question_file(rows("abcdefghij" * 5))
    assert drawn(path, None, 3) == drawn(path, None, 3, limit=20)[:10] != drawn(path, None, 4)
    assert len(inboxes(load(path, None, limit=10))) >= 8


@pytest.mark.parametrize(("split", "same"), [("train", False), ("val", True), ("test", True)])
def test_seeds_share_their_validation_and_test_questions(question_file: Write, split: Split, same: bool) -> None:
    path = question_file(rows("a" * 40, "train", 1) + rows("b" * 40, "val", 100) + rows("c" * 40, "test", 200))
    assert [drawn(path, split, 1) == drawn(path, split, seed) for seed in (42, 43)] == [same, same]


def test_the_fingerprint_knows_the_content_not_the_order(question_file: Write) -> None:
    def of(*given: Row) -> str:
        return fingerprint(read_questions(question_file([*given]), DataSettings()).scenarios)

    first, usual = of(*rows("abc")), of(row())
    assert of(*rows("abc")[::-1]) == first != of(*rows("ab"), row(id=1002, inbox_address="c@x", answer="Bo"))
    names = ["id", "question", "answer", "message_ids", "inbox_address", "query_date", "how_realistic", "split", "kind"]
    [scenario] = load(question_file([row()]), None).scenarios  # of nine fields, unless a newer one is unusual
    content = {name: getattr(scenario, name) for name in names}
    assert usual == hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest() != of(row(needs_all=True))


def test_the_settings_name_the_file_where_the_caller_does_not(question_file: Write) -> None:
    path = question_file(rows("ab"))
    assert len(load(None, None, questions=path).scenarios) == 2


def test_the_real_art_e_questions(shared_data: Path) -> None:
    path = shared_data / "enron" / "art_e_questions.jsonl"
    everything = load(path, None)
    assert len(everything.scenarios) == 798 and everything.dropped == {"too_many_sources": 61}
    with pytest.raises(UsageError, match="--allow-shared-inbox"):
        load(path, "test")
    sizes = {split: len(load(path, split, allow_shared_inbox=True).scenarios) for split in ("train", "val", "test")}
    assert sizes == {"train": 558, "val": 100, "test": 140}


@pytest.fixture
def three_mails(tmp_path: Path) -> Path:
    sent_at = datetime(2001, 5, 3, 9, tzinfo=UTC)
    mails = [
        RawEmail("<1@x>", "One", "bo@x.org", ["me@x.org"], [], [], sent_at, "a"),
        RawEmail("<2@x>", "Two", "me@x.org", ["bo@x.org"], [], [], sent_at, "b"),
        RawEmail("<3@x>", "Three", "bo@x.org", ["cy@x.org"], [], [], sent_at, "c"),
    ]
    return build_database(mails, tmp_path / "mail.db").db


def ask(*message_ids: str, day: str = "2001-05-04") -> Scenario:
    return Scenario("q", "Q?", "A", list(message_ids), "me@x.org", day)


def test_what_is_absent_is_told_from_what_is_out_of_sight(three_mails: Path) -> None:
    questions = [ask("<9@x>"), ask("<1@x>", "<9@x>"), ask("<3@x>"), ask("<1@x>", day="2001-05-03")]
    questions.append(ask("<1@x>", "<2@x>"))  # received, and sent
    hidden = ["<3@x>", "<1@x>"]  # another's mail; a mail of the day itself
    assert missing_ids(questions, three_mails) == (["<9@x>"], hidden, 1)


def test_the_share_of_answerable_questions_is_said(three_mails: Path) -> None:
    assert coverage_notes([ask("<1@x>")], three_mails) == []
    [note] = coverage_notes([ask("<1@x>"), ask("<9@x>"), ask("<2@x>")], three_mails)
    assert note == "the database can answer 2 of 3 questions (66.7%); missing: <9@x>"
    [note] = coverage_notes([ask("<1@x>"), *(ask(f"<{n}@x>") for n in range(5, 10)), ask("<3@x>")], three_mails)
    assert note.endswith("(14.3%); missing: <5@x>, <6@x>, <7@x> and 2 more; outside the inbox or too late: <3@x>")
    with pytest.raises(UsageError, match="contains none of the source emails"):
        coverage_notes([ask("<9@x>")], three_mails)


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return make_database(tmp_path / "mail.db")


def chosen(db: Path, questions: Path | None = None) -> tuple[Path | None, str | None]:
    data, line = with_questions(DataSettings(questions=questions), db)
    return data.questions, line


def test_the_file_beside_the_database_is_taken_and_said(db: Path, tmp_path: Path) -> None:
    beside = db.parent / "mail_questions.jsonl"
    link = tmp_path / "links" / "mine.db"
    link.parent.mkdir()
    link.symlink_to(db)
    assert questions_file(db) == questions_file(link) == beside  # where gen-questions writes them
    beside.touch()
    assert chosen(db) == chosen(link) == (beside, f"Questions: {beside} (next to the database)")
    own = link.with_name("mine_questions.jsonl")  # a link's own come first
    own.touch()
    assert questions_file(link) == chosen(link)[0] == own
    assert chosen(db, tmp_path / "named.jsonl") == (tmp_path / "named.jsonl", None)


def test_what_is_no_file_next_to_the_database_is_named(db: Path) -> None:
    beside = questions_file(db)
    beside.symlink_to("gone.jsonl")
    with pytest.raises(UsageError, match=r"mail_questions\.jsonl is a broken link"):
        chosen(db)
    beside.unlink()
    os.mkfifo(beside)
    with pytest.raises(UsageError, match=r"mail_questions\.jsonl is a device or pipe"):
        chosen(db)


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
