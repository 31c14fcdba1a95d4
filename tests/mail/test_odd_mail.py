"""Mail as other programs write it, and as nobody should: what is read of it, and what is noted as wrong."""

from __future__ import annotations

import pytest
from hang import must_end

from emailrl.mail.sources import RawEmail, parse_message

HEAD = b"From: ann@x.org\nTo: bob@x.org\nMessage-ID: <1@x>\nDate: Tue, 1 May 2001 10:00:00 +0000\n"
MIXED = HEAD + b"Content-Type: multipart/mixed; boundary=b\n\n"


def parsed(raw: bytes) -> RawEmail:
    email = parse_message(raw, "f")
    assert isinstance(email, RawEmail)
    return email


def part(kind: bytes, text: bytes, more: bytes = b"") -> bytes:
    return b"--b\nContent-Type: " + kind + b"\n" + more + b"\n" + text + b"\n"


ATTACHED = b"Content-Disposition: attachment; filename=a.eml\n"


PLAIN, HTML = part(b"text/plain", b"Plain"), part(b"text/html", b"<p>In HTML</p>")
INNER = b"Subject: s\n\nInner"
LOG = part(b"text/plain", b"A log", b'Content-Disposition: attachment; filename="log.txt"\n')


@pytest.mark.parametrize(
    ("raw", "body", "defects"),
    [
        (MIXED + part(b"text/plain", b" \n") + HTML + b"--b--", "In HTML", ("html_only",)),
        (MIXED + PLAIN + HTML + b"--b--", "Plain\nIn HTML", ()),
        (MIXED + HTML + PLAIN + b"--b--", "In HTML\nPlain", ()),
        (MIXED + PLAIN + part(b"message/rfc822", INNER, ATTACHED) + b"--b--", "Plain", ()),
        (MIXED + PLAIN + part(b"message/rfc822", INNER) + b"--b--", "Plain\nInner", ()),
        (MIXED + part(b"text/plain", b"No end of it"), "No end of it", ()),
        (HEAD + b"Content-Type: multipart/mixed\n\nNo boundary", "No boundary", ("bad_mime",)),
        (MIXED + b"No parts", "No parts", ("bad_mime",)),
        (HEAD + b"Content-Type: application/pdf\n\nAAAA", "", ("no_text",)),
        (MIXED + LOG + b"--b--", "", ("no_text",)),
        (HEAD + b"Content-Transfer-Encoding: x-own\n\nplain", "plain", ()),
        (HEAD + b"Content-Type: text/plain; charset=utf-16\n\n" + "été".encode("utf-16"), "été", ()),
        (HEAD + b"\nA\0B", "AB", ("nul_bytes",)),
    ],
)
def test_bodies(raw: bytes, body: str, defects: tuple[str, ...]) -> None:
    email = parsed(raw)
    assert (email.body, email.defects) == (body, defects)


@pytest.mark.parametrize("raw", ["Grüße aus Köln".encode(), "Grüße aus Köln".encode("latin-1")])
def test_a_subject_in_bare_bytes(raw: bytes) -> None:
    assert parsed(HEAD + b"Subject: " + raw + b"\n\nx").subject == "Grüße aus Köln"
    assert parsed(b"To: " + raw + b" <Bob@X.org>\n" + HEAD[16:] + b"\nx").to[0] == "bob@x.org"


@pytest.mark.parametrize("subject", [b"s", b"=?utf-8?q?s?="])
def test_people_of_every_to_header(subject: bytes) -> None:
    email = parsed(HEAD + b"Subject: " + subject + b"\nTo: cy@x.org\nSubject: another\nTO: Dee <dee@x.org>\n\nx")
    assert email.to == ["bob@x.org", "cy@x.org", "dee@x.org"]
    assert email.subject == "s"


@pytest.mark.parametrize("before", [b"\xef\xbb\xbf", b"\n\n", b"\r\n"])
def test_what_stands_before_the_headers(before: bytes) -> None:
    assert parsed(before + HEAD + b"Subject: s\n\nx") == parsed(HEAD + b"Subject: s\n\nx")


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_apple_mails_files(end: bytes) -> None:
    mail = (HEAD + b"Subject: s\n\nThe body\n").replace(b"\n", end)
    email = parsed(b"%-10d\n" % len(mail) + mail + b'<?xml version="1.0"?><plist></plist>\n')
    assert (email.message_id, email.body, email.defects) == ("<1@x>", "The body\n", ())


HOSTILE = {
    "encoded words": HEAD + b"Subject: " + b"=?utf-8?q?a?= " * 200_000 + b"\n\nx",
    "parameters": HEAD + b'Content-Type: text/plain; x="' + b";a" * 200_000 + b"\n\nx",
    "parts": MIXED + b"--b\n\nt\n" * 10_000,
    "containers": HEAD + b"".join(b"Content-Type: multipart/x; boundary=b%d\n\n--b%d\n" % (n, n) for n in range(2000)),
    "brackets": HEAD + b"Cc: " + b"(" * 200_000 + b"\n\nx",
    "folds": HEAD + b"Subject: a" + b"\n b" * 200_000 + b"\n\nx",
    "dates": b"From: a@b\nDate: " + b"1:" * 200_000 + b"\n\nx",
    "many brackets": HEAD + b"Cc: " + "<‹".encode() * 250_000 + b"\n\nx",
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
    if name == "many people":
        assert isinstance(email, RawEmail) and email.defects == ("long_header",)
        assert 50_000 < len(email.cc) < 70_000  # of a million characters, 17 each
