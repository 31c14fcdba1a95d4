"""Every kind of source, told by its content and read to its last message; each message is read or counted."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import tarfile
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

import pytest
from mail.mails import ENVELOPE, lines, mail, make_tar, mbox, names, row, text, write_parquet

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.mail.build import build_database
from emailrl.mail.sources import Skipped, archive, open_source
from emailrl.mail.sources.detect import _batches
from emailrl.mail.sources.reading import MAX_MESSAGE_BYTES
from emailrl.settings import StoreSettings

MEMBERS = {"m/a/1.": text(1), "m/a/2.": text(2, 511), "m/b/3.": text(3, 5000), "m/b/4.": text(4, 0)}
IDS = ["<1@x>", "<2@x>", "<3@x>", "<4@x>"]

# -- archives ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("compress", [bytes, gzip.compress, lzma.compress, bz2.compress])
def test_archives_whatever_their_name(path: Path, tar_format: int, compress: Callable[[bytes], bytes]) -> None:
    foreign = {} if tar_format == tarfile.USTAR_FORMAT else {"ü" * 120: text(5)}
    members = MEMBERS | {f"{'d' * 90}/{'e' * 90}": text(6)} | foreign | {"last": text(7)}
    path.write_bytes(compress(make_tar(members, tar_format)))
    assert names(path)[:4] == IDS
    assert [email.file_name for email in open_source(path)] == list(members)


def test_links_devices_and_folders_of_an_archive(path: Path) -> None:
    entries = []
    for name, kind in {"d": tarfile.DIRTYPE, "l": tarfile.SYMTYPE, "h": tarfile.LNKTYPE, "c": tarfile.CHRTYPE}.items():
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, "/etc/passwd"
        info.size = 700 if name == "h" else 0  # some writers note the size of what a link leads to
        entries.append(info.tobuf())
    path.write_bytes(b"".join(entries) + make_tar({"../../1.": text(1)}))
    assert names(path) == ["not_a_file:l", "not_a_file:h", "not_a_file:c", "<1@x>"]


def test_members_that_are_no_mail_or_too_large_are_counted(path: Path) -> None:
    inner = make_tar({"2.": text(2)})
    path.write_bytes(make_tar({"README": b"Read me.\n", "1.": text(1), "empty": b"", "inner.tar": inner}))
    assert names(path) == ["not_mail:README", "<1@x>", "empty:empty", "not_mail:inner.tar"]
    path.write_bytes(make_tar(MEMBERS))
    assert names(path, max_message_bytes=4000) == ["<1@x>", "<2@x>", "too_large:m/b/3.", "<4@x>"]


def test_unfinished_deliveries_of_an_archived_maildir_are_no_mail(path: Path) -> None:
    box = {"m/tmp/990000000.M1P2.host": text(1), "m/cur/990000001.M1P2.host:2,": text(2), "tmp/3.": text(3)}
    path.write_bytes(gzip.compress(make_tar(box | {"m/tmp/old.mail.4": text(4)})))
    assert names(path) == ["not_mail:m/tmp/990000000.M1P2.host", "<2@x>", "<3@x>", "<4@x>"]


def cut_points() -> list[tuple[str, bytes, int]]:
    plain = make_tar(MEMBERS)
    return [  # the third member's header begins at byte 2,560
        ("inside the third body", plain[: 2560 + 512 + 100], 2),
        ("inside the third header", plain[: 2560 + 100], 2),
        ("gzip", gzip.compress(plain)[:-20], 3),
        ("checksum of gzip", gzip.compress(plain)[:-8] + bytes(8), 4),
        ("xz", lzma.compress(make_tar(MEMBERS | {"5.": text(5) + os.urandom(30_000)}))[:-20_000], 4),
        ("damaged header", plain[:2560] + b"\xff" * 512 + plain[3072:], 2),
    ]


@pytest.mark.parametrize(("content", "whole"), [pytest.param(c, w, id=name) for name, c, w in cut_points()])
def test_an_archive_that_breaks_off_says_how_far_it_got(path: Path, content: bytes, whole: int) -> None:
    path.write_bytes(content)
    said = rf"is truncated or damaged after (\d+) complete messages .*{len(content):,} bytes"
    with pytest.raises(EmailRLError, match=said):
        names(path)
    assert names(path, allow_truncated=True) == [*IDS[:whole], "truncated:"]


def test_a_large_mbox_in_an_archive_is_read_piece_by_piece(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "READ_BYTES", 4096)
    box = mbox(*(text(number, 600) + b"\n" for number in range(20)))
    members = {"1.": text(99), "Takeout/All mail.mbox": box, "2.": text(50, 6000), "3.": text(51, 9000), "4.": text(52)}
    whole = make_tar(members)
    path.write_bytes(gzip.compress(whole))
    expected = ["<99@x>", *(f"<{n}@x>" for n in range(20)), "<50@x>", "too_large:3.", "<52@x>"]
    assert names(path, max_message_bytes=8000) == expected
    path.write_bytes(whole[: 1024 + 512 + 9000])
    kept = names(path, max_message_bytes=8000, allow_truncated=True)
    assert kept[:-1] == expected[: len(kept) - 1] and len(kept) > 12 and kept[-1] == "truncated:"


# -- folders and single files -----------------------------------------------------------------------------------------


def test_a_folder_tree(tmp_path: Path) -> None:
    root = tmp_path / "maildir"
    (root / "b").mkdir(parents=True)
    (root / "a" / "inner").mkdir(parents=True)
    (root / "b" / "2.").write_bytes(text(2))
    (root / "a" / "inner" / "1.").write_bytes(text(1).replace(b"\n", b"\r\n"))
    (root / "a" / "link").symlink_to(root / "b" / "2.")
    (root / "a" / "loop").symlink_to(root)
    (root / "note.txt").write_text("A note.")
    os.mkfifo(root / "pipe")
    expected = ["not_mail:note.txt", "not_a_file:pipe", "not_a_file:a/link", "not_a_file:a/loop", "<1@x>", "<2@x>"]
    assert sorted(names(root)) == sorted(expected) and names(root) == names(root), "the order is fixed"


def test_a_file_that_cannot_be_read_is_counted_and_progress_is_the_share_of_files(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / f"box-{number % 2}").mkdir(exist_ok=True)
        (tmp_path / f"box-{number % 2}" / f"{number}.").write_bytes(text(number))
    source = open_source(tmp_path)
    shares, items = [source.fraction()], []
    for item in source.items:
        shares.append(source.fraction())
        items.append(item)
    assert shares == [number / 8 for number in range(9)]
    (tmp_path / "box-1" / "7.").unlink()
    source.items = iter(items)
    assert list(source)[-1] == Skipped("unreadable", "box-1/7.")


def test_everything_of_a_folder_is_stored_or_counted_and_listed(tmp_path: Path) -> None:
    several = tmp_path / "several"  # no name tells what a file is
    (several / "inner").mkdir(parents=True)
    (several / "a").write_bytes(mbox(mail(1), mail(2)))
    members = {"one": mail(3), "two": mbox(mail(4), mail(5)), "three": b"no mail"}
    (several / "b").write_bytes(gzip.compress(make_tar(members)))
    (several / "c").write_bytes(lines(row(6), row(7, to="wrong")))
    write_parquet(several / "d", row(8))
    (several / "e").write_bytes(b'file,message\nx/9.,"' + mail(9) + b'"\n')
    (several / "f").write_bytes(mail(10))
    (several / "g").write_text('{"a": 1}\n')
    (several / "inner" / "h").write_bytes(lzma.compress(mbox(mail(11))))
    assert names(several) == [
        "<1@x>", "<2@x>", "<3@x>", "<4@x>", "<5@x>", "not_mail:b/three", "<6@x>", "bad_row:a/7.", "<8@x>", "<9@x>",
        "<10@x>", "not_mail:g", "<11@x>",
    ]  # fmt: skip
    named = [email.file_name for email in open_source(several)]
    assert named[:5] == ["a#1", "a#2", "b/one", "b/two#1", "b/two#2"]
    assert named[9:11] == ["e/x/9.", "f"] and named[-1] == "inner/h#1"
    (several / "f").write_bytes(b"Subject: alone\n\nx\n")
    (several / "i").write_bytes(mail(1))
    heard: list[tuple[str, str, str]] = []
    report = build_database(open_source(several), tmp_path / "mail.db", listing=lambda *line: heard.append(line))
    assert (report.emails, report.skipped) == (10, {"not_mail": 2, "bad_row": 1, "duplicate_id": 1})
    assert ("skipped", "duplicate_id", "i") in heard and ("repaired", "no_sender", "f") in heard
    for what, counts in (("skipped", report.skipped), ("repaired", report.repaired)):
        assert {kind: sum(line[:2] == (what, kind) for line in heard) for kind in counts} == counts
        assert sum(line[0] == what for line in heard) == sum(counts.values())
    (several / "b").write_bytes((several / "b").read_bytes()[:-15])
    (several / "d").write_bytes((several / "d").read_bytes()[:-15])
    with pytest.raises(EmailRLError, match=r"several/b is truncated"):
        build_database(open_source(several), tmp_path / "broken.db")
    assert not (tmp_path / "broken.db").exists()
    found = names(several, allow_truncated=True)
    assert [one for one in found if one.startswith("truncated")] == ["truncated:b", "truncated:d#1"]
    assert found[-1] == "<11@x>"


def test_a_single_email_is_read_and_one_under_an_envelope_in_a_folder(path: Path) -> None:
    emlx = b"%d\n" % len(text(8)) + text(8) + b"<plist></plist>\n"
    for content, number in ((text(7), 7), (text(7).replace(b"\n", b"\r\n"), 7), (emlx, 8)):
        path.write_bytes(content)
        assert names(path) == [f"<{number}@x>"]
    path.write_bytes(ENVELOPE + mail(1))
    (path.parent / "z").write_bytes(mail(2, "x" * 5000))
    assert names(path.parent) == ["<1@x>", "<2@x>"]
    assert names(path.parent, max_message_bytes=4000) == ["<1@x>", "too_large:z"]
    assert StoreSettings().max_message_bytes == MAX_MESSAGE_BYTES == 52_428_800


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_what_is_no_source_is_refused(tmp_path: Path, path: Path) -> None:
    for content, message in (
        (b"", "is empty"), (bytes(10240), "archive .* is empty"), (gzip.compress(bytes(1024)), "archive .* is empty"),
        (b"\x1f\x8b\x08", "before its first message"), (b'{"id": 1}\n', "not a mail archive"),
        (os.urandom(2000), "not a mail archive"), (gzip.compress(b"only text"), "not a mail archive"),
        (b"file,body\n1,2\n", "not a mail archive"), (b"Note: not mail\n\nSubject: none\n", "not a mail archive"),
        (b"A letter\nSubject: none\n", r"not a mail archive\. Supported: an email \(\.eml, \.msg\)"),
        (b"PK\3\4", r"mail\.bin is a zip archive\. Unpack it"),
    ):  # fmt: skip
        path.write_bytes(content)
        with pytest.raises(UsageError, match=message):
            open_source(path)
    with pytest.raises(UsageError, match=r"1 not_mail.*docs/guides/data\.md lists the formats"):
        build_database(open_source(tmp_path), tmp_path / "out" / "mail.db")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").mkdir()
    for name, said in (("missing", "No such file or folder"), ("empty", "is empty"), ("pipe", "neither a file nor")):
        with pytest.raises(UsageError, match=said):
            open_source(tmp_path / name)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_workers_keep_the_order(path: Path, workers: int) -> None:
    path.write_bytes(make_tar({str(number): text(number, 20_000) for number in range(200)}))
    assert list(open_source(path).read(attrgetter("message_id"), workers)) == [f"<{number}@x>" for number in range(200)]


def test_large_messages_are_held_one_at_a_time() -> None:
    large, small = (("f", b"x" * size) for size in (5 << 20, 1000))
    found = [[len(content) for _, content in batch] for batch in _batches([large, large, *[small] * 600])]
    assert found == [
        [5 << 20], [], [], [], [], [5 << 20], [], [], [], [], [1000] * 512, [1000] * 88
    ], "a message counts for 2 KiB at least"  # fmt: skip
