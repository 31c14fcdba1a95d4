"""Whole question sets out of a database: provable, balanced, disjoint, the same for a seed."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter, defaultdict
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path

import pytest
from questions.template.world import ANA, BO, PLACES, THINGS, box, mail, mails_of_seven
from typer.testing import CliRunner

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.mail.build import build_database
from emailrl.mail.database import opened
from emailrl.mail.sources import RawEmail
from emailrl.questions.inbox import MailReader
from emailrl.questions.load import missing_ids, read_jsonl, read_questions
from emailrl.questions.template import KINDS, generate, realism_of
from emailrl.records.trajectory import Scenario
from emailrl.settings import DataSettings


def sent(
    number: int, subject: str, sender: str, to: str = "zoe@x.org", *, hours: int = 9, body: str = "Yes."
) -> RawEmail:
    """The mail of a number, that many times ``hours`` after March 1st, 2001."""
    day = datetime(2001, 3, 1, 9, tzinfo=UTC) + timedelta(hours=hours * number)
    return RawEmail(f"<{sender}{number}@x>", subject, sender, [to], [], [], day, body)


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_database(mails_of_seven(), tmp_path_factory.mktemp("db") / "mail.db").db


@pytest.fixture(scope="module")
def scenarios(db: Path) -> list[Scenario]:
    return generate(db, limit=400)


def split_of(scenarios: list[Scenario]) -> dict[str, str | None]:
    return {s.inbox_address: s.split for s in scenarios}


def test_every_source_can_be_read_and_no_question_gives_its_answer_away(db: Path, scenarios: list[Scenario]) -> None:
    assert missing_ids(scenarios, db) == ([], [], len(scenarios))
    assert not [s for s in scenarios if s.kind != "count_in_month" and s.answer.lower() in s.question.lower()]


def test_answers_hold_against_plain_sql(db: Path, scenarios: list[Scenario]) -> None:
    """Re-derives answers from the tables alone, by the words of the question."""
    connection = sqlite3.connect(db)
    checked: Counter[str | None] = Counter()
    for s in scenarios:
        seen = connection.execute(
            """SELECT message_id, subject, from_address, date, body FROM emails WHERE date < :until
            AND (from_address = :me OR id IN (SELECT email_id FROM recipients WHERE recipient_address = :me))""",
            {"until": s.query_date, "me": s.inbox_address},
        ).fetchall()
        subject = next((m[1].removeprefix("Re: ") for m in seen if m[1].removeprefix("Re: ") in s.question), None)
        about = [m for m in seen if subject is not None and m[1].endswith(subject)]
        checked[s.kind] += 1
        if s.kind == "sender":
            assert [m[2].partition("@")[0].replace(".", " ").title() for m in about] == [s.answer], s
        elif s.kind in ("date_received", "date_sent"):
            [(sender, date)] = [(m[2], datetime.fromisoformat(m[3])) for m in about if m[0] in s.message_ids]
            assert s.answer == f"{date:%B} {date.day}, {date.year}", s
            assert len({m[0] for m in about if m[2] == sender}) == 1, s
        elif s.kind in ("amount", "phone", "percentage"):
            assert [m[0] for m in about if s.answer in m[4]] == s.message_ids, s
    assert set(checked) >= {"sender", "date_received", "date_sent", "amount", "phone"}


def test_splits_share_neither_inbox_nor_source(scenarios: list[Scenario]) -> None:
    inboxes, sources = defaultdict(set), defaultdict(set)
    for s in scenarios:
        inboxes[s.inbox_address].add(s.split)
        for message_id in s.message_ids:
            sources[message_id].add(s.split)
    assert set().union(*inboxes.values()) == {"train", "val", "test"}
    assert all(len(splits) == 1 for splits in [*inboxes.values(), *sources.values()])


def test_kinds_are_balanced_and_no_mail_is_asked_to_death(db: Path, scenarios: list[Scenario]) -> None:
    kinds = Counter(s.kind for s in scenarios)
    assert len(scenarios) == 400 and len(kinds) >= 12
    assert max(kinds.values()) <= 2 * sorted(kinds.values())[len(kinds) // 2]
    assert max(Counter(m for s in scenarios for m in s.message_ids).values()) <= 2
    assert len({(s.inbox_address, s.question) for s in scenarios}) == len({s.id for s in scenarios}) == 400
    assert set(kinds) == {s.kind for s in generate(db, limit=100)}  # a small set has every kind too
    counts = sorted(Counter(s.kind for s in generate(db)).values(), reverse=True)
    assert sum(counts) < 6000 and counts[0] <= counts[len(counts) // 4] + 2  # nor does a common kind swamp the rest


def test_the_seed_decides(db: Path, scenarios: list[Scenario]) -> None:
    assert generate(db, limit=400, seed=42) == scenarios
    other = generate(db, limit=400, seed=7)
    assert other != scenarios and split_of(other) == split_of(scenarios)


def test_named_inboxes_alone_are_asked_about(db: Path) -> None:
    chosen = generate(db, inboxes=["Ana.Roebuck@x.org"], limit=50)
    assert {(s.inbox_address, s.split) for s in chosen} == {("ana.roebuck@x.org", "test")}
    with pytest.raises(UsageError, match=r"No email is from or to zoe@x\.org\. .*Its largest mailboxes: \S+@"):
        generate(db, inboxes=["zoe@x.org"])


def test_names_as_written_and_machine_mail_only_if_wanted(tmp_path: Path) -> None:
    names = {"bo.lindqvist@x.org": "Lindqvist, Bo Åge", "ana.roebuck@x.org": "Ana Roebuck"}
    mails = [
        replace(
            mail,
            names={each: names[each] for each in [mail.from_address, *mail.to] if each in names},
            machine="newsletter" if mail.from_address.startswith("cy") else "",
        )
        for mail in mails_of_seven()
    ]
    db = build_database(mails, tmp_path / "mail.db").db
    asked = {on: generate(db, limit=400, names=on) for on in (True, False)}
    texts = {on: "\n".join(f"{each.question} {each.answer}" for each in asked[on]) for on in asked}
    assert "Bo Åge Lindqvist" in texts[True] and "Bo Lindqvist" not in texts[True]
    assert "Bo Lindqvist" in texts[False] and "Åge" not in texts[False]
    machine = {mail.message_id for mail in mails if mail.machine}
    assert machine.isdisjoint(source for each in asked[False] for source in each.message_ids if not each.needs_all)
    everything = generate(db, limit=400, machine_mail=True)
    assert not machine.isdisjoint(source for each in everything for source in each.message_ids)
    with opened(db) as connection:
        counted = MailReader(connection).machine_mail(["ana.roebuck@x.org"])
    assert list(counted) == ["newsletter"] and 0 < counted["newsletter"] < len(machine)


def test_of_three_unequal_mailboxes_the_largest_is_trained_on(tmp_path: Path) -> None:
    pairs = enumerate(product(PLACES.split(), ("uma.kerr@x.org", "vic.lund@x.org")))
    alone = [sent(n, f"window {place}", sender, hours=24) for n, (place, sender) in pairs]
    database = build_database([*mails_of_seven(), *alone], tmp_path / "unequal.db").db
    three = ["uma.kerr@x.org", "zoe@x.org", "ana.roebuck@x.org"]
    made = generate(database, inboxes=three)
    assert split_of(made) == {"ana.roebuck@x.org": "train", "zoe@x.org": "test", "uma.kerr@x.org": "val"}
    counts = Counter(s.split for s in made)
    assert counts["train"] > counts["test"] > counts["val"] > 0
    for limit, seed in ((9, 42), (6000, 7)):  # few questions of a set, or others, are split as all of them
        assert split_of(generate(database, inboxes=three, limit=limit, seed=seed)).items() <= split_of(made).items()


def test_not_mails_but_questions_make_a_mailbox_large(tmp_path: Path) -> None:
    # Two hundred mails that cannot be told apart give next to no questions.
    alike = [sent(n, "Daily figures", "robot@x.org", "ned@x.org", hours=1, body="None.") for n in range(200)]
    pairs = enumerate(product(THINGS.split(), ("uma.kerr@x.org", "vic.lund@x.org")))
    told = [sent(n, f"{thing} {sender[:3]}", sender) for n, (thing, sender) in pairs]
    made = generate(build_database([*alike, *told], tmp_path / "m.db").db, inboxes=["ned@x.org", "zoe@x.org"])
    assert [inbox for inbox, split in split_of(made).items() if split == "train"] == ["zoe@x.org"]


def test_one_mailbox_that_may_be_shared_is_split_by_subject(db: Path) -> None:
    made = generate(db, inboxes=["ana.roebuck@x.org"], allow_shared=True)
    counts = Counter(s.split for s in made)
    assert set(counts) == {"train", "val", "test"} and counts["train"] > counts["test"] > counts["val"]
    splits_of_source = defaultdict(set)
    for s in made:
        if len(s.message_ids) == 1:  # an answer (<r7@x.org>) has the subject of the mail it answers (<7@x.org>)
            splits_of_source[s.message_ids[0].replace("<r", "<")].add(s.split)
    assert [splits for splits in splits_of_source.values() if len(splits) > 1] == []
    three = ["ana.roebuck@x.org", "bo.lindqvist@x.org", "cy.marshall@x.org"]
    assert generate(db, inboxes=three, allow_shared=True) == generate(db, inboxes=three)


def test_the_command_writes_the_file_and_counts_it(db: Path, tmp_path: Path) -> None:
    from emailrl.cli.app import app

    out = tmp_path / "q.jsonl"
    arguments = ["gen-questions", "--db", str(db), "--out", str(out), "--limit", "60", "--seed", "1", "--json"]
    done = CliRunner().invoke(app, arguments)
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["out"] == str(out) and report["questions"] == 60 == sum(report["kinds"].values())
    assert sum(report["splits"].values()) == 60 == len(list(read_jsonl(out)))
    before = out.read_bytes()
    for more, error in (([], "exists"), (["--overwrite", "--inbox", "nobody@x.org"], "or to nobody@x.org")):
        refused = CliRunner().invoke(app, [*arguments, *more]).exception
        assert isinstance(refused, UsageError) and error in refused.message and out.read_bytes() == before
    assert CliRunner().invoke(app, [*arguments, "--overwrite"]).exit_code == 0
    assert out.read_bytes() == before
    loaded = read_questions(out, DataSettings()).of(None, limit=None, seed=1)  # which leaves out none of it
    assert (loaded.dropped, loaded.notes, len(loaded.scenarios)) == ({}, [], 60)


def test_small_and_wrong_databases_end_in_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("hello")
    with pytest.raises(UsageError, match="cannot be read as a mail database"):
        generate(tmp_path / "text.db")
    tiny = build_database([sent(1, "Hi", "a@x.org", body="")], tmp_path / "tiny.db").db
    with pytest.raises(UsageError, match="No address has 30 emails"):
        generate(tiny)
    with pytest.raises(EmailRLError, match="No email yields a question"):
        generate(tiny, inboxes=["a@x.org"])


@pytest.mark.parametrize(("subject", "asked"), [("Family lunch on Sunday", True), ("Lind family lunch", False)])
def test_a_question_whose_words_hold_its_answer_is_not_asked(tmp_path: Path, subject: str, asked: bool) -> None:
    made = generate(build_database([sent(1, subject, BO)], tmp_path / "m.db").db, inboxes=["zoe@x.org"])
    assert ("sender" in {s.kind for s in made}) is asked


@pytest.mark.parametrize(
    ("sender", "subject", "body", "copies", "realism"),
    [
        (BO, "Pier survey results", "Fine.", 1, 0.7),  # as the kind has it
        ("daemon@x.org", "Pier survey results", "Fine.", 1, 0.5),  # no person's address
        (BO, "Pier survey 17", "Fine.", 4, 0.7),
        (BO, "Pier survey 17", "Fine.", 5, 0.5),  # a series
        (BO, "Pier survey results", "Fine.", 5, 0.7),  # a thread is none
        (BO, "Pier 17 / 4711-0815", "Fine.", 1, 0.5),  # digits and signs
        (BO, "Pier survey results", "Unsubscribe here.", 1, 0.3),
        (BO, "PIER SURVEY RESULTS", "Fine.", 1, 0.6),
        ("daemon@x.org", "PIER 17 / 4711-0815", "Unsubscribe here.", 5, 0.1),  # never below
    ],
)
def test_how_realistic_a_question_is(sender: str, subject: str, body: str, copies: int, realism: float) -> None:
    kind = next(kind for kind in KINDS if kind.name == "sender")
    assert kind.realism == 0.7
    subjects = [subject.replace("17", str(16 + n)) for n in range(1, copies + 1)]
    mails = [mail(n, f"05-0{n} 09:00", sender, ANA, text, body) for n, text in enumerate(subjects, 1)]
    assert realism_of(box(*mails), kind, mails[0]) == pytest.approx(realism, abs=1e-9)


def test_no_question_takes_more_mails_than_may_be_its_sources(db: Path, scenarios: list[Scenario]) -> None:
    assert max(len(s.message_ids) for s in scenarios) > 2
    assert max(len(s.message_ids) for s in generate(db, limit=400, max_source_mails=2)) == 2


@pytest.mark.parametrize("year", [1, 9999])
def test_a_mail_of_a_year_that_is_wrong_is_no_part_of_a_question(tmp_path: Path, year: int) -> None:
    day, mails = datetime(year, 1 if year == 1 else 12, 3, tzinfo=UTC), mails_of_seven()
    wrong = [
        replace(each, message_id=f"<w{n}@x>", subject=f"old {each.subject}", date=day) for n, each in enumerate(mails)
    ]
    found = generate(build_database([*mails, *wrong], tmp_path / "mail.db").db, kinds=KINDS, limit=100)
    assert len(found) == 100 and {each.query_date[:3] for each in found} == {"200"}
    assert not {each for scenario in found for each in scenario.message_ids} & {each.message_id for each in wrong}
