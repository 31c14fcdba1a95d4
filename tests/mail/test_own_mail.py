"""A person's own mail: kept whole where a research corpus is filtered as ART-E did, and not stored twice."""

from __future__ import annotations

import csv
import io
import json
import mailbox
import random
from collections.abc import Callable
from email.message import EmailMessage
from pathlib import Path

import pytest
from mail.mails import make_tar, stored_emails

from emailrl.base.errors import UsageError
from emailrl.mail import database_fingerprint
from emailrl.mail.build import BuildReport, build_database
from emailrl.mail.sources import open_source
from emailrl.settings import StoreSettings

LONG = "x" * 72 + "\n"


def mail(number: int, *, body: str = "Hello.\n", to: str = "bob@x.org") -> bytes:
    return (
        f"Message-ID: <{number}@x>\nDate: {number} May 2001 10:00:00 +0000\nFrom: ann@x.org\nTo: {to}\n"
        f"Subject: s{number}\n\n{body}"
    ).encode()


MAILS = [
    mail(1),
    mail(2, body=LONG * 70),  # 5110 characters
    mail(3, to=", ".join(f"r{n}@x.org" for n in range(31))),
]
FILTERED = {"long_body": 1, "many_recipients": 1}


def as_mbox(folder: Path) -> Path:
    (folder / "mail.mbox").write_bytes(
        b"".join(b"From ann@x.org Tue May  1 10:00:00 2001\n" + m + b"\n" for m in MAILS)
    )
    return folder / "mail.mbox"


def as_maildir(folder: Path) -> Path:
    for number, content in enumerate(MAILS):
        path = folder / "Maildir" / "cur" / f"98871{number}.M1P2.host:2,S"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder / "Maildir"


def as_eml(folder: Path) -> Path:
    (folder / "saved").mkdir()
    for number, content in enumerate(MAILS):
        (folder / "saved" / f"{number}.eml").write_bytes(content)
    return folder / "saved"


def as_emlx(folder: Path) -> Path:
    (folder / "Messages").mkdir()
    for number, content in enumerate(MAILS):
        (folder / "Messages" / f"{number}.emlx").write_bytes(b"%d\n" % len(content) + content + b"<plist/>")
    return folder / "Messages"


def as_mbox_in_a_tar(folder: Path) -> Path:
    (folder / "takeout.tar").write_bytes(make_tar({"Takeout/All mail.mbox": as_mbox(folder).read_bytes()}))
    return folder / "takeout.tar"


def as_cmu_tree(folder: Path) -> Path:
    for number, content in enumerate(MAILS):
        path = folder / "tree" / "allen-p" / "inbox" / f"{number}."
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder / "tree"


def as_cmu_tar(folder: Path) -> Path:
    members = {f"maildir/allen-p/inbox/{number}.": content for number, content in enumerate(MAILS)}
    (folder / "enron.tar").write_bytes(make_tar(members))
    return folder / "enron.tar"


def as_table(folder: Path) -> Path:
    text = io.StringIO()
    rows = csv.writer(text)
    rows.writerow(["file", "message"])
    rows.writerows([f"mail {number}", content.decode()] for number, content in enumerate(MAILS))
    (folder / "emails.csv").write_text(text.getvalue())
    return folder / "emails.csv"


def columns(folder: Path) -> list[dict[str, object]]:
    return [
        {
            "message_id": m.message_id, "subject": m.subject, "from": m.from_address, "to": m.to,
            "date": m.date and m.date.isoformat(), "body": m.body, "file_name": m.file_name, "cc": [], "bcc": [],
        }
        for m in open_source(as_mbox(folder))
        if not hasattr(m, "reason")
    ]  # fmt: skip


def as_rows(folder: Path) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in columns(folder)))
    return folder / "rows.jsonl"


def as_parquet(folder: Path) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(columns(folder)), folder / "rows.parquet")
    return folder / "rows.parquet"


OWN = [as_mbox, as_maildir, as_eml, as_emlx, as_mbox_in_a_tar]
RESEARCH = [as_cmu_tree, as_cmu_tar, as_table, as_rows, as_parquet]
Written = Callable[[Path], Path]


def built(source: Path, db: Path, settings: StoreSettings | None = None, *, append: bool = False) -> BuildReport:
    return build_database(open_source(source), db, settings=settings, append=append, workers=0)


@pytest.mark.parametrize("written", OWN)
def test_own_mail_is_kept_whole_unless_a_setting_says_otherwise(tmp_path: Path, written: Written) -> None:
    source = written(tmp_path)
    report = built(source, tmp_path / "all.db")
    assert (report.emails, report.skipped) == (3, {})
    given = built(source, tmp_path / "art_e.db", StoreSettings(max_body_chars=5000, max_recipients=30))
    assert (given.emails, given.skipped) == (1, FILTERED)


@pytest.mark.parametrize("written", RESEARCH)
def test_research_corpora_are_filtered_as_art_e_did_unless_a_setting_says_otherwise(
    tmp_path: Path, written: Written
) -> None:
    source = written(tmp_path)
    report = built(source, tmp_path / "art_e.db")
    assert (report.emails, report.skipped) == (1, FILTERED)
    longer = built(source, tmp_path / "longer.db", StoreSettings(max_body_chars=0))
    assert (longer.emails, longer.skipped) == (2, {"many_recipients": 1})
    assert built(source, tmp_path / "all.db", StoreSettings(max_body_chars=0, max_recipients=0)).emails == 3


def test_where_all_is_filtered_the_error_names_the_setting(tmp_path: Path) -> None:
    settings = StoreSettings(max_body_chars=50, max_recipients=30)
    (tmp_path / "only").mkdir()
    for name, content in (("long.eml", MAILS[1]), ("many.eml", MAILS[2])):
        (tmp_path / "only" / name).write_bytes(content)
    with pytest.raises(UsageError, match="1 long_body, 1 many_recipients") as caught:
        built(tmp_path / "only", tmp_path / "m.db", settings)
    assert "MAX_BODY_CHARS=0 keeps long_body. MAX_RECIPIENTS=0 keeps many_recipients." in caught.value.hint


ENDINGS: list[Callable[[bytes], bytes]] = [
    lambda raw: raw,
    lambda raw: raw + b"\n\n",
    lambda raw: raw.rstrip(b"\n"),
    lambda raw: raw.replace(b"\n", b"\r\n"),
    lambda raw: raw.replace(b".\n", b".  \n"),
]


def without_ids(number: int) -> bytes:
    message = EmailMessage()
    message["Date"] = f"{number % 28 + 1} May 2001 10:00:00 +0000"
    message["From"], message["To"], message["Subject"] = "ann@x.org", "bob@x.org", f"Plan {number}"
    message.set_content(f"First line of {number}.\n\nSecond line.\n")
    return message.as_bytes()


@pytest.mark.parametrize("dedupe", [True, False, None])
def test_mail_that_comes_again_from_another_archive_is_not_stored_again(tmp_path: Path, dedupe: bool | None) -> None:
    mails = [without_ids(number) for number in range(20)]
    box = mailbox.mbox(tmp_path / "once.mbox")
    for content in mails:
        box.add(content)
    box.close()
    settings = StoreSettings(dedupe=dedupe)
    assert built(tmp_path / "once.mbox", tmp_path / "m.db", settings).emails == 20
    for way, ending in enumerate(ENDINGS):
        again = tmp_path / f"again-{way}"
        again.mkdir()
        for number, content in enumerate(mails):
            (again / f"{number}.eml").write_bytes(ending(content))
        report = built(again, tmp_path / "m.db", settings, append=True)
        assert (report.emails, sum(report.skipped.values())) == (0, 20), way


def test_an_indented_line_or_another_word_is_another_mail(tmp_path: Path) -> None:
    bodies = ["a\n b\n", "a\nb\n", "a b\n", "a\n\nb\n"]
    folder = tmp_path / "mails"
    folder.mkdir()
    for number, body in enumerate(bodies):
        (folder / f"{number}.eml").write_text(f"From: ann@x.org\nTo: bob@x.org\nSubject: s\n\n{body}")
    assert built(folder, tmp_path / "m.db").emails == 4


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(("dedupe", "kept"), [(None, 12), (False, 12), (True, 1)])
def test_a_notice_that_comes_every_month_is_kept(tmp_path: Path, named: bool, dedupe: bool | None, kept: int) -> None:
    box = mailbox.mbox(tmp_path / "bank.mbox")
    for month in ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"):
        message_id = f"Message-ID: <{month}@bank>\n" if named else ""
        head = f"{message_id}Date: 1 {month} 2001 10:00:00 +0000\nFrom: info@bank.org\nTo: ann@x.org\n"
        box.add(f"{head}Subject: Your statement\n\nIt is ready.\n".encode())
    box.close()
    settings = StoreSettings(dedupe=dedupe)
    assert built(tmp_path / "bank.mbox", tmp_path / "m.db", settings).emails == kept
    assert built(tmp_path / "bank.mbox", tmp_path / "m.db", settings, append=True).emails == 0


def test_duplicates_of_a_research_corpus_are_art_es(tmp_path: Path) -> None:
    same, longer = mail(1), mail(1, body="Hello. \n").replace(b"<1@x>", b"<2@x>")
    repeat = same.replace(b"<1@x>", b"<3@x>")
    tar = tmp_path / "cmu.tar"
    tar.write_bytes(make_tar({f"allen-p/inbox/{n}.": content for n, content in enumerate((same, longer, repeat), 1)}))
    report = built(tar, tmp_path / "m.db")
    assert (report.emails, report.skipped) == (2, {"duplicate": 1})


def test_any_history_of_appends_equals_one_build_whatever_ends_the_lines(tmp_path: Path) -> None:
    rng = random.Random(4)
    for trial in range(12):
        folder = tmp_path / str(trial)
        folder.mkdir()
        parts = []
        for part in range(3):
            parts.append(folder / f"{part}")
            parts[-1].mkdir()
            for place in range(6):
                name = rng.choice([f"{place}.eml", f"{place}."])  # own mail and a research corpus's, mixed
                (parts[-1] / name).write_bytes(rng.choice(ENDINGS)(without_ids(rng.randrange(8))))
        build_database((m for part in parts for m in open_source(part)), folder / "once.db")
        for part in parts:
            built(part, folder / "steps.db", append=True)
        assert list(stored_emails(folder / "steps.db")) == list(stored_emails(folder / "once.db"))
        assert database_fingerprint(folder / "steps.db") == database_fingerprint(folder / "once.db")
