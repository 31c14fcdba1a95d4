"""Mail as people have it: Takeout's labels, Maildirs and IMAP accounts kept in step, folders of several kinds."""

from __future__ import annotations

import gzip
import mailbox
import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from email.header import Header
from email.message import EmailMessage
from pathlib import Path

import pypdf  # noqa: F401 - loaded before `closed`, under whose user its folder may be out of reach
import pytest
from mail.mails import ENVELOPE, found, mbox, rows
from mail.test_attachments import pdf
from mail.test_outlook import CONTENT

from emailrl.base.errors import UsageError
from emailrl.mail.build import BuildReport, build_database
from emailrl.mail.database import database_fingerprint
from emailrl.mail.sources import open_source
from emailrl.settings import StoreSettings


def mail(number: int, body: str = "Hello.", **headers: str) -> bytes:
    message = EmailMessage()
    message["Message-ID"], message["From"], message["To"] = f"<{number}@x>", "ann@x.org", "me@x.org"
    message["Date"], message["Subject"] = f"{number % 28 + 1} May 2026 10:00:00 +0000", f"s{number}"
    for name, value in headers.items():
        message[name.replace("_", "-")] = value
    message.set_content(f"{body}\n")
    return message.as_bytes()


def built(source: Path, db: Path, **how: bool) -> BuildReport:
    settings = StoreSettings(attachment_text=True, keep_junk=how.pop("keep_junk", False))
    opened = open_source(source, allow_truncated=how.pop("allow_truncated", False))
    return build_database(opened, db, settings=settings, workers=0, **how)


LABELS = [
    ("Inbox,Unread", True),
    ("Spam", False),
    ('Archived,"Spam, or not"', True),
    ("Important,Trash", False),
    (Header("Gelöscht,Papierkorb", "utf-8").encode(), False),
    (Header("迷惑メール", "utf-8").encode(), False),
    ("Bin", False),
    ("Kosz", False),
    ('"\\Trash"', False),
]
PLACES = [
    ("INBOX/cur/1.a.host:2,S", True),
    ("INBOX/cur/2.a.host:2,FST", False),
    ("Trash/cur/3.a.host:2,S", False),
    (".INBOX.Junk/cur/4.a.host:2,S", False),
    ("Junk.mbox/Messages/5.emlx", False),
    ("INBOX.Trash/cur/8.a.host:2,S", False),
    ("Gel&APY-schte Elemente/cur/9.a.host:2,S", False),
    (".INBOX.&AMk-l&AOk-ments supprim&AOk-s/cur/10.a.host:2,S", False),
    ("&MFQwf3ux-/11.eml", False),
    ("Gelöscht/12.eml", False),
    ("&nothing,at,all-/13.eml", True),
    ("Notes.Trash/14.eml", True),
    ("bin/6.eml", True),
    ("Trashed plans/7.eml", True),
    ("Poistetut kohteet/15.eml", False),
]


def test_spam_and_trash_are_counted_and_left_out_unless_kept(tmp_path: Path) -> None:
    (tmp_path / "All mail.mbox").write_bytes(
        mbox(*(mail(number).replace(b"Subject:", f"X-Gmail-Labels: {each}\nSubject:".encode(), 1)
               for number, (each, _) in enumerate(LABELS)))
    )  # fmt: skip
    for number, (name, _) in enumerate(PLACES):
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(mail(number))
    for source, cases in ((tmp_path / "All mail.mbox", LABELS), (tmp_path / "tree", PLACES)):
        report = built(source, tmp_path / "m.db", overwrite=True)
        wanted = {f"<{number}@x>" for number, (_, kept) in enumerate(cases) if kept}
        assert {name for (name,) in rows(report.db, "SELECT message_id FROM emails")} == wanted
        assert (report.emails, report.skipped) == (len(wanted), {"junk": len(cases) - len(wanted)})
        assert built(source, tmp_path / "m.db", overwrite=True, keep_junk=True).emails == len(cases)


def contents(db: Path) -> list[list[tuple[object, ...]]]:
    """What a database holds, without ids, and what its index finds for each word."""
    columns = "message_id, subject, from_address, date, body, names, attachments, machine, refs"
    people = "SELECT message_id, recipient_address FROM recipients JOIN emails ON id = email_id ORDER BY 1, 2"
    threads = "SELECT message_id, thread_id FROM threads JOIN emails ON id = email_id ORDER BY 1"
    queries = [f"SELECT {columns} FROM emails ORDER BY id", people, threads, "SELECT address FROM addresses ORDER BY 1"]
    queries += [
        f"SELECT message_id FROM emails WHERE id IN (SELECT rowid FROM emails_fts('{word}')) ORDER BY id"
        for word in ("word1", "word2", "hello")
    ]
    return [rows(db, query) for query in queries]


def test_a_synced_database_equals_a_new_one(tmp_path: Path) -> None:
    rng, folder, db = random.Random(7), tmp_path / "cur", tmp_path / "m.db"
    folder.mkdir()
    for round_ in range(6):
        for path in [each for each in folder.iterdir() if rng.random() < 0.3]:
            path.unlink()
        for number in range(10 * round_, 10 * round_ + 10):
            refs = {"In_Reply_To": f"<{rng.randrange(number + 1)}@x>"}
            (folder / f"{number}.M.host:2,").write_bytes(mail(number, f"hello word{number % 3}", **refs))
        for path in [each for each in folder.iterdir() if rng.random() < 0.3]:  # read since: only a flag
            path.rename(path.with_name(f"{path.name.partition(':')[0]}:2,S"))
        edited = min(folder.iterdir())
        edited.write_bytes(edited.read_bytes() + b"more word2\n")
        before = {path for (path,) in rows(db, "SELECT message_id FROM emails")} if db.exists() else set()
        report = built(folder, db, sync=True)
        new = built(folder, tmp_path / "new.db", overwrite=True)
        assert contents(db) == contents(new.db)
        assert len(before) + report.added - report.removed == report.emails == new.emails
        assert report.skipped == new.skipped
    stamp = db.stat().st_mtime_ns
    for path in folder.iterdir():
        path.rename(path.with_name(f"{path.name}F"))
    report = built(folder, db, sync=True)
    assert (report.emails, report.added, report.removed) == (new.emails, 0, 0) and db.stat().st_mtime_ns == stamp
    for path in folder.iterdir():
        path.unlink()
    (folder / "note.txt").write_text("no mail")
    with pytest.raises(UsageError, match="no mail to store"):  # a folder that is not mounted empties nothing
        built(folder, db, sync=True)
    assert contents(db) == contents(new.db)


def test_sync_removes_neither_another_source_s_mail_nor_the_texts_of_files(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / "ab"[number % 2]).mkdir(exist_ok=True)
        (tmp_path / "ab"[number % 2] / f"{number}.eml").write_bytes(mail(number))
    one, other = tmp_path / "a", tmp_path / "b"
    db = built(one, tmp_path / "m.db").db
    assert built(other, db, append=True).added == 2
    before = contents(db)
    for how in ("sync", "append"):
        with pytest.raises(UsageError, match="texts of attached files"):
            build_database(open_source(one), db, settings=StoreSettings(), workers=0, **{how: True})
    bare = build_database(open_source(one), tmp_path / "bare.db", workers=0).db
    for how in ("sync", "append"):
        with pytest.raises(UsageError, match="no texts of attached files"):
            built(one, bare, **{how: True})
    bare.unlink()
    with pytest.raises(UsageError, match="--limit"):
        built(one, db, sync=True, limit=1)
    with pytest.raises(UsageError, match="would remove 2 emails"):
        built(one, db, sync=True)
    assert contents(db) == before
    (one / "5.eml").write_bytes(mail(5))
    assert built(one, db, append=True).added == 1
    (one / "6.eml").write_bytes(mail(6))
    (other / "6.eml").write_bytes(mail(6))
    (tmp_path / "m.db").rename(tmp_path.with_suffix(".db"))  # out of the source of all
    assert built(tmp_path, tmp_path.with_suffix(".db"), sync=True).added == 1  # nothing goes
    (one / "6.eml").unlink()
    (other / "6.eml").unlink()
    assert built(tmp_path, tmp_path.with_suffix(".db"), sync=True).removed == 1  # the database is that source's


def test_the_fingerprint_follows_what_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "cur"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.eml").write_bytes(mail(number))
    db = built(folder, tmp_path / "m.db").db
    before = database_fingerprint(db)
    (folder / "3.eml").write_bytes(mail(3))
    assert built(folder, db, sync=True).added == 1 and database_fingerprint(db) != before
    (folder / "3.eml").unlink()
    assert built(folder, db, sync=True).removed == 1 and database_fingerprint(db) == before
    for number in range(2):
        (folder / f"{number}.eml").unlink()
    with pytest.raises(UsageError, match="would remove 2 emails"):
        built(folder, db, sync=True)
    assert database_fingerprint(db) == before, "most of the mail is not removed"


@contextmanager
def closed(path: Path) -> Iterator[None]:
    """Forbid a file or folder to everyone, root included, for the block."""
    uid, mode = os.geteuid(), path.stat().st_mode
    path.chmod(0)
    os.seteuid(uid or 65534)
    try:
        yield
    finally:
        os.seteuid(uid)
        path.chmod(mode)


@pytest.mark.parametrize(("name", "lost"), [("b", 2), ("box", 1), ("a/0.eml", 1)])
def test_sync_does_not_take_what_may_not_be_read_for_deleted(open_folder: Path, name: str, lost: int) -> None:
    root, db = open_folder / "mail", open_folder / "m.db"
    for number in range(5):
        (root / "ab"[number // 3]).mkdir(parents=True, exist_ok=True)
        (root / "ab"[number // 3] / f"{number}.eml").write_bytes(mail(number))
    (root / "box").write_bytes(ENVELOPE + mail(5))
    assert built(root, db).emails == 6
    for path in (open_folder, *open_folder.rglob("*")):
        os.chown(path, os.getuid() or 65534, -1)
    before = contents(db)
    with closed(root / name), pytest.raises(UsageError, match=rf"remove {lost} emails .* {name} cannot be read"):
        built(root, db, sync=True)
    assert contents(db) == before
    assert built(root, db, sync=True).removed == 0
    (root / "a" / "1.eml").unlink()
    assert built(root, db, sync=True).removed == 1


def test_sync_takes_no_cut_off_part_for_deleted_and_a_damaged_message_hinders_nothing(tmp_path: Path) -> None:
    (tmp_path / "mail").mkdir()
    drawn = [random.Random(number).randbytes(30).hex() for number in range(200)]  # which gzip cannot make small
    for number in range(3):
        (tmp_path / "mail" / f"{number}.eml").write_bytes(mail(number))
    (tmp_path / "mail" / "box.gz").write_bytes(gzip.compress(mbox(mail(3), mail(4, "\n".join(drawn)))))
    db = built(tmp_path / "mail", tmp_path / "m.db").db
    whole = (tmp_path / "mail" / "box.gz").read_bytes()
    (tmp_path / "mail" / "box.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match=r"box\.gz.* cannot be read"):
        built(tmp_path / "mail", db, sync=True, allow_truncated=True)
    (tmp_path / "mail" / "box.gz").write_bytes(whole)
    (tmp_path / "mail" / "bad.msg").write_bytes(CONTENT)
    (tmp_path / "mail" / "0.eml").unlink()
    report = built(tmp_path / "mail", db, sync=True)
    assert (report.removed, report.skipped["damaged"]) == (1, 1)


FACTS = {
    "Kestrel": 1, "4711 pieces": 2, "Rechnung": 3, "Mietvertrag": 3, "facture": 4, "Zephyr": 5,
    "Mueller": 6, "bill.pdf": 5, "lantern": 7, "Vertrag": 3,
}  # fmt: skip


def test_every_mail_of_a_made_up_archive_is_accounted_for_and_ten_facts_are_found(tmp_path: Path) -> None:
    attached = EmailMessage()
    attached["Message-ID"], attached["From"], attached["To"], attached["Subject"] = "<5@x>", "a@x", "me@x.org", "Bill"
    attached.set_content("See the file.\n")
    attached.add_attachment(pdf("Invoice Zephyr 20993"), maintype="application", subtype="pdf", filename="bill.pdf")
    german = "Hallo, die Stromrechnungen sind da und der Mietvertrag ist nicht verlängert."
    takeout = [
        mail(1, "Wire it to Kestrel.", X_Gmail_Labels="Inbox"),
        mail(2, "We take 4711 pieces.", X_Gmail_Labels="Archived"),
        mail(30, "Win now", X_Gmail_Labels="Spam"),
        *(mail(number, "From here on.\n\nFrom there too.") for number in range(100, 120)),
    ]
    (tmp_path / "own").mkdir()
    box = mailbox.mbox(tmp_path / "own" / "Takeout.mbox")
    for each in takeout:
        box.add(each)
    box.close()
    maildir = mailbox.Maildir(tmp_path / "own" / "imap")
    for each in (
        mail(3, german),
        mail(4, "Bonjour, les factures sont payées et nous avons fini."),
        attached.as_bytes(),
    ):
        maildir.add(each)
    (tmp_path / "own" / "imap" / "tmp" / "1.half").write_bytes(mail(8)[:90])  # a delivery in progress
    (tmp_path / "own" / "6.eml").write_bytes(mail(6, "Für Herrn Müller."))
    (tmp_path / "own" / "7.eml").write_bytes(mail(7, "The lantern is mended."))
    report = built(tmp_path / "own", tmp_path / "m.db")
    theirs = len(mailbox.mbox(tmp_path / "own" / "Takeout.mbox")) + len(maildir) + 2
    assert report.emails + report.skipped["junk"] == theirs == 28 and report.skipped == {"junk": 1}
    for keyword, number in FACTS.items():
        assert found(report.db, "me@x.org", keyword) == [f"<{number}@x>"], keyword


DOVECOT = """
log_path = {root}/log
base_dir = {root}/run
ssl = no
first_valid_uid = 0
first_valid_gid = 0
mail_uid = {uid}
mail_gid = {gid}
mail_location = maildir:{root}/server
"""
MBSYNC = """
IMAPStore server
Tunnel "{imap} -c {root}/dovecot.conf 2>{root}/log | cat"

MaildirStore here
Path {root}/here/
Inbox {root}/here/INBOX
SubFolders Verbatim

Channel mail
Far :server:
Near :here:
Patterns *
Create Near
Expunge Near
Sync Pull
SyncState *
"""
IMAP = Path("/usr/lib/dovecot/imap")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can enter, unlike pytest's."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.skipif(not (IMAP.is_file() and shutil.which("mbsync")), reason="needs Debian's dovecot-imapd and isync")
def test_an_imap_account_is_kept_in_step_by_mbsync(open_folder: Path) -> None:
    root, uid, gid = open_folder, os.getuid() or 65534, os.getgid() or 65534  # dovecot serves no mail of root's
    (root / "here").mkdir()
    given = {"root": root, "uid": uid, "gid": gid, "imap": IMAP}
    (root / "dovecot.conf").write_text(DOVECOT.format(**given))
    (root / "mbsyncrc").write_text(MBSYNC.format(**given))
    server = mailbox.Maildir(root / "server")
    keys = [server.add(mail(number)) for number in range(5)]
    server.add_folder("Trash").add(mail(5))
    server.add_folder("Work").add(mail(6))

    def step() -> BuildReport:
        for path in (root, *root.rglob("*")):
            os.chown(path, uid, gid)
        command = ["mbsync", "-c", str(root / "mbsyncrc"), "-a"]
        environment = {**os.environ, "USER": "ann", "HOME": str(root)}
        subprocess.run(command, env=environment, check=True, timeout=300, capture_output=True)
        return built(root / "here", root / "m.db", sync=True)

    first = step()
    assert (first.added, first.removed, first.skipped["junk"]) == (6, 0, 1)
    server.discard(keys[0])
    server.add(mail(7))
    second = step()
    assert (second.added, second.removed) == (1, 1)
    stored = {name for (name,) in rows(second.db, "SELECT message_id FROM emails")}
    assert stored == {f"<{number}@x>" for number in (1, 2, 3, 4, 6, 7)}
