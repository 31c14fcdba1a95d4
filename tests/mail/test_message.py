"""One message from bytes to ``RawEmail``: the short path, the library's path, and their agreement."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emailrl.mail.sources import RawEmail, Skipped, parse_message
from emailrl.mail.sources.dates import parse_date
from emailrl.mail.sources.mime import parse_mime

PLAIN = b"""Message-ID: <1.2.JavaMail.ann@x>
Date: Mon, 14 May 2001 16:39:00 -0700 (PDT)
From: Ann.Lee@X.org
To: bob@x.org, cy..d@x.org,
\te'f@x.org
Subject: Gas budget,
 second draft
Cc: bob@x.org, bob@x.org
X-From: Ann Lee
Content-Type: text/plain; charset=us-ascii
Content-Transfer-Encoding: 7bit

Hello,

see below.
"""


def parsed(raw: bytes) -> RawEmail:
    email = parse_message(raw, "a/1.")
    assert isinstance(email, RawEmail), email
    return email


def test_a_plain_mail_in_full() -> None:
    assert parsed(PLAIN) == RawEmail(
        "<1.2.JavaMail.ann@x>", "Gas budget, second draft", "ann.lee@x.org", ["bob@x.org", "cy..d@x.org", "e'f@x.org"],
        ["bob@x.org", "bob@x.org"], [], datetime(2001, 5, 14, 23, 39, tzinfo=UTC), "Hello,\n\nsee below.\n", "a/1.",
    )  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        (b"", b""),
        (b"\n", b"\r\n"),
        (b"us-ascii\nContent-Transfer-Encoding: 7bit", b"utf-8\nContent-Transfer-Encoding: quoted-printable"),
        (b"charset=us-ascii", b'charset="ISO-8859-1"'),
        (b"Ann.Lee@X.org", b"Legal <.Hall@enron.com>"),
        (b"bob@x.org, cy..d@x.org", b"R&D-1 <a@b.c>, plain@x.org, o'b <q@r>"),
        (b"Content-Type: text/plain; charset=us-ascii\n", b""),
        (b"Subject: Gas budget,\n second draft\n", b""),
        (b"Subject: Gas budget,\n second draft", b"Subject:"),
        (b"To: bob", b"tO : bob"),
    ],
)
def test_both_paths_agree(change: tuple[bytes, bytes]) -> None:
    raw = PLAIN.replace(*change)
    assert parse_message(raw, "n") == parse_mime(raw.replace(b"\r\n", b"\n"), "n")


ADDRESSES = st.lists(
    st.sampled_from(["a@b.c", "A.B..C@d.e", "legal <.h@x.y>", "Jim O'Neil <j@x>", '"Lee, A" <l@x>', "<z@z>", "x",
                     "group:;", "(note) c@d", "u@v (note)", "", "two words", "a@b@c", "r/s <t@u>", "é <e@f>"]),
    max_size=4,
)  # fmt: skip


@settings(deadline=None)
@given(ADDRESSES, st.sampled_from([", ", ",", ",  ", ",\n "]))
def test_both_paths_read_the_same_addresses(addresses: list[str], comma: str) -> None:
    raw = f"From: a@b\nTo: {comma.join(addresses)}\nSubject: s\n\nbody".encode()
    assert parse_message(raw) == parse_mime(raw)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("Mon, 14 May 2001 16:39:00 -0700 (PDT)", datetime(2001, 5, 14, 23, 39, tzinfo=UTC)),
        ("Tue, 1 Jan 2002 00:30:00 +0100", datetime(2001, 12, 31, 23, 30, tzinfo=UTC)),
        ("14 May 2001 16:39:00 +0530", datetime(2001, 5, 14, 11, 9, tzinfo=UTC)),
        ("Mon, 14 May 01 16:39:00 GMT", datetime(2001, 5, 14, 16, 39, tzinfo=UTC)),
        ("Mon, 14 May 2001 16:39", datetime(2001, 5, 14, 16, 39, tzinfo=UTC)),
        ("Mon, 32 May 2001 16:39:00 -0700", None),
        ("Mon, 14 Mai 2001 16:39:00 -0700", None),
        ("Sat, 1 Jan 0001 00:00:00 +0500", None),
        ("Mon, 14 May 2001 16:39:00 +2359", datetime(2001, 5, 13, 16, 40, tzinfo=UTC)),
        ("Mon, 14 May 2001 16:39:00 +2400", None),
        ("Mon, 14 May 2001 16:39:00 -9999", None),
        ("Mon, 14 May 01 16:39:00 -2400", None),
        ("Mon, 14 May 01 16:39:00 +9900", None),
        ("Mon, 14 May 2001 16:39:00 EST5EDT", datetime(2001, 5, 14, 20, 39, tzinfo=UTC)),
        ("Mon, 15 Jan 2001 16:39:00 EST5EDT", datetime(2001, 1, 15, 21, 39, tzinfo=UTC)),
        ("Sun Oct 28 12:00:00 PST8PDT 2001", datetime(2001, 10, 28, 20, 0, tzinfo=UTC)),
        ("Mon, 14 May 2001 16:39:00 EST5EDT -0500", datetime(2001, 5, 14, 21, 39, tzinfo=UTC)),
        ("Mon, 14 May 2001 16:39:00 -0700 (EST5EDT)", datetime(2001, 5, 14, 23, 39, tzinfo=UTC)),
        ("yesterday", None),
        ("", None),
    ],
)
def test_dates_are_in_utc(value: str, expected: datetime | None) -> None:
    assert parse_date(value) == expected


MIME = b"""From: =?utf-8?q?J=C3=B6rg?= <Joerg@X.org>
To: "Lee, Ann" <ann@x.org>, undisclosed-recipients:;
Subject: =?iso-8859-1?q?Caf=E9?= =?utf-8?b?w6k=?= plan
Date: Mon, 14 May 2001 16:39:00 +0000
Message-ID: <m@x>
MIME-Version: 1.0
Content-Type: multipart/mixed; boundary=B

--B
Content-Type: multipart/alternative; boundary=C

--C
Content-Type: text/plain; charset=iso-8859-1
Content-Transfer-Encoding: quoted-printable

Caf=E9 at noon=
 then
--C
Content-Type: text/html

<p>Not this</p>
--C--
--B
Content-Type: text/plain
Content-Disposition: attachment; filename=a.txt

Nor this
--B--
"""


def test_a_mime_tree_gives_its_plain_text() -> None:
    email = parsed(MIME)
    assert email.body == "Café at noon then"
    assert email.subject == "Caféé plan"
    assert (email.from_address, email.to) == ("joerg@x.org", ["ann@x.org"])


def test_html_alone_becomes_text() -> None:
    html = "<style>x</style><p>Gas &amp; oil</p><p>café<br>two</p>".encode()
    email = parsed(b"From: a@b\nContent-Type: text/html; charset=utf-8\n\n" + html)
    assert email.body == "Gas & oil\n\ncafé\ntwo"
    assert "html_only" in email.defects


@pytest.mark.parametrize(
    ("charset", "raw", "text", "defects"),
    [
        ("us-ascii", "né".encode(), "né", ("bad_charset",)),
        ("no-such", b"n\xe9", "né", ("bad_charset",)),
        ("iso-8859-1", b"n\xe9", "né", ()),
        ("utf-8", b"a\0b", "ab", ("nul_bytes",)),
        ("utf-16", b"odd", "odd", ("bad_charset",)),
        ("utf-8", "a\ue0001b".encode(), "a\ufffd1b", ()),
    ],
)
def test_charsets_wrong_missing_and_hostile(charset: str, raw: bytes, text: str, defects: tuple[str, ...]) -> None:
    email = parsed(
        b"From: a@b\nMessage-ID: <1>\nDate: 1 Jan 2001 00:00:00 +0000\nContent-Type: text/plain; charset="
        + charset.encode() + b"\n\n" + raw
    )  # fmt: skip
    assert (email.body, email.defects) == (text, defects)


def test_what_is_missing_is_mended_and_noted() -> None:
    raw = b"Subject: alone\n\nbody"
    email = parsed(raw)
    assert email.date is None
    assert email.defects == ("no_date", "no_message_id", "no_sender")
    assert email.message_id == parsed(raw).message_id != parsed(b"Subject: alone\n\nbody2").message_id
    assert "bad_date" in parsed(b"From: a@b\nDate: soon\n\n").defects


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "empty"), (b" \n\n", "empty"), (b"Just a note.\nNothing else.\n", "not_mail"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "not_mail"), (b"Name: value\n\nFrom: not a header\n", "not_mail"),
    ],
)  # fmt: skip
def test_what_is_no_mail_is_skipped(raw: bytes, reason: str) -> None:
    assert parse_message(raw, "f") == Skipped(reason, "f")


def test_an_mbox_envelope_line_is_no_header() -> None:
    assert parsed(b"From ann Mon May 14 2001\n" + PLAIN) == parsed(PLAIN)


def test_huge_headers_take_no_huge_time() -> None:
    many = b"To: " + b"name <a@b.c>, " * 20_000 + b"\x01"
    long = b"Subject: " + b"x " * 500_000
    email = parsed(b"From: a@b\n" + many + b"\n" + long + b"\n\nbody")
    assert len(email.to) >= 20_000
    assert len(email.subject) == 999_999


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
