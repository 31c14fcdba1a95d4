"""JSONL and Parquet: every row is a mail, or counted."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
from mail.mails import EXPECTED, emails, lines, names, row, write_parquet

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.mail.sources import open_source


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
    assert names(path) == ["<1@x>", "<2@x>"]
    assert names(path, max_message_bytes=2_100_000) == ["<1@x>", "<2@x>"]


def test_hostile_lines_are_counted(path: Path) -> None:
    odd = [
        b"[" * 100_000, b'{"message_id": 1}', b"[]", b'"text"', b"{broken", b"9" * 5000,
        lines(row(1, date=True)).strip(), lines(row(1, to="a@b")).strip(), lines(row(1, body={})).strip(),
        lines(row(1, file_name=3)).strip(),
    ]  # fmt: skip
    path.write_bytes(lines(row(1)) + b"\n".join(odd) + b"\n" + lines(row(2)))
    found = names(path)
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
    assert names(path, max_message_bytes=1000) == ["<1@x>", "too_large:mail.bin#2", "<3@x>"]
    whole = lines(row(1), row(2))
    path.write_bytes(whole[:-1])
    assert names(path) == ["<1@x>", "<2@x>"], "the last line end is no part of a row"
    path.write_bytes(whole[:-10])
    with pytest.raises(EmailRLError, match="after 1 complete rows"):
        names(path)
    assert names(path, allow_truncated=True) == ["<1@x>", "truncated:mail.bin#2"]
    noise = "".join(random.Random(0).choices("abcdefghijklmnop", k=20_000))
    path.write_bytes(gzip.compress(lines(row(1), row(2), row(3, body=noise)))[:-2000])
    with pytest.raises(EmailRLError, match="after 2 complete rows"):
        names(path)
    assert names(path, allow_truncated=True) == ["<1@x>", "<2@x>", "truncated:mail.bin#3"]


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
    assert names(path, max_message_bytes=1000) == ["<1@x>", "too_large:mail.bin#2"]
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(EmailRLError, match="is truncated or damaged after 0 complete rows"):
        names(path)
    assert names(path, allow_truncated=True) == ["truncated:mail.bin#1"]
    write_parquet(path, {"message_id": "1", "body": "b"})
    with pytest.raises(UsageError, match="not a mail archive"):
        open_source(path)
