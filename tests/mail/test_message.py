"""One message from bytes to ``RawEmail``: mail as programs write it and as nobody should, by either path."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hang import must_end
from hypothesis import given, settings
from hypothesis import strategies as st
from mail.mails import TABLES

from emailrl.mail.sources import RawEmail, Skipped, headers, message, parse_message
from emailrl.mail.sources.headers import addresses_of, parse_date
from emailrl.mail.sources.reading import MAX_READ_BYTES

CASES = Path(__file__).parent / "cases"


def parse_mime(raw: bytes, name: str = "") -> RawEmail | Skipped:
    """The long way, which plain messages do not take."""
    with patch.object(message, "_plain", return_value=None):
        return parse_message(raw, name)


def fields(email: RawEmail | Skipped) -> dict[str, Any]:
    if isinstance(email, Skipped):
        return {"skipped": email.reason}
    names = ("message_id", "subject", "from_address", "to", "cc", "bcc", "body")
    date = email.date and f"{email.date:%Y-%m-%d %H:%M:%S}"
    return {name: getattr(email, name) for name in names} | {"date": date, "defects": list(email.defects)}


@pytest.mark.parametrize("path", sorted(CASES.glob("*.eml")), ids=lambda path: path.stem)
def test_a_message_is_read_as_the_file_beside_it_says(path: Path) -> None:
    raw, expected = path.read_bytes(), json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    assert fields(parse_message(raw)) == expected
    assert fields(parse_mime(raw)) == expected


ADDRESSES = st.lists(
    st.sampled_from(["a@b.c", "A.B..C@d.e", "legal <.h@x.y>", "Jim O'Neil <j@x>", '"Lee, A" <l@x>', "<z@z>", "x",
                     "group:;", "(note) c@d", "u@v (note)", "", "two words", "a@b@c", "r/s <t@u>", "é <e@f>"]),
    max_size=4,
)  # fmt: skip


@settings(deadline=None)
@given(ADDRESSES, st.sampled_from([", ", ",", ",  "]))
def test_plain_addresses_are_read_as_any_others(addresses: list[str], comma: str) -> None:
    value = comma.join(addresses)
    found = addresses_of(value)
    with patch.object(headers, "_plain_addresses", return_value=None):
        assert addresses_of(value) == found


@pytest.mark.parametrize(("value", "expected"), TABLES["test_dates_are_in_utc"])
def test_dates_are_in_utc(value: str, expected: str | None) -> None:
    found = parse_date(value)
    assert (found and f"{found:%Y-%m-%d %H:%M:%S%z}") == (expected and f"{expected}+0000")


@pytest.mark.parametrize(("value", "expected"), TABLES["test_the_address_of_an_item"])
def test_the_address_of_an_item(value: str, expected: list[str]) -> None:
    assert addresses_of(value) == expected


@pytest.mark.parametrize("piece", ["<", "<‹", '"', '\\"', "(", "()", "[", ",", ":", '"a"@', "a@b, ", "n <a@b>,", "\\"])
def test_time_grows_with_the_length_alone(piece: str) -> None:
    with must_end():
        addresses_of(piece * (300_000 // len(piece)))


def test_a_truncated_signature_is_read_or_shows_nothing() -> None:
    head, _, body = (CASES / "opaque-signature-1.eml").read_bytes().partition(b"\n\n")
    for size in range(len(body)):
        email = parse_message(head + b"\n\n" + body[:size])
        assert isinstance(email, RawEmail) and email.body in ("", "The text")


HEAD = b"From: ann@x.org\nTo: bob@x.org\nMessage-ID: <1@x>\nDate: Tue, 1 May 2001 10:00:00 +0000\n"
MIXED = HEAD + b"Content-Type: multipart/mixed; boundary=b\n\n"
HOSTILE = {
    "encoded words": HEAD + b"Subject: " + b"=?utf-8?q?a?= " * 200_000 + b"\n\nx",
    "parameters": HEAD + b'Content-Type: text/plain; x="' + b";a" * 200_000 + b"\n\nx",
    "parts": MIXED + b"--b\n\nt\n" * 10_000,
    "containers": HEAD + b"".join(b"Content-Type: multipart/x; boundary=b%d\n\n--b%d\n" % (n, n) for n in range(2000)),
    "brackets": HEAD + b"Cc: " + b"(" * 200_000 + b"\n\nx",
    "folds": HEAD + b"Subject: a" + b"\n b" * 200_000 + b"\n\nx",
    "dates": b"From: a@b\nDate: " + b"1:" * 200_000 + b"\n\nx",
    "many brackets": HEAD + b"Cc: " + "<‹".encode() * 250_000 + b"\n\nx",
    "many plain people": HEAD + b"Cc: " + b"Ann <a@b>, " * 20_000 + b"\x01\nSubject: " + b"x " * 500_000 + b"\n\nx",
    "many people": HEAD + b"Cc: \xc3\xa9 <a@b>, " + b"Ann <ann@x.org>, " * 800_000 + b"\n\nx",
    "punycode": HEAD + b"Content-Type: text/plain; charset=punycode\n\n" + b"a-b9" * 250_000,
    "idna": HEAD + b"Content-Type: text/plain; charset=idna\n\n" + b"xn--a." * 150_000,
    "odd lines": HEAD + b"odd\n" * 200_000 + b"Subject: s\n\nx",
    "lines in containers": HEAD
    + b"".join(b"Content-Type: multipart/x; boundary=b%d\n\n--b%d\n" % (n, n) for n in range(300)) + b"\n" * 500_000,
    "delimiters": HEAD + b"Content-Type: multipart/mixed\n\n" + (b"--" + b" " * 99 + b"\n") * 10_000,
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_made_to_take_for_ever_takes_moments(name: str) -> None:
    with must_end():
        email = parse_message(HOSTILE[name], "f")
    assert isinstance(email, RawEmail) or email.reason == "unreadable"
    if name == "encoded words":
        assert isinstance(email, RawEmail) and (email.subject[:3], email.defects) == ("aaa", ("long_header",))
    if name == "many plain people":
        assert isinstance(email, RawEmail) and len(email.cc) >= 20_000 and len(email.subject) == 999_999
    if name == "many people":
        assert isinstance(email, RawEmail) and email.defects == ("long_header",)
        assert 50_000 < len(email.cc) < 70_000  # of a million characters, 17 each


def test_a_mail_that_breaks_off_says_so_where_that_can_be_told() -> None:
    head = b"From: ann@x.org\nTo: bob@x.org\nDate: 1 May 2026 10:00:00 +0000\nMessage-ID: <1@x>\n"
    parts = head + b"Content-Type: multipart/mixed; boundary=b\n\n--b\n\nText\n--b--\n"
    emlx = b"%d\n" % len(parts) + parts
    for whole, lengths in ((head + b"\nText\n", [60, len(head)]), (parts, [len(parts) - 4]), (emlx, [len(emlx) - 1])):
        assert parse_message(whole).defects == ()  # type: ignore[union-attr]
        for length in lengths:
            assert "cut_off" in parse_message(whole[:length]).defects, whole[:length]  # type: ignore[union-attr]
    assert parse_message(head + b"Text without an empty line\n").defects == ("bad_header",)  # type: ignore[union-attr]


NESTED = b"".join(b"Content-Type: multipart/mixed; boundary=b%d\n\n--b%d\n" % (n, n) for n in range(45))
BOMBS = {
    "parts": b"Content-Type: multipart/mixed; boundary=b\n\n" + b"--b\n\nx\n" * 1_500_000,
    "parts in parts": b"Content-Type: multipart/mixed; boundary=a\n\n"
    + (b"--a\nContent-Type: multipart/mixed; boundary=b\n\n" + b"--b\n\nx\n" * 150) * 9_000,
    "containers": NESTED + b"Content-Type: application/x\n\n" + (b"a" * 76 + b"\n") * 130_000,
    "headers": b"".join(b"X-%d: v\n" % n for n in range(1_000_000)) + b"\nx",
    "text": b"\n" + "é word\n".encode() * 1_300_000,
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_memory_is_a_few_times_the_size_of_a_message(name: str) -> None:
    raw = HEAD + BOMBS[name]
    tracemalloc.start()
    try:
        email = parse_message(raw, "f")
        assert tracemalloc.get_traced_memory()[1] < 120_000_000
    finally:
        tracemalloc.stop()
    assert isinstance(email, RawEmail) and len(email.body) <= MAX_READ_BYTES
    told = {"headers": "long_header", "text": "long_text", "parts": "bad_mime", "parts in parts": "bad_mime"}
    assert told.get(name, "cut_off") in email.defects


@settings(max_examples=300, deadline=None)
@given(
    st.binary(max_size=300),
    st.sampled_from([b"", b"From: a@b\n", b"Subject: =?utf-8?q?", b"Content-Type: multipart/x; boundary=\n", b"To: <"]),
)
def test_any_bytes_are_a_mail_or_skipped(raw: bytes, head: bytes) -> None:
    email = parse_message(head + raw, "f")
    if isinstance(email, RawEmail):
        for text in (email.subject, email.body, email.message_id, email.from_address, *email.to, *email.cc, *email.bcc):
            text.encode()
            assert "\0" not in text


def test_a_short_html_is_not_lost_behind_a_notice() -> None:
    head = "From: a@x\nSubject: s\nContent-Type: multipart/alternative; boundary=B\n\n--B\nContent-Type: text/plain\n\n"
    parts = "Your program cannot show HTML.\n--B\nContent-Type: text/html\n\n<p>Back payment: 96.31 euros.</p>\n--B--\n"
    body = fields(parse_message((head + parts).encode()))["body"]
    assert "Back payment: 96.31 euros." in str(body)
