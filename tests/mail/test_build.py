"""Building the database: filters in ART-E's order, nothing lost in silence, nothing half-built left behind."""

from __future__ import annotations

import dataclasses
import itertools
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mail.mails import only, rows, stored_emails

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.mail import database_fingerprint
from emailrl.mail.build import build_database
from emailrl.mail.sources import RawEmail, Skipped

Make = Callable[..., RawEmail]


def test_rows_as_art_e_has_them(tmp_path: Path, email: Make) -> None:
    people = {"to": ("a@x", "b@x", "a@x"), "cc": ("a@x",), "bcc": ("c@x",)}
    mail = email(1, subject="S", body="B", day="2001-05-01 07:08:09", **people)
    report = build_database([mail], tmp_path / "new" / "mail.db")
    assert (report.emails, report.recipients, report.skipped) == (1, 4, {})
    assert report.db == (tmp_path / "new" / "mail.db").resolve()
    assert rows(report.db, "SELECT id, message_id, subject, from_address, date, body, file_name FROM emails") == [
        (1, "<1@x>", "S", "ann@x.org", "2001-05-01 07:08:09", "B", "f/1.")
    ]
    recipients = [(1, "a@x", "to"), (1, "b@x", "to"), (1, "a@x", "cc"), (1, "c@x", "bcc")]
    assert rows(report.db, "SELECT * FROM recipients") == recipients


def test_filters_in_their_order(tmp_path: Path, email: Make) -> None:
    long, many = "x" * 5001, tuple(f"r{n}@x" for n in range(31))
    report = build_database(
        [
            email(1, body="x" * 5000), email(2, body=long), email(3, body=long, to=many), email(4, to=many),
            email(5, to=many[:10], cc=many[10:20], bcc=many[20:30]), email(6, to=("a@x",) * 31),
            email(7, subject="Subject 1", body="x" * 5000, day="2002-01-01", to=("z@x",)),
            email(8, subject="Subject 1", body="x" * 5000, sender="other@x"), email(8, body="same id"),
            Skipped("empty", "f"),
        ],
        tmp_path / "mail.db",
    )  # fmt: skip
    assert report.skipped == {"long_body": 2, "many_recipients": 2, "duplicate": 1, "duplicate_id": 1, "empty": 1}
    assert rows(report.db, "SELECT message_id FROM emails ORDER BY message_id") == [("<1@x>",), ("<5@x>",), ("<8@x>",)]
    assert report.emails == 3


def test_headers_without_end_are_mended_and_counted(tmp_path: Path, email: Make) -> None:
    mails = [
        email(1, subject="s" * 1000, sender="a" * 1000, to=("b" * 1000,)),
        email(2, subject="s" * 1000 + "t" * 10_000_000, to=("b@x",)),
        email(3, sender="a" * 1001, to=("b@x", "c" * 1001), cc=("d" * 1001,), bcc=("e@x",)),
        *(dataclasses.replace(email(n, to=()), message_id=f"<{'i' * 200_000}{n}@x>") for n in (4, 5)),
    ]
    db = tmp_path / "mail.db"
    report = build_database(mails, db)
    assert (report.emails, report.skipped) == (5, {})
    assert report.repaired == {"long_subject": 1, "long_address": 1, "long_message_id": 2}
    stored = {mail.file_name: mail for mail in stored_emails(db)}
    assert stored["f/1."] == mails[0]
    assert stored["f/2."].subject == "s" * 1000 and stored["f/2."].to == ["b@x"]
    third = stored["f/3."]
    assert (third.from_address, third.to, third.cc, third.bcc) == ("", ["b@x"], [], ["e@x"])
    made_up = {stored[f"f/{n}."].message_id for n in (4, 5)}
    assert len(made_up) == 2 and all(len(i) < 60 and i.endswith("@made-up.emailrl>") for i in made_up)
    assert build_database(mails, db, append=True).emails == 0, "the same mails are cut in the same way"


def test_an_existing_database_needs_a_flag(tmp_path: Path, email: Make) -> None:
    db = tmp_path / "mail.db"
    build_database([email(1)], db)
    content = db.read_bytes()
    seen: list[int] = []
    with pytest.raises(UsageError, match=r"exists.*--overwrite.*--append"):
        build_database((seen.append(1) or email(2) for _ in range(1)), db)
    assert not seen, "nothing is read before the refusal"
    with pytest.raises(UsageError, match="mutually exclusive"):
        build_database([email(2)], db, overwrite=True, append=True)
    assert db.read_bytes() == content
    assert build_database([email(2)], db, overwrite=True).emails == 1
    assert rows(db, "SELECT message_id FROM emails") == [("<2@x>",)]


def test_limit_counts_stored_mails_and_stops_reading(tmp_path: Path, email: Make) -> None:
    stream = (email(number) if number % 2 else Skipped("empty") for number in itertools.count(1))
    report = build_database(stream, tmp_path / "mail.db", limit=3)
    assert (report.emails, report.skipped) == (3, {"empty": 2})
    for mails, said in (([], "no message was found"), ([Skipped("not_mail")] * 2, "2 not_mail")):
        with pytest.raises(UsageError, match=said):
            build_database(mails, tmp_path / "none.db")
    assert only(tmp_path) == ["mail.db"]


def test_the_fingerprint_tells_content_not_order(tmp_path: Path, email: Make) -> None:
    def built(name: str, mails: list[RawEmail]) -> str:
        build_database(mails, tmp_path / name, append=True)
        return database_fingerprint(tmp_path / name)

    mails = [email(1), email(2), email(3)]
    first = built("a", mails)
    assert built("b", mails[::-1]) == first
    others = [email(3, day="2001-05-02"), email(3, to=("c@x",)), email(3, body="other"), email(4, subject="Subject 3")]
    assert first not in {built(f"c{n}", [*mails[:2], *other]) for n, other in enumerate([[], *([o] for o in others)])}
    assert built("g", mails[:1]) != built("g", mails[1:]) == first


@pytest.mark.parametrize("error", [EmailRLError("broke off"), KeyboardInterrupt(), ValueError("a bug")])
def test_a_build_that_fails_leaves_the_old_database(tmp_path: Path, email: Make, error: BaseException) -> None:
    def failing() -> Iterator[RawEmail]:
        yield from (email(number) for number in range(1500))
        raise error

    db = tmp_path / "mail.db"
    with pytest.raises(type(error)):
        build_database(failing(), db)
    assert only(tmp_path) == []
    build_database([email(1)], db)
    content = db.read_bytes()
    with pytest.raises(type(error)):
        build_database(failing(), db, overwrite=True)
    assert only(tmp_path) == ["mail.db"] and db.read_bytes() == content


def test_memory_stays_flat_and_progress_counts_up_in_both_phases(tmp_path: Path, email: Make) -> None:
    body, calls = "word " * 900, list[tuple[str, int, int | None]]()
    mails = (email(n, subject=f"s{n}", body=f"{n} {body}") for n in range(7500))
    tracemalloc.start()
    build_database(mails, tmp_path / "mail.db", progress=lambda *call: calls.append(call))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20_000_000 < 7500 * len(body), "7,500 mails of 4.5 kB are 34 MB"
    read = [("read", number, None) for number in range(1000, 8000, 1000)]
    assert calls == [*read, ("read", 7500, 7500), ("index", 0, 7500), ("index", 7500, 7500)]
