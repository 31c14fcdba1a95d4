"""Mbox files: where a mail begins and ends, and what is wrong with one."""

from __future__ import annotations

import gzip
import io
import lzma
import mailbox
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from mail.mails import ENVELOPE, TABLES, emails, mail, mbox, names

from emailrl.base.errors import EmailRLError
from emailrl.mail.sources.archive import messages_of
from emailrl.mail.sources.reading import Skipped


def test_an_mbox_whatever_its_name(path: Path) -> None:
    for compress in (bytes, lzma.compress):
        path.write_bytes(compress(mbox(mail(1), mail(2, "two\n\nlines"), mail(3))))
        first, second, third = emails(path)
        assert (first.body, second.body, third.body) == ("1\n", "two\n\nlines\n", "3\n")
        assert [first.file_name, third.file_name] == ["mail.bin#1", "mail.bin#3"]
        assert second.defects == ("no_date",)


@pytest.mark.parametrize("envelope", TABLES["test_envelope_lines_as_programs_write_them"])
def test_envelope_lines_as_programs_write_them(path: Path, envelope: str) -> None:
    for content in (mails := mbox(mail(1), mail(2), envelope=envelope.encode() + b"\n"), mails.replace(b"\n", b"\r\n")):
        path.write_bytes(content)
        assert names(path) == ["<1@x>", "<2@x>"]
        assert len(mailbox.mbox(path)) == 2


@pytest.mark.parametrize("body", TABLES["test_from_inside_a_body_stays_there"])
def test_from_inside_a_body_stays_there(path: Path, body: str) -> None:
    path.write_bytes(mbox(mail(1, body), mail(2)))
    assert [one.body for one in emails(path)] == [body + "\n", "2\n"]


@pytest.mark.parametrize("separator", [b"From \r\n", b"From - \r\n", b"From -\r\n"])
def test_thunderbird_s_folders(tmp_path: Path, separator: bytes) -> None:
    mails = [mail(n).replace(b"\n", b"\r\n").replace(b"From:", b"X-Mozilla-Status: 0001\r\nFrom:") for n in range(5)]
    path = tmp_path / "profile" / "Inbox"
    path.parent.mkdir()
    expected = [f"<{number}@x>" for number in range(5)]
    for mark in (b"", b"\xef\xbb\xbf"):
        path.write_bytes(mark + b"".join(separator + one + b"\r\n" for one in mails))
        assert names(path) == names(path.parent) == expected
        assert [one.body for one in emails(path)] == [f"{number or 0}\n" for number in range(5)]


def test_quoted_from_crlf_nul_bytes_and_wrong_charsets_in_an_mbox(path: Path) -> None:
    crlf = mbox(mail(1, "one\n>From two"), mail(2)).replace(b"\n", b"\r\n")
    wrong = mail(4).replace(b"Subject", b"Content-Type: text/plain; charset=utf-8\nSubject") + b"caf\xe9\n"
    quoted = mail(5, ">From a\n>>From b\n> From c\nx >From d\n>From: e")
    path.write_bytes(crlf + mbox(mail(3, "a\0b"), wrong, quoted))
    one, two, three, four, five = emails(path)
    assert (one.body, two.body, three.body, four.body) == ("one\nFrom two\n", "2\n", "ab\n", "4\ncafé\n")
    assert "nul_bytes" in three.defects and "bad_charset" in four.defects
    assert five.body == "From a\n>From b\n> From c\nx >From d\n>From: e\n"


def test_a_missing_empty_line_loses_no_message_and_a_large_one_is_counted_once(path: Path) -> None:
    path.write_bytes(mail(1).replace(b"Message-ID", b"From : ann@x.org\nMessage-ID"))
    assert [one.file_name for one in emails(path.parent)] == ["mail.bin"], "no mbox"
    path.write_bytes(ENVELOPE + mail(1) + ENVELOPE + mail(2) + ENVELOPE + b"X-Empty: yes\n")
    assert names(path) == ["<1@x>", "<2@x>", "not_mail:mail.bin#3"]
    path.write_bytes(mbox(mail(1), mail(2, "b" * 3_000_000), mail(3), mail(4, "c" * 50_000)))
    expected = ["<1@x>", "too_large:mail.bin#2", "<3@x>", "too_large:mail.bin#4"]
    assert names(path, max_message_bytes=40_000) == expected


def trickle(content: bytes, seed: int) -> Iterator[bytes]:
    """Any number of bytes at a time."""
    stream, rng = io.BytesIO(content), random.Random(seed)
    return iter(lambda: stream.read(rng.choice([1, 7, 500, 3000])), b"")


@pytest.mark.parametrize("seed", range(5))
def test_an_envelope_astride_two_blocks_is_seen(seed: int) -> None:
    mails = [mail(number, "From x\n" * (number % 5) + "y" * 37 * number) for number in range(60)]
    named = [(f"m#{number}", one) for number, one in enumerate(mails, 1)]
    assert list(messages_of(trickle(mbox(*mails), seed), "m", 10_000)) == named
    short = [one if len(mbox(one[1])) <= 1000 else Skipped("too_large", one[0]) for one in named]
    assert list(messages_of(trickle(mbox(*mails), seed), "m", 1000)) == short


def test_an_mbox_that_breaks_off(path: Path) -> None:
    noise = "".join(random.Random(0).choices("abcdefghijklmnop", k=20_000))
    path.write_bytes(gzip.compress(mbox(mail(1), mail(2), mail(3, noise)))[:-2000])
    with pytest.raises(EmailRLError, match="is truncated or damaged after 2 complete messages"):
        names(path)
    assert names(path, allow_truncated=True) == ["<1@x>", "<2@x>", "truncated:mail.bin#3"]


def test_mail_that_thunderbird_has_deleted_is_skipped(path: Path) -> None:
    flags = (b"0001", b"0009", b"0008", b"1000", b"?")
    mails = [b"X-Mozilla-Status: " + flag + b"\n" + mail(number) for number, flag in enumerate(flags, 1)]
    content = mbox(*mails, mail(6, "X-Mozilla-Status: 0008\nwas in its file"))
    for line_end in (b"\n", b"\r\n"):
        path.write_bytes(content.replace(b"\n", line_end))
        assert names(path) == ["<1@x>", "deleted:mail.bin#2", "deleted:mail.bin#3", "<4@x>", "<5@x>", "<6@x>"]
