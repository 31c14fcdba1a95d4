"""Outlook's files: data files through readpst, messages as the emails that they hold."""

from __future__ import annotations

import os
import shutil
import struct
import sys
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path

import pytest
from mail.mails import names

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.mail import open_mailbox
from emailrl.mail.build import build_database
from emailrl.mail.sources import RawEmail, Skipped, open_source
from emailrl.mail.sources.outlook import MESSAGE_START, email_of
from emailrl.settings import StoreSettings

olefile = pytest.importorskip("olefile")

READPST = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
cd "$2" && test -z "$(ls)" || exit 9
mkdir -p 'Me/Inbox' 'Me/Deleted Items'
printf 'From: "Ann Lee" <ann@x.org>\\nTo: me@x.org\\nMessage-ID: <1@x>\\n\\nSigned.\\n' > Me/Inbox/1.eml
printf 'From: "Jo Ann Smith" <MAILER-DAEMON>\\nTo: me@x.org\\nMessage-ID: <2@x>\\n\\nOld.\\n' > 'Me/Deleted Items/1.eml'
echo 'Reading.'; echo 'Block is broken' >&2; exit $(cat "$3.code")
"""


@pytest.fixture
def pst(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a data file, and a stand-in for readpst, which ends with the code in the file beside it."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "readpst").write_text(READPST)
    (tmp_path / "bin" / "readpst").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "mine.pst").write_bytes(b"!BDN and more")
    (tmp_path / "in" / "mine.pst.code").write_text("0")
    return tmp_path / "in" / "mine.pst"


def test_a_data_file_is_read_by_readpst(pst: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    db, settings = tmp_path / "out" / "mail.db", StoreSettings(keep_junk=False)
    left = tmp_path / "out" / "mail.db.unpacked"  # by a build that was killed: the stand-in would refuse it
    (left / "old").mkdir(parents=True)
    report = build_database(open_source(pst), db, settings=settings)
    assert (report.emails, report.skipped) == (1, {"junk": 1})
    with open_mailbox(db, "me@x.org") as box:
        email = box.read("<1@x>")
        assert email and (email.from_name, email.file_name) == ("Ann Lee", "Me/Inbox/1.eml")
    assert [each.name for each in db.parent.iterdir()] == ["mail.db"]
    source = open_source(pst)
    assert not source.is_enron()  # before anything is unpacked
    deleted, _ = source
    assert isinstance(deleted, RawEmail) and (deleted.from_address, deleted.defects) == ("", ("no_date", "no_sender"))

    (pst.parent / "2.eml").write_text("Subject: x\nMessage-ID: <3@x>\n\nBeside it.\n")
    assert names(pst.parent) == ["<3@x>", "<2@x>", "<1@x>", "not_mail:mine.pst.code"]
    Path(f"{pst}.code").write_text("7")
    with pytest.raises(EmailRLError, match=r"readpst cannot read .*mine\.pst: Block is broken\. .*--allow-truncated"):
        build_database(open_source(pst), db, overwrite=True)
    assert names(pst, allow_truncated=True) == ["<2@x>", "<1@x>", "truncated:mine.pst"]
    (tmp_path / "bin" / "readpst").write_text(f"#!/bin/sh\nexec {sys.executable} -c 'bytearray(5 << 30)'\n")
    with pytest.raises(EmailRLError, match=r"readpst cannot read .*mine\.pst: MemoryError"):
        build_database(open_source(pst), db, overwrite=True)
    (tmp_path / "bin" / "readpst").unlink()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(UsageError, match=r"data file \(\.pst or \.ost\), which is read with readpst\. .*pst-utils"):
        build_database(open_source(pst), db, overwrite=True)
    assert [each.name for each in db.parent.iterdir()] == ["mail.db"]


class Ole:
    """A compound file of these streams, as olefile shows it."""

    streams: dict[str, bytes]

    def __init__(self, content: BytesIO) -> None:
        assert content.read().startswith(MESSAGE_START)

    def __enter__(self) -> Ole:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def listdir(self) -> list[list[str]]:
        return [name.split("/") for name in self.streams]

    def exists(self, name: str) -> bool:
        return name in self.streams

    def openstream(self, name: str) -> BytesIO:
        return BytesIO(self.streams[name])


def properties(where: str, head: int, numbers: dict[int, int], texts: dict[str, str | bytes]) -> dict[str, bytes]:
    table = b"".join(struct.pack("<IIQ", tag, 0, value) for tag, value in numbers.items())
    found = {f"{where}__properties_version1.0": bytes(head) + table}
    for name, text in texts.items():
        found[f"{where}__substg1.0_{name}"] = text if isinstance(text, bytes) else text.encode("utf-16-le")
    return found


CONTENT = MESSAGE_START + "__properties_version1.0".encode("utf-16-le")
TICKS = (datetime(2026, 3, 2, 8, 30, tzinfo=UTC) - datetime(1601, 1, 1, tzinfo=UTC)).days * 864 * 10**9 + 306 * 10**9


def test_a_message_is_an_email(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(olefile, "OleFileIO", Ole)
    own = {
        "001A001F": "IPM.Note", "0037001F": "Miete\r\n2026", "1000001E": b"Die Miete betr\xe4gt 900 \x80.\r\n",
        "0C1A001F": 'Müller, "Jo"', "0C1F001F": "/O=X/OU=Y/CN=RECIPIENTS/CN=jo.m", "1035001F": "<7@x>",
    }  # fmt: skip
    people = [
        ("Ann", "39FE001F", "ann@x.org", 1),
        ("Bo", "3003001F", "bo@x.org", 2),
        ("Cy", "3003001F", "/o=x/cn=c y", 3),
    ]
    Ole.streams = properties("", 32, {0x00390040: TICKS, 0x3FFD0003: 1252}, own)
    for number, (name, tag, address, kind) in enumerate(people):
        more = {"3001001F": name, tag: address}
        Ole.streams |= properties(f"__recip_version1.0_#0000000{number}/", 8, {0x0C150003: kind}, more)
    files = [{"3707001F": "Vertrag.txt", "37010102": b"Kaution 1800"}, {"3001001F": "An attached message"}]
    for number, file in enumerate(files):
        Ole.streams |= properties(f"__attach_version1.0_#0000000{number}/", 8, {}, file)
    (tmp_path / "1.msg").write_bytes(CONTENT)
    [email] = open_source(tmp_path / "1.msg")
    assert isinstance(email, RawEmail)
    assert (email.message_id, email.subject, email.from_address) == ("<7@x>", "Miete 2026", "jo.m")
    assert (email.to, email.cc, email.bcc, email.names["jo.m"]) == (["ann@x.org"], ["bo@x.org"], [], "Müller, Jo")
    assert (email.date, email.defects) == (datetime(2026, 3, 2, 8, 30, tzinfo=UTC), ())
    assert (email.body, email.attachments) == ("Die Miete beträgt 900 €.\n", ["Vertrag.txt", "An attached message"])
    report = build_database(open_source(tmp_path), tmp_path / "m.db", settings=StoreSettings(attachment_text=True))
    assert report.attachments == 2
    with open_mailbox(tmp_path / "m.db", "ann@x.org") as box:
        assert [hit.message_id for hit in box.search(["Kaution 1800"])] == ["<7@x>"]

    # The headers as they were sent win, without those of the parts that are not kept; HTML only where there is no text.
    sent = "Message-ID: <8@x>\r\nFrom: Eve\r\n <eve@x.org>\r\nContent-Type: text/x;\r\n charset=x\r\n\r\nList-Id: no"
    del Ole.streams["__substg1.0_1000001E"]
    Ole.streams |= properties("", 32, {0x3FDE0003: 65001}, {"007D001F": sent, "10130102": "<p>Schön".encode()})
    [email] = open_source(tmp_path / "1.msg")
    assert isinstance(email, RawEmail)
    assert (email.message_id, email.from_address, email.machine) == ("<8@x>", "eve@x.org", "")
    assert (email.body.strip(), email.to) == ("Schön", ["ann@x.org"])


def test_other_files_of_office_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "report.doc").write_bytes(MESSAGE_START + bytes(2000))
    (tmp_path / "damaged.msg").write_bytes(CONTENT)
    assert names(tmp_path) == ["damaged:damaged.msg", "not_mail:report.doc"]
    monkeypatch.setattr(olefile, "OleFileIO", Ole)
    Ole.streams = properties("", 32, {}, {"001A001F": "IPM.Contact", "0037001F": "Ann"})
    assert email_of(CONTENT) == CONTENT
    monkeypatch.setitem(__import__("sys").modules, "olefile", None)
    with pytest.raises(UsageError, match=r"\.msg\) needs olefile, .*pip install 'olefile"):
        list(open_source(tmp_path))


def test_files_that_outlook_wrote(tmp_path: Path) -> None:
    """Apache Tika's, counted by libpff (testPST.pst: 7 messages, 1 file) and extract-msg."""
    folder = Path(os.environ.get("OUTLOOK_FILES", "missing"))
    if not folder.is_dir() or not shutil.which("readpst"):
        pytest.skip("OUTLOOK_FILES names no folder with Tika's testPST.pst and testMSG*.msg, or there is no readpst")
    report = build_database(open_source(folder / "testPST.pst"), tmp_path / "mail.db")
    assert (report.emails, report.skipped, report.attachments) == (7, {}, 1)
    [email] = open_source(folder / "testMSG_att_msg.msg")
    assert isinstance(email, RawEmail) and email.attachments == ["Test Attachment", "smbprn.00009008.KdcPjl.pdf"]
    assert email.message_id == "<3975CB0784A2C249A2EDDD4D43C53D08045B971A87@Stitch.pof.com.au>"
    [contact] = open_source(folder / "testMSG_Contact.msg")
    assert isinstance(contact, Skipped) and contact.reason == "not_mail"
