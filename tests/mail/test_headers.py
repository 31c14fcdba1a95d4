"""Header lines that are not as they should be: one odd line costs no other, and each is counted."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from emailrl.mail.sources import RawEmail, parse_message

HEAD = b"From: ann@x.org\nTo: bob@x.org\nMessage-ID: <1@x>\nDate: Tue, 1 May 2001 10:00:00 +0000\nSubject: s\n"
MENDED = ("bad_header",)


def parsed(raw: bytes) -> RawEmail:
    email = parse_message(raw, "f")
    assert isinstance(email, RawEmail), email
    return email


@pytest.mark.parametrize("line", [b"an odd line", b"two words: x", b"\xe9t\xe9: x", b"odd\n with a second line"])
@pytest.mark.parametrize("before", [0, 1, 3])
def test_an_odd_line_costs_no_other(line: bytes, before: int) -> None:
    lines = HEAD.splitlines()
    email = parsed(b"\n".join([*lines[:before], line, *lines[before:], b"", b"x"]))
    expected = parsed(HEAD + b"\nx")
    expected.defects = MENDED
    assert email == expected


def test_an_odd_line_after_a_comma_goes_on_with_the_list() -> None:
    email = parsed(HEAD.replace(b"bob@x.org", b"bob@x.org,\ncy@x.org") + b"\nx")
    assert (email.to, email.subject, email.defects) == (["bob@x.org", "cy@x.org"], "s", MENDED)


@pytest.mark.parametrize(
    "body", [b"Hello Bob,\nhow are you?\n", b"Hello\n\nThe second paragraph\n", b"Note\nthis: text\n"]
)
def test_a_body_without_an_empty_line_before_it_is_whole(body: bytes) -> None:
    email = parsed(HEAD + body)
    assert (email.body, email.subject, email.defects) == (body.decode(), "s", MENDED)


def test_spaces_before_the_colon() -> None:
    raw = HEAD.replace(b":", b" :", 1).replace(b"To:", b"To \t:").replace(b"Date:", b"Date  :")
    assert parsed(raw + b"\nx") == parsed(HEAD + b"\nx")
    assert parsed(b"From : ann@x.org\n\nx").from_address == "ann@x.org"


def test_envelope_lines_among_headers_are_no_defect() -> None:
    assert parsed(b">From ann@x.org Mon May 14 16:39:00 2001\n" + HEAD + b"\nx") == parsed(HEAD + b"\nx")


@pytest.mark.parametrize(
    ("value", "hour"),
    [
        (b"Tue, 1 May 2001 06:09:22 PM EDT", 22), (b"Tue, 1 May 2001 12:09:22 AM +0000", 0),
        (b"Tue, 1 May 2001 12:09:22 pm", 12), (b"Tue, 1 May 2001 6:09:22 p.m. GMT", 18),
        (b"Tue, 1 May 2001 16:09:22 PM +0000", 16),
        (b"Tue, 1 May 2001 00:09:22 (EDT) -0400", 4), (b"Tue, 1 May 2001 00:09:22 EDT -0400", 4),
        (b"Tue, 1 May 2001 00:09:22 (PDT)", 7), (b"Tue, 1 May 2001 00:09:22 -0400 (EDT)", 4),
        (b"Tue, 1 May 2001 00:09:22 -0400 EDT", 4), (b"Tue, 1 May 2001 00:09:22 (a note) (b) -0400", 4),
        (b"Tue, 1 May 2001 13:09:22 CEST", 11), (b"Tue, 1 May 2001 13:09:22 JST", 4),
        (b"Tue, 1 May 2001 13:09:22 +02:00", 11), (b"Tue, 1 May 2001 13:09:22 GMT+2", 11),
        (b"Tue, 1 May 2001 13:09:22 GMT+0200", 11), (b"Tue, 1 May 2001 13:09:22 UTC", 13),
        (b"Tue, 1 May 2001 13 : 09(minutes): 22 +0000", 13), (b"Tue, 1 May 2001 13:09:22.123 +0100", 12),
        (b"Tue, 01 May 2001 13:09:22 GMT (Greenwich Mean Time)", 13), (b"1 May 01 13:09:22 EST", 18),
        (b"Tue May  1 13:09:22 2001", 13), (b"Tue May  1 13:09:22 EDT 2001", 17),
        (b"2001-05-01T13:09:22-04:00", 17), (b"2001-05-01 13:09:22", 13),
    ],
)  # fmt: skip
def test_dates_as_programs_write_them(value: bytes, hour: int) -> None:
    email = parsed(b"From: a@x.org\nMessage-ID: <1@x>\nDate: " + value + b"\n\nx")
    assert (email.date, email.defects) == (datetime(2001, 5, 1, hour, 9, 22, tzinfo=UTC), ())


def test_a_raw_subject_in_iso_2022_jp() -> None:
    email = parse_message(b"From: ann@x.org\nSubject: Re: \x1b$B$3$s\x1b(B!\n\nHello\n")
    assert isinstance(email, RawEmail)
    assert email.subject == "Re: こん!"


@pytest.mark.parametrize(
    ("value", "date"),
    [
        (b"Tue, 1 May 101 10:00:00 +0000", datetime(2001, 5, 1, 10, tzinfo=UTC)),
        (b"Tue, 1 May 2001 23:59:60 +0000", datetime(2001, 5, 1, 23, 59, 59, tzinfo=UTC)),
        (b"Tue, 01 May 2001 10:00:60 GMT", datetime(2001, 5, 1, 10, 0, 59, tzinfo=UTC)),
        (b"Mon, 1 Jan 2001 10:00:00 EST5EDT", datetime(2001, 1, 1, 15, tzinfo=UTC)),
    ],
)
def test_short_years_leap_seconds_and_zones_with_both_names(value: bytes, date: datetime) -> None:
    email = parse_message(b"From: a@x.org\nMessage-ID: <1@x>\nDate: " + value + b"\n\nx")
    assert isinstance(email, RawEmail)
    assert (email.date, email.defects) == (date, ())
