"""Every kind of source, told by its content and read to its last message."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import lzma
import os
import tarfile
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
from mail.mails import make_tar, names, text

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.mail.sources import RawEmail, Skipped, open_source
from emailrl.mail.sources.rows import COLUMNS, row_to_email

MEMBERS = {"m/a/1.": text(1), "m/a/2.": text(2, 511), "m/b/3.": text(3, 5000), "m/b/4.": text(4, 0)}
IDS = ["<1@x>", "<2@x>", "<3@x>", "<4@x>"]


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("compress", [bytes, gzip.compress, lzma.compress, bz2.compress])
def test_archives_whatever_their_name(tmp_path: Path, tar_format: int, compress: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "mail.bin"
    path.write_bytes(compress(make_tar(MEMBERS, tar_format)))
    assert names(path) == IDS
    assert [email.file_name for email in open_source(path)] == list(MEMBERS)


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_and_foreign_names(tmp_path: Path, tar_format: int) -> None:
    long = f"{'d' * 90}/{'e' * 90}"
    members = {long: text(1), **({} if tar_format == tarfile.USTAR_FORMAT else {"ü" * 120: text(2)}), "last": text(3)}
    path = tmp_path / "mail.tar"
    path.write_bytes(make_tar(members, tar_format))
    assert [email.file_name for email in open_source(path)] == list(members)


def test_links_devices_and_folders_of_an_archive(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, kind in (
            ("d", tarfile.DIRTYPE),
            ("l", tarfile.SYMTYPE),
            ("h", tarfile.LNKTYPE),
            ("c", tarfile.CHRTYPE),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            info.size = 700 if kind == tarfile.LNKTYPE else 0  # some writers note the size of what a link leads to
            archive.addfile(info)
        info = tarfile.TarInfo("../../1.")
        info.size = len(text(1))
        archive.addfile(info, io.BytesIO(text(1)))
    path = tmp_path / "mail.tar"
    path.write_bytes(buffer.getvalue())
    assert names(path) == ["not_a_file:l", "not_a_file:h", "not_a_file:c", "<1@x>"]


def test_members_that_are_no_mail_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "mail.tar"
    path.write_bytes(make_tar({"README": b"Read me.\n", "1.": text(1), "empty": b""}))
    assert names(path) == ["not_mail:README", "<1@x>", "empty:empty"]


def test_an_archive_within_an_archive_is_no_mail(tmp_path: Path) -> None:
    mail = b"From: a@x\nTo: b@x\n\nbody"
    path = tmp_path / "mail.tar"
    path.write_bytes(make_tar({"inner.tar": make_tar({"2.": mail}), "1.": mail}))
    first, second = open_source(path)
    assert first == Skipped("not_mail", "inner.tar")
    assert isinstance(second, RawEmail)


def test_a_large_member_is_passed_over_unread(tmp_path: Path) -> None:
    path = tmp_path / "mail.tar"
    path.write_bytes(make_tar(MEMBERS))
    assert names(path, max_message_bytes=4000) == ["<1@x>", "<2@x>", "too_large:m/b/3.", "<4@x>"]


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
def test_an_archive_that_breaks_off_says_how_far_it_got(tmp_path: Path, content: bytes, whole: int) -> None:
    path = tmp_path / "mail.tar"
    path.write_bytes(content)
    with pytest.raises(
        EmailRLError, match=rf"is truncated or damaged after (\d+) complete messages .*{len(content):,} bytes"
    ):
        names(path)
    kept = names(path, allow_truncated=True)
    assert kept[-1] == "truncated:"
    assert kept[:-1] == IDS[:whole]


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
    assert sorted(names(root)) == sorted(
        ["not_mail:note.txt", "not_a_file:pipe", "not_a_file:a/link", "not_a_file:a/loop", "<1@x>", "<2@x>"]
    )
    assert names(root) == names(root), "the order is fixed"


def test_a_file_that_cannot_be_read_is_counted(tmp_path: Path) -> None:
    (tmp_path / "1.").write_bytes(text(1))
    (tmp_path / "2.").write_bytes(text(2))
    source = open_source(tmp_path)
    items = list(source.items)
    (tmp_path / "2.").unlink()
    source.items = iter(items)
    assert [email.reason if isinstance(email, Skipped) else email.message_id for email in source] == [
        "<1@x>",
        "unreadable",
    ]


def write_csv(path: Path, rows: list[list[str]], header: tuple[str, ...] = ("file", "message")) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])


def test_kaggle_csv(tmp_path: Path) -> None:
    path = tmp_path / "anything"
    write_csv(path, [["a/1.", text(1).decode() + '\n"quoted", and\nlines é'], ["a/2.", "no mail"], ["one column"]])
    first, *rest = open_source(path)
    assert isinstance(first, RawEmail)
    assert (first.message_id, first.file_name) == ("<1@x>", "a/1.")
    assert first.body.endswith('"quoted", and\nlines é')
    assert rest == [Skipped("not_mail", "a/2."), Skipped("bad_row", "row 3")]


def test_csv_with_other_column_order_mark_and_gzip(tmp_path: Path) -> None:
    path = tmp_path / "emails.csv.gz"
    plain = tmp_path / "plain"
    write_csv(plain, [["x", text(1).decode(), "a/1."]], ("extra", "message", "file"))
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + plain.read_bytes()))
    assert names(path) == ["<1@x>"]


def test_a_csv_that_breaks_off(tmp_path: Path) -> None:
    path = tmp_path / "emails.csv"
    write_csv(path, [["1", text(1).decode()], ["2", text(2).decode()]])
    path.write_bytes(path.read_bytes()[:-6])
    with pytest.raises(EmailRLError, match="after 1 complete rows"):
        names(path)
    assert names(path, allow_truncated=True) == ["<1@x>", "truncated:"]


def dataset_rows() -> dict[str, list[object]]:
    moment = datetime(2001, 5, 14, 23, 39)
    return {
        "message_id": ["<1@x>", "<2@x>"], "subject": ["s", None], "from": ["Ann@X.org", None],
        "to": [["Bob@x.org"], []], "cc": [[], None], "bcc": [[], []], "date": [moment, None], "body": ["text", None],
        "file_name": ["a/1.", "a/2."],
    }  # fmt: skip


def check_dataset(path: Path) -> None:
    first, second = open_source(path)
    assert isinstance(first, RawEmail) and isinstance(second, RawEmail)
    assert (first.from_address, first.to, first.date and first.date.isoformat()) == (
        "ann@x.org", ["bob@x.org"], "2001-05-14T23:39:00+00:00",
    )  # fmt: skip
    assert (second.body, second.cc, second.defects) == ("", [], ("no_date", "no_sender"))


def test_a_dataset_saved_to_disk(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict(dataset_rows()).save_to_disk(str(tmp_path / "saved"))
    check_dataset(tmp_path / "saved")


def test_a_dataset_folder_of_parquet(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    (tmp_path / "hub" / "data").mkdir(parents=True)
    datasets.Dataset.from_dict(dataset_rows()).to_parquet(
        str(tmp_path / "hub" / "data" / "train-00000-of-00001.parquet")
    )
    check_dataset(tmp_path / "hub")


def test_a_dataset_without_a_column(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"message_id": ["1"]}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(UsageError, match="no column 'subject'"):
        names(tmp_path / "saved")


@pytest.mark.parametrize("wrong", [{"to": "a@b"}, {"date": {}}, {"body": 3}, {"cc": [1]}])
def test_dataset_rows_of_the_wrong_type_are_counted(wrong: dict[str, object]) -> None:
    row: dict[str, object] = dict.fromkeys(COLUMNS, "") | {
        "to": [],
        "cc": [],
        "bcc": [],
        "date": None,
        "file_name": "f",
    }
    assert isinstance(row_to_email(row), RawEmail)
    assert row_to_email(row | wrong) == Skipped("bad_row", "f")


def test_the_hub_out_of_reach_names_the_alternatives() -> None:
    with pytest.raises(
        EmailRLError,
        match=r"corbt/enron-emails could not be loaded: the hub cannot be reached\. .*--source demo.*--source PATH",
    ):
        next(iter(open_source("hf")))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"), (bytes(10240), "archive .* is empty"), (gzip.compress(bytes(1024)), "archive .* is empty"),
        (b"\x1f\x8b\x08", "before its first message"), (b'{"id": 1}\n', "not a mail archive"),
        (os.urandom(2000), "not a mail archive"),
        (gzip.compress(b"only text"), "not a mail archive"), (b"file,body\n1,2\n", "not a mail archive"),
    ],
    ids=["empty", "empty tar", "empty gzip", "cut gzip header", "JSON lines", "noise", "text in gzip", "CSV"],
)  # fmt: skip
def test_what_is_no_source_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "mail.tar.gz"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        open_source(path)


def test_no_file_no_mail_folder_and_no_regular_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file or folder"):
        open_source(tmp_path / "missing")
    with pytest.raises(UsageError, match="is empty"):
        open_source(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="neither a file nor a folder"):
        open_source(tmp_path / "pipe")


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_workers_keep_the_order(tmp_path: Path, workers: int) -> None:
    members = {str(number): text(number, 20_000) for number in range(200)}
    path = tmp_path / "mail.tar"
    path.write_bytes(make_tar(members))
    ids = open_source(path).read(_id_of, workers)
    assert list(ids) == [f"<{number}@x>" for number in range(200)]


def _id_of(email: RawEmail | Skipped) -> str:
    assert isinstance(email, RawEmail)
    return email.message_id
