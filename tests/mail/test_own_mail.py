"""A person's own mail: kept whole where a research corpus is filtered as ART-E did, and not stored twice."""

from __future__ import annotations

import itertools
import mailbox
from collections.abc import Callable
from email.message import EmailMessage
from pathlib import Path

import pytest
from mail.mails import lines, make_tar, mbox, row, rows

from emailrl.base.errors import UsageError
from emailrl.mail.build import BuildReport, build_database
from emailrl.mail.sources import open_source
from emailrl.settings import StoreSettings


def mail(number: int, *, body: str = "Hello.\n", to: str = "bob@x.org") -> bytes:
    return (
        f"Message-ID: <{number}@x>\nDate: {number} May 2001 10:00:00 +0000\nFrom: ann@x.org\nTo: {to}\n"
        f"Subject: s{number}\n\n{body}"
    ).encode()


MAILS = [
    mail(1),
    mail(2, body=("x" * 72 + "\n") * 70),  # 5110 characters
    mail(3, to=", ".join(f"r{n}@x.org" for n in range(31))),
]
FILTERED = {"long_body": 1, "many_recipients": 1}


def in_files(folder: Path, *names: str) -> Path:
    for name, content in zip(names, MAILS, strict=True):
        path = folder / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder / "in"


def in_one(folder: Path, content: bytes) -> Path:
    (folder / "mail.bin").write_bytes(content)
    return folder / "mail.bin"


OWN = {
    "mbox": lambda folder: in_one(folder, mbox(*MAILS)),
    "maildir": lambda folder: in_files(folder, *(f"cur/98871{n}.M1P2.host:2,S" for n in range(3))),
    "eml": lambda folder: in_files(folder, "1.eml", "2.eml", "3.eml"),
    "mbox in a tar": lambda folder: in_one(folder, make_tar({"Takeout/All mail.mbox": mbox(*MAILS)})),
}
ROWS = (row(1), row(2, body="x" * 5001), row(3, to=["r@x.org"] * 31))
TABLE = b"file,message\n" + b"".join(b'a mail,"%b"\n' % content for content in MAILS)
RESEARCH = {
    "CMU's tree": lambda folder: in_files(folder, *(f"allen-p/inbox/{n}." for n in range(3))),
    "CMU's tar": lambda folder: in_one(folder, make_tar({f"allen-p/inbox/{n}.": m for n, m in enumerate(MAILS)})),
    "table": lambda folder: in_one(folder, TABLE),
    "rows": lambda folder: in_one(folder, lines(*ROWS)),
}


def built(source: Path, db: Path, settings: StoreSettings | None = None, *, append: bool = False) -> BuildReport:
    return build_database(open_source(source), db, settings=settings, append=append, workers=0)


@pytest.mark.parametrize("kind", OWN)
def test_own_mail_is_kept_whole_unless_a_setting_says_otherwise(tmp_path: Path, kind: str) -> None:
    source = OWN[kind](tmp_path)
    report = built(source, tmp_path / "all.db")
    assert (report.emails, report.skipped) == (3, {})
    given = built(source, tmp_path / "art_e.db", StoreSettings(max_body_chars=5000, max_recipients=30))
    assert (given.emails, given.skipped) == (1, FILTERED)
    with pytest.raises(UsageError, match="long_body") as caught:
        built(source, tmp_path / "none.db", StoreSettings(max_body_chars=5, max_recipients=30))
    assert "MAX_BODY_CHARS=0 keeps long_body." in caught.value.hint


@pytest.mark.parametrize("kind", RESEARCH)
def test_research_corpora_are_filtered_as_art_e_did_unless_a_setting_says_otherwise(tmp_path: Path, kind: str) -> None:
    source = RESEARCH[kind](tmp_path)
    report = built(source, tmp_path / "art_e.db")
    assert (report.emails, report.skipped) == (1, FILTERED)
    longer = built(source, tmp_path / "longer.db", StoreSettings(max_body_chars=0))
    assert (longer.emails, longer.skipped) == (2, {"many_recipients": 1})
    assert built(source, tmp_path / "all.db", StoreSettings(max_body_chars=0, max_recipients=0)).emails == 3


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
    bodies = ("a\n b\n", "a\nb\n", "a b\n", "a\n\nb\n")
    mails = [f"From: ann@x.org\nTo: bob@x.org\nSubject: s\n\n{body}".encode() for body in bodies]
    source = in_one(tmp_path, make_tar({f"{number}.eml": content for number, content in enumerate(mails)}))
    assert built(source, tmp_path / "m.db").emails == 4


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(("dedupe", "kept"), [(None, 12), (False, 12), (True, 1)])
def test_a_notice_that_comes_every_month_is_kept(tmp_path: Path, named: bool, dedupe: bool | None, kept: int) -> None:
    notices = []
    for month in ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"):
        message_id = f"Message-ID: <{month}@bank>\n" if named else ""
        head = f"{message_id}Date: 1 {month} 2001 10:00:00 +0000\nFrom: info@bank.org\nTo: ann@x.org\n"
        notices.append(f"{head}Subject: Your statement\n\nIt is ready.\n".encode())
    source, settings = in_one(tmp_path, mbox(*notices)), StoreSettings(dedupe=dedupe)
    assert built(source, tmp_path / "m.db", settings).emails == kept
    assert built(source, tmp_path / "m.db", settings, append=True).emails == 0


def test_duplicates_of_a_research_corpus_are_art_es(tmp_path: Path) -> None:
    same, longer = mail(1), mail(1, body="Hello. \n").replace(b"<1@x>", b"<2@x>")
    three = (same, longer, same.replace(b"<1@x>", b"<3@x>"))
    tar = in_one(tmp_path, make_tar({f"allen-p/inbox/{n}.": content for n, content in enumerate(three, 1)}))
    assert built(tar, tmp_path / "m.db").skipped == {"duplicate": 1}


def test_a_device_that_reuses_its_message_id_loses_no_mail(tmp_path: Path) -> None:
    def read(*times: int, append: bool = False, sync: bool = False) -> BuildReport:
        source = open_source(in_one(tmp_path, mbox(*(scan(time) for time in times))))
        return build_database(source, tmp_path / "m.db", append=append, sync=sync, workers=0)

    def scan(hour: int, body: str = "") -> bytes:
        date = f"1 May 2001 {hour}:00:00 +0000"
        text = f"Message-ID: <scan@printer>\nDate: {date}\nFrom: printer@x.org\nTo: ann@x.org\nSubject: Scan\n"
        text += "" if body.startswith("Content-") else "\n"
        return f"{text}{body or f'Page {hour}.'}\n".encode()

    report = read(10, 11, 12, 11)
    assert (report.emails, report.skipped, report.repaired) == (3, {"duplicate_id": 1}, {"reused_message_id": 2})
    again = read(12, 11, 13, 10, append=True)
    assert (again.added, again.skipped) == (1, {"duplicate_id": 3})
    assert read(10, 11, 12, 13, sync=True).added == 0
    (tmp_path / "m.db").unlink()
    read(10, 11, 12, 13)
    names = {body: key for key, body in rows(tmp_path / "m.db", "SELECT message_id, body FROM emails")}
    left = read(13, 12, 11, sync=True)
    assert (left.added, left.removed) == (0, 1), "the others keep their names"
    assert names.pop("Page 10.\n") == "<scan@printer>"
    assert {body: key for key, body in rows(tmp_path / "m.db", "SELECT message_id, body FROM emails")} == names
    # A list's footer changes the text of a copy, some programs the date: one of them tells that it is a copy.
    copies = mbox(scan(10), scan(10, "Page 10.\n-- \nA list"), scan(14, "Page 10."))
    report = build_database(open_source(in_one(tmp_path, copies)), tmp_path / "copies.db", workers=0)
    assert (report.emails, report.skipped) == (1, {"duplicate_id": 2})
    # The text of a scanner's mails is always the same, but not the name of the file.
    named = [(time, f"Content-Disposition: attachment; filename=a{time}.pdf\n\n%PDF") for time in (10, 11, 12)]
    scans = mbox(*itertools.starmap(scan, named))
    report = build_database(open_source(in_one(tmp_path, scans)), tmp_path / "scans.db", workers=0)
    assert report.emails == 3
