"""Files that hold many messages (mbox, JSONL, Parquet), alone and several in a folder: each is read or counted."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import random
import tarfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from emailrl.errors import EmailRLError, UsageError
from emailrl.store.build import build_database
from emailrl.store.sources import RawEmail, Skipped, open_source
from emailrl.store.sources.mbox import _pieces


def mail(number: int, body: str = "") -> bytes:
    return (
        f"Message-ID: <{number}@x>\nFrom: ann@x.org\nTo: bob@x.org\nSubject: s{number}\n\n{body or number}\n".encode()
    )


ENVELOPE = b"From ann@x.org Mon May 14 16:39:00 2001\n"


def mbox(*mails: bytes, envelope: bytes = ENVELOPE) -> bytes:
    return b"".join(envelope + one + b"\n" for one in mails)


def read(path: Path, **options: Any) -> list[str]:
    """The ids of the mails, ``reason:name`` for what is skipped, in order."""
    return [
        email.message_id if isinstance(email, RawEmail) else f"{email.reason}:{email.file_name}"
        for email in open_source(path, **options)
    ]


def emails(path: Path, **options: Any) -> list[RawEmail]:
    found = list(open_source(path, **options))
    assert all(isinstance(email, RawEmail) for email in found), found
    return found  # type: ignore[return-value]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mail.bin"


@pytest.mark.parametrize("compress", [bytes, gzip.compress, lzma.compress])
def test_an_mbox_whatever_its_name(path: Path, compress: Callable[[bytes], bytes]) -> None:
    path.write_bytes(compress(mbox(mail(1), mail(2, "two\n\nlines"), mail(3))))
    first, second, third = emails(path)
    assert (first.body, second.body, third.body) == ("1\n", "two\n\nlines\n", "3\n")
    assert [first.file_name, third.file_name] == ["mail.bin#1", "mail.bin#3"]
    assert second.defects == ("no_date",)


@pytest.mark.parametrize(
    "envelope",
    [
        "From ann@x.org Mon May 14 16:39:00 2001", "From - Mon May  4 16:39:00 2001",
        "From MAILER-DAEMON Fri Jul  8 12:08 2011",
        "From 1234@xxx Mon May 14 16:39:00 +0000 2001", "From ann@x Mon May 14 16:39:00 PDT 2001",
        "From ann at x.org  Mon May 14 16:39:00 2001",
        "From ann@x Mon May 14 16:39:00 MET DST 2001", "From ann@x Mon May 14 16:39:00 2001 -0700",
        "From a Mon May 14 16:39:00 2001 remote from b",
        "From ann@x Mon, 14 May 2001 16:39:00 +0000", "From 0123456789abcdef Mon Sep 17 00:00:00 2001",
    ],
)  # fmt: skip
def test_envelope_lines_as_programs_write_them(path: Path, envelope: str) -> None:
    path.write_bytes(mbox(mail(1), mail(2), envelope=envelope.encode() + b"\n"))
    assert read(path) == ["<1@x>", "<2@x>"]


@pytest.mark.parametrize(
    "body",
    [
        "\nFrom here on we drill.\n", "\nFrom: not a header\n", "From ann Mon May 14 16:39:00 2001 we met.\nTo: her",
        "\nFrom ann@x.org Mon May 14 16:39:00 2001\nwas written above.", "\nFrom Monday on: gas", "From ",
        "\nFrom\nFrom \n",
    ],
)  # fmt: skip
def test_from_inside_a_body_stays_there(path: Path, body: str) -> None:
    path.write_bytes(mbox(mail(1, body), mail(2)))
    first, second = emails(path)
    assert (first.body, second.body) == (body + "\n", "2\n")


def test_quoted_from_loses_one_mark(path: Path) -> None:
    path.write_bytes(mbox(mail(1, ">From a\n>>From b\n> From c\nx >From d\n>From: e")))
    assert emails(path)[0].body == "From a\n>From b\n> From c\nx >From d\n>From: e\n"


def test_crlf_nul_bytes_and_wrong_charsets_in_an_mbox(path: Path) -> None:
    crlf = mbox(mail(1, "one\n>From two"), mail(2)).replace(b"\n", b"\r\n")
    wrong = mail(4).replace(b"Subject", b"Content-Type: text/plain; charset=utf-8\nSubject") + b"caf\xe9\n"
    path.write_bytes(crlf + mbox(mail(3, "a\0b"), wrong))
    one, two, three, four = emails(path)
    assert (one.body, two.body, three.body, four.body) == ("one\nFrom two\n", "2\n", "ab\n", "4\ncafé\n")
    assert "nul_bytes" in three.defects and "bad_charset" in four.defects


def test_a_missing_empty_line_loses_no_message(path: Path) -> None:
    path.write_bytes(ENVELOPE + mail(1) + ENVELOPE + mail(2) + ENVELOPE + b"X-Empty: yes\n")
    assert read(path) == ["<1@x>", "<2@x>", "not_mail:mail.bin#3"]


def test_a_large_message_of_an_mbox_is_counted_once(path: Path) -> None:
    path.write_bytes(mbox(mail(1), mail(2, "b" * 3_000_000), mail(3), mail(4, "c" * 50_000)))
    assert read(path, max_message_bytes=40_000) == [
        "<1@x>", "too_large:mail.bin#2", "<3@x>", "too_large:mail.bin#4",
    ]  # fmt: skip


class Trickle(io.BytesIO):
    """Gives any number of bytes at a time."""

    def __init__(self, content: bytes, seed: int) -> None:
        super().__init__(content)
        self.random = random.Random(seed)

    def read1(self, size: int | None = -1, /) -> bytes:
        return super().read1(self.random.choice([1, 7, 500, 3000]))


@pytest.mark.parametrize("seed", range(5))
def test_an_envelope_astride_two_blocks_is_seen(seed: int) -> None:
    mails = [ENVELOPE + mail(number, "From x\n" * (number % 5) + "y" * 37 * number) + b"\n" for number in range(60)]
    assert list(_pieces(Trickle(b"".join(mails), seed), 10_000)) == mails
    large = [one if len(one) <= 1000 else None for one in mails]
    assert list(_pieces(Trickle(b"".join(mails), seed), 1000)) == large


def test_an_mbox_that_breaks_off(path: Path) -> None:
    noise = "".join(random.Random(0).choices("abcdefghijklmnop", k=20_000))
    whole = gzip.compress(mbox(mail(1), mail(2), mail(3, noise)))
    path.write_bytes(whole[:-2000])
    with pytest.raises(EmailRLError, match="breaks off or is damaged after 2 whole messages"):
        read(path)
    assert read(path, allow_truncated=True) == ["<1@x>", "<2@x>", "truncated:mail.bin#3"]


def row(number: int, **change: Any) -> dict[str, Any]:
    return {
        "message_id": f"<{number}@x>", "subject": f"s{number}", "from": "Ann Lee <Ann@x.org>", "to": ["BOB@x.org"],
        "cc": [],
        "bcc": None, "date": "2001-05-14T16:39:00-07:00", "body": f"b{number}", "file_name": f"a/{number}.",
    } | change  # fmt: skip


def lines(*rows: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in rows)


EXPECTED = RawEmail(
    "<1@x>", "s1", "ann@x.org", ["bob@x.org"], [], [], datetime(2001, 5, 14, 23, 39, tzinfo=UTC), "b1", "a/1."
)


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_jsonl(path: Path, compress: Callable[[bytes], bytes]) -> None:
    bare = row(2)
    for column in ("cc", "bcc", "file_name"):
        del bare[column]
    path.write_bytes(compress(b"\xef\xbb\xbf" + lines(row(1)) + b"\r\n" + lines(bare, row(3, date=989883540000))))
    first, second, third = emails(path)
    assert first == EXPECTED
    assert (second.cc, second.file_name) == ([], "mail.bin#3")
    assert third.date == EXPECTED.date


def test_a_first_line_longer_than_any_block(path: Path) -> None:
    path.write_bytes(lines(row(1, body="b" * 2_000_000), row(2)))
    assert read(path) == ["<1@x>", "<2@x>"]
    assert read(path, max_message_bytes=2_100_000) == ["<1@x>", "<2@x>"]


def test_hostile_lines_are_counted(path: Path) -> None:
    odd = [
        b"[" * 100_000, b'{"message_id": 1}', b"[]", b'"text"', b"{broken", b"9" * 5000,
        lines(row(1, date=True)).strip(), lines(row(1, to="a@b")).strip(), lines(row(1, body={})).strip(),
        lines(row(1, file_name=3)).strip(),
    ]  # fmt: skip
    path.write_bytes(lines(row(1)) + b"\n".join(odd) + b"\n" + lines(row(2)))
    found = read(path)
    assert (found[0], found[-1]) == ("<1@x>", "<2@x>")
    assert [skipped.partition(":")[0] for skipped in found[1:-1]] == ["bad_row"] * len(odd)
    assert found[1] == "bad_row:mail.bin#2"


def test_what_jsonl_mends(path: Path) -> None:
    nul, surrogate = row(1, body="a\0b"), row(2, body="\ud800c")
    latin = json.dumps(row(3, body="café"), ensure_ascii=False).encode("latin-1")
    missing = row(4, message_id="", date=None, **{"from": None})
    path.write_bytes(lines(nul, surrogate) + latin + b"\n" + lines(missing))
    one, two, three, four = emails(path)
    assert (one.body, one.defects) == ("ab", ("nul_bytes",))
    assert two.body == "?c"
    assert (three.body, three.defects) == ("café", ("bad_charset",))
    assert four.defects == ("no_date", "no_message_id", "no_sender")
    assert four.message_id.endswith("@made-up.emailrl>")
    assert four.message_id == emails(path)[3].message_id


def test_large_and_torn_lines(path: Path) -> None:
    path.write_bytes(lines(row(1), row(2, body="b" * 3_000_000), row(3)))
    assert read(path, max_message_bytes=1000) == ["<1@x>", "too_large:mail.bin#2", "<3@x>"]
    whole = lines(row(1), row(2))
    path.write_bytes(whole[:-1])
    assert read(path) == ["<1@x>", "<2@x>"], "the last line end is no part of a row"
    path.write_bytes(whole[:-10])
    with pytest.raises(EmailRLError, match="after 1 whole rows"):
        read(path)
    assert read(path, allow_truncated=True) == ["<1@x>", "truncated:mail.bin#2"]
    noise = "".join(random.Random(0).choices("abcdefghijklmnop", k=20_000))
    path.write_bytes(gzip.compress(lines(row(1), row(2), row(3, body=noise)))[:-2000])
    with pytest.raises(EmailRLError, match="after 2 whole rows"):
        read(path)
    assert read(path, allow_truncated=True) == ["<1@x>", "<2@x>", "truncated:mail.bin#3"]


def write_parquet(path: Path, *rows: dict[str, Any], **options: Any) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    write_table(pyarrow.Table.from_pylist(list(rows)), path, **options)


def test_parquet(path: Path) -> None:
    moment = datetime(2001, 5, 14, 23, 39)
    rows = [row(number, date=moment, bcc=["Cy@x.org"]) for number in range(1, 1202)]
    write_parquet(path, *rows, row(1202, date=None, bcc=[]), row_group_size=700)
    found = emails(path)
    assert found[0].bcc == ["cy@x.org"]
    assert (found[0].date, found[0].body, found[0].file_name) == (EXPECTED.date, "b1", "a/1.")
    assert [email.message_id for email in found] == [f"<{number}@x>" for number in range(1, 1203)]
    assert found[-1].defects == ("no_date",)


def test_parquet_torn_large_and_foreign(path: Path) -> None:
    write_parquet(path, row(1), row(2, body="b" * 5000, file_name=None))
    assert read(path, max_message_bytes=1000) == ["<1@x>", "too_large:mail.bin#2"]
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(EmailRLError, match="breaks off or is damaged after 0 whole rows"):
        read(path)
    assert read(path, allow_truncated=True) == ["truncated:mail.bin#1"]
    write_parquet(path, {"message_id": "1", "body": "b"})
    with pytest.raises(UsageError, match="no mail archive"):
        open_source(path)


def tar_of(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture
def several(tmp_path: Path) -> Path:
    """A folder of everything, no name telling what it is."""
    root = tmp_path / "several"
    (root / "inner").mkdir(parents=True)
    (root / "a").write_bytes(mbox(mail(1), mail(2)))
    (root / "b").write_bytes(gzip.compress(tar_of(one=mail(3), two=mbox(mail(4), mail(5)), three=b"no mail")))
    (root / "c").write_bytes(lines(row(6), row(7, to="wrong")))
    write_parquet(root / "d", row(8))
    (root / "e").write_bytes(b'file,message\nx/9.,"' + mail(9) + b'"\n')
    (root / "f").write_bytes(mail(10))
    (root / "g").write_text('{"a": 1}\n')
    (root / "inner" / "h").write_bytes(lzma.compress(mbox(mail(11))))
    return root


def test_a_folder_of_several(several: Path) -> None:
    assert read(several) == [
        "<1@x>", "<2@x>", "<3@x>", "<4@x>", "<5@x>", "not_mail:b/three", "<6@x>", "bad_row:a/7.", "<8@x>", "<9@x>",
        "<10@x>",
        "not_mail:g", "<11@x>",
    ]  # fmt: skip
    named = [email.file_name for email in open_source(several)]
    assert named[:5] == ["a#1", "a#2", "b/one", "b/two#1", "b/two#2"]
    assert named[9:11] == ["e/x/9.", "f"] and named[-1] == "inner/h#1"


@pytest.mark.parametrize("workers", [0, 2])
def test_everything_of_a_folder_is_stored_or_counted(several: Path, tmp_path: Path, workers: int) -> None:
    report = build_database(open_source(several), tmp_path / "mail.db", workers=workers)
    assert report.emails == 10
    assert report.skipped == {"not_mail": 2, "bad_row": 1}
    assert report.emails + sum(report.skipped.values()) == len(read(several))


def test_a_broken_file_among_several(several: Path, tmp_path: Path) -> None:
    (several / "b").write_bytes((several / "b").read_bytes()[:-15])
    (several / "d").write_bytes((several / "d").read_bytes()[:-15])
    with pytest.raises(EmailRLError, match=r"several/b breaks off"):
        build_database(open_source(several), tmp_path / "mail.db")
    assert not (tmp_path / "mail.db").exists()
    found = read(several, allow_truncated=True)
    assert [one for one in found if one.startswith("truncated")] == ["truncated:b", "truncated:d#1"]
    assert found[-1] == "<11@x>"


def test_a_mail_under_an_envelope_in_a_folder_is_one_mail(tmp_path: Path) -> None:
    (tmp_path / "1.").write_bytes(ENVELOPE + mail(1))
    (tmp_path / "2.").write_bytes(mail(2, "x" * 5000))
    assert read(tmp_path) == ["<1@x>", "<2@x>"]
    assert read(tmp_path, max_message_bytes=4000) == ["<1@x>", "too_large:2."]


def test_the_hub_s_dataset_is_read_by_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    write_parquet(tmp_path / "train-00000-of-00001.parquet", row(1), row(2, bcc=["c@x.org"]))
    monkeypatch.setattr("emailrl.store.sources.hub.DATASET", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    first, second = open_source("hf")
    assert first == EXPECTED
    assert isinstance(second, RawEmail) and second.bcc == ["c@x.org"]


def test_listing_names_every_message_skipped_or_mended(several: Path, tmp_path: Path) -> None:
    (several / "f").write_bytes(b"Subject: alone\n\nx\n")
    (several / "i").write_bytes(mail(1))
    heard: list[tuple[str, str, str]] = []
    report = build_database(open_source(several), tmp_path / "mail.db", listing=lambda *line: heard.append(line))
    assert ("skipped", "duplicate", "i") in heard and ("mended", "no_sender", "f") in heard
    for what, counts in (("skipped", report.skipped), ("mended", report.defects)):
        assert {kind: sum(line[:2] == (what, kind) for line in heard) for kind in counts} == counts
        assert sum(line[0] == what for line in heard) == sum(counts.values())


def test_the_sizes_agree() -> None:
    from emailrl.settings import StoreSettings
    from emailrl.store.sources.message import Reading

    assert StoreSettings().max_message_bytes == Reading().max_message_bytes == 104_857_600


def test_skipped_has_a_name_that_can_be_stored(path: Path) -> None:
    path.write_bytes(lines(row(1, file_name="a\0b\ud800", to=3), row(2)))
    skipped, _ = open_source(path)
    assert skipped == Skipped("bad_row", "ab?")
