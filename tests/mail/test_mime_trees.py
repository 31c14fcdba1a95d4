"""MIME trees that are not as they should be: text is found, no raw MIME is shown, every repair is counted."""

from __future__ import annotations

import base64

import pytest

from emailrl.mail.sources import RawEmail, parse_message

HEAD = b"From: ann@x.org\nTo: bob@x.org\nMessage-ID: <1@x>\nDate: Tue, 1 May 2001 10:00:00 +0000\n"
INNER = b"Subject: inner\n\nInner text\n"
IN_BASE64 = b"Content-Transfer-Encoding: base64\n"


def read(raw: bytes) -> tuple[str, tuple[str, ...]]:
    email = parse_message(HEAD + raw)
    assert isinstance(email, RawEmail), email
    return email.body, email.defects


def mixed(boundary: bytes, delimiter: bytes, *parts: bytes) -> bytes:
    inside = b"".join(b"--" + delimiter + b"\n" + part + b"\n" for part in parts)
    return b"Content-Type: multipart/mixed; boundary=" + boundary + b"\n\n" + inside + b"--" + delimiter + b"--\n"


TEXT = b"Content-Type: text/plain\n\nThe text"


@pytest.mark.parametrize(
    ("raw", "defects"),
    [
        (mixed(b'"one\n two"', b"one two", TEXT), ()),
        (mixed(b'"one\n\ttwo"', b"one two", TEXT), ()),
        (mixed(b'"one\n two"', b"onetwo", TEXT), ()),
        (mixed(b'"one"', b"other", TEXT), ("bad_mime",)),
        (mixed(b"", b"other", TEXT), ("bad_mime",)),
        (b"Content-Type: multipart/mixed\n\tboundary=b\n\n--b\n" + TEXT + b"\n--b--", ("bad_mime",)),
        (mixed(b"b", b"b", TEXT).replace(b"\n--b\n", b"\n--b \t\n"), ()),
        (mixed(b"b", b"b", TEXT) + b"Epilogue\n--b\nContent-Type: text/plain\n\nMore\n", ()),
        (mixed(b"a", b"a", b"Content-Type: multipart/mixed; boundary=b\n\n--b\n" + TEXT), ()),
    ],
)
def test_delimiters(raw: bytes, defects: tuple[str, ...]) -> None:
    assert read(raw) == ("The text", defects)


def in_base64(content: bytes) -> bytes:
    return IN_BASE64 + b"\n" + base64.encodebytes(content)


@pytest.mark.parametrize("subtype", [b"rfc822", b"global", b"news"])
@pytest.mark.parametrize("content", [INNER, INNER.replace(b"\n", b"\r\n")])
def test_a_message_in_base64_is_read(subtype: bytes, content: bytes) -> None:
    forwarded = b"Content-Type: message/" + subtype + b"\n" + in_base64(content)
    assert read(forwarded) == ("Inner text\n", ())
    assert read(mixed(b"b", b"b", TEXT, forwarded)) == ("The text\nInner text\n", ())


def test_of_a_message_in_fragments_the_first_is_read() -> None:
    first = b'Content-Type: message/partial; id="i"; number=1; total=2\n\nSubject: s\nContent-Type: text/plain\n\nBegin'
    assert read(first) == ("Begin", ("partial_message",))
    second = b'Content-Type: message/partial; id="i"; number=2; total=2\n\nQUJD\n--b\nContent-Type: x/y\n\n'
    assert read(second) == ("", ("no_text", "partial_message"))


def test_reports_have_nothing_to_show_but_text_without_fields() -> None:
    status = b"Content-Type: message/delivery-status\n\nReporting-MTA: dns; x.org\n\nAction: failed\n"
    assert read(mixed(b"b", b"b", TEXT, status)) == ("The text", ())
    words = b"Content-Type: message/delivery-status\n\nIt could not be delivered.\n"
    assert read(mixed(b"b", b"b", words)) == ("It could not be delivered.\n", ("bad_header",))


NAMED = b'Content-Type: text/plain; name="letter.txt"\n\nDear Bob'
NAMED_HTML = b"Content-Type: text/html\nContent-Disposition: inline; filename=a.html\n\n<p>Dear Bob</p>"
PICTURE = b"Content-Type: image/png; name=a.png\n\nAAAA"


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (NAMED, ("Dear Bob", ("named_text",))),
        (mixed(b"b", b"b", NAMED, PICTURE), ("Dear Bob", ("named_text",))),
        (mixed(b"b", b"b", NAMED_HTML), ("Dear Bob", ("html_only", "named_text"))),
        (mixed(b"b", b"b", TEXT, NAMED), ("The text", ())),
        (mixed(b"b", b"b", b"Content-Type: text/html\n\n<p>Hi</p>", NAMED), ("Hi", ("html_only",))),
        (mixed(b"b", b"b", PICTURE), ("", ("no_text",))),
    ],
)
def test_the_only_text_is_kept_though_it_has_a_name(raw: bytes, expected: tuple[str, tuple[str, ...]]) -> None:
    assert read(raw) == expected


@pytest.mark.parametrize(
    ("encoding", "content", "expected"),
    [
        (b"base64;", b"SGVsbG8gQm9i", ("Hello Bob", ())),
        (b'"base64"', b"SGVsbG8NCkJvYg==", ("Hello\nBob", ())),
        (b"Base64", b"SGVsbG8gQm9", ("Hello Bo", ("bad_encoding",))),
        (b"base64", b"SGVsbG8g\0\nQm9iLCBob3cgYXJl\nIHlvdT8gV2UgbWlzc2Vk\nIHlvdSBoZXJ",
         ("Hello Bob, how are you? We missed you her", ("bad_encoding",))),
        (b"base64", b"This is plain, after all.", ("This is plain, after all.", ("bad_encoding",))),
        (b"quoted-printable", b"a=3Db=\nc=0D=0Ad", ("a=bc\nd", ())),
        (b"x-uuencode", b"begin 644 a\n#0V%T\n`\nend\n", ("Cat", ())),
    ],
)  # fmt: skip
def test_transfer_encodings(encoding: bytes, content: bytes, expected: tuple[str, tuple[str, ...]]) -> None:
    raw = b"Content-Type: text/plain; charset=utf-8\nContent-Transfer-Encoding: " + encoding + b"\n\n" + content
    assert read(raw) == expected


def test_containers_are_opened_to_a_depth() -> None:
    def nested(depth: int) -> bytes:
        around = b"".join(b"Content-Type: multipart/mixed; boundary=b%d\n\n--b%d\n" % (n, n) for n in range(depth))
        return around + TEXT

    assert read(nested(50)) == ("The text", ())
    assert read(nested(51)) == ("", ("bad_mime", "no_text"))


def test_the_charset_of_html_may_stand_in_it() -> None:
    html = '<html><head><meta charset="gb2312"></head><p>中文</p>'.encode("gb2312")
    assert read(b"Content-Type: text/html\n\n" + html) == ("中文", ("html_only",))
    subject = b"Subject: " + "中文".encode("gb2312") + b"\n"
    email = parse_message(HEAD + subject + b"Content-Type: text/plain; charset=gb2312\n\nx")
    assert isinstance(email, RawEmail) and email.subject == "中文"


def group(kind: bytes, *parts: bytes) -> bytes:
    mark = b"in-" + kind
    inside = b"".join(b"--" + mark + b"\n" + part + b"\n" for part in parts)
    return b"Content-Type: multipart/" + kind + b"; boundary=" + mark + b"\n\n" + inside + b"--" + mark + b"--\n"


def text(subtype: bytes, content: bytes, *headers: bytes) -> bytes:
    return b"Content-Type: text/" + subtype + b"; charset=utf-8\n" + b"".join(headers) + b"\n" + content


HTML, FOOTER, INVITATION = (
    text(b"html", b"<p>Main</p>"),
    text(b"plain", b"Footer"),
    text(b"calendar", b"BEGIN:VCALENDAR"),
)


@pytest.mark.parametrize(
    ("raw", "body"),
    [
        (group(b"mixed", HTML, FOOTER), "Main\nFooter"),
        (group(b"mixed", text(b"plain", b"Intro"), HTML, FOOTER), "Intro\nMain\nFooter"),
        (group(b"mixed", group(b"alternative", text(b"plain", b"Main"), HTML), FOOTER), "Main\nFooter"),
        (group(b"mixed", group(b"alternative", HTML), FOOTER), "Main\nFooter"),
        (group(b"alternative", text(b"plain", b"Plain"), group(b"mixed", HTML, FOOTER)), "Plain"),
        (group(b"alternative", HTML, text(b"plain", b"Plain")), "Plain"),
        (group(b"alternative", group(b"related", HTML), INVITATION), "Main"),
        (group(b"mixed", FOOTER, INVITATION), "Footer"),
        (group(b"mixed", text(b"plain", b" \n"), FOOTER), "Footer"),
        (group(b"mixed", text(b"plain", b"Main"), HTML), "Main"),
        (
            group(b"mixed", text(b"html", b"<p>Call <b>Ann</b> at\n 5</p>"), text(b"plain", b"Call *Ann* at 5\n")),
            "Call *Ann* at 5\n",
        ),
        (group(b"mixed", text(b"plain", b"Main, but more"), HTML), "Main, but more\nMain"),
    ],
)
def test_all_texts_of_a_mixed_mail_are_its_body_and_of_alternatives_one(raw: bytes, body: str) -> None:
    assert read(raw)[0] == body
    assert "html_only" not in read(raw)[1] or body == "Main"


@pytest.mark.parametrize("unseen", ["\u200b", "\ufeff", "\u200c\u200d", "\u00a0", " \n"])
def test_a_plain_part_that_shows_nothing_gives_way_to_html(unseen: str) -> None:
    raw = group(b"alternative", text(b"plain", unseen.encode()), HTML)
    assert read(raw) == ("Main", ("html_only",))


@pytest.mark.parametrize("subtype", [b"x-plain", b"markdown", b"calendar"])
def test_any_text_is_text_where_there_is_no_better(subtype: bytes) -> None:
    assert read(text(subtype, b"# Words")) == ("# Words", ())
    assert read(group(b"mixed", text(subtype, b"# Words"))) == ("# Words", ())


def test_enriched_text_is_shown_without_its_tags() -> None:
    raw = text(b"enriched", b"<bold>One</bold>\nline, 1 << 2.\n\n<color><param>red</param>Two</color>")
    assert read(raw) == ("One line, 1 < 2.\nTwo", ())


@pytest.mark.parametrize(
    ("delsp", "written", "shown"),
    [
        (b"", b"One \ntwo\nthree", "One two\nthree"),
        (b"; delsp=yes", b"One \ntwo  \nthree", "Onetwo three"),
        (b"; DelSp=No", b"One \n\ntwo", "One \n\ntwo"),
        (b"", b" From here \n on", "From here on"),
        (b"", b"> One \n> two\n>> Deep \n> not so", "> One two\n>> Deep \n> not so"),
        (b"", b"One \n-- \nAnn", "One \n-- \nAnn"),
    ],
)
def test_flowed_text_has_a_line_for_each_paragraph(delsp: bytes, written: bytes, shown: str) -> None:
    assert read(b'Content-Type: text/plain; charset="us-ascii"; format=flowed' + delsp + b"\n\n" + written) == (
        shown,
        (),
    )
    assert read(text(b"plain", written))[0] == written.decode()


def der(tag: int, *contents: bytes) -> bytes:
    content = b"".join(contents)
    size = len(content).to_bytes(2, "big")
    return bytes([tag]) + (bytes([len(content)]) if len(content) < 128 else b"\x82" + size) + content


PLAIN_CONTENT, SIGNED = bytes.fromhex("06092a864886f70d010701"), bytes.fromhex("06092a864886f70d010702")


def smime(*contents: bytes) -> bytes:
    """A mail that is nothing but CMS data around these."""
    cms = der(0x30, SIGNED, der(0xA0, der(0x30, b"\2\1\1", der(0x31), *contents, der(0x31, b"\2\1\7"))))
    head = (
        b"Content-Type: application/pkcs7-mime; smime-type=signed-data; name=smime.p7m\nContent-Disposition: attachment"
    )
    return head + b"; filename=smime.p7m\n" + in_base64(cms)


def test_what_an_opaque_signature_wraps_is_read() -> None:
    inner = TEXT.replace(b"\n", b"\r\n")
    assert read(smime(der(0x30, PLAIN_CONTENT, der(0xA0, der(0x04, inner))))) == ("The text", ())
    long = group(b"alternative", text(b"plain", b"word " * 100), HTML)
    assert read(smime(der(0x30, PLAIN_CONTENT, der(0xA0, der(0x04, long))))) == ("word " * 100, ())
    pieces = der(0x04, inner[:9]), der(0x04, inner[9:])
    assert read(smime(der(0x30, PLAIN_CONTENT, der(0xA0, der(0x24, *pieces))))) == ("The text", ())
    streamed = b"\x30\x80" + PLAIN_CONTENT + b"\xa0\x80\x24\x80" + b"".join(pieces) + bytes(6)
    assert read(smime(streamed)) == ("The text", ())


def test_cms_data_without_a_readable_message_says_why_it_shows_nothing() -> None:
    whole = smime(der(0x30, PLAIN_CONTENT, der(0xA0, der(0x04, TEXT))))
    detached = smime(der(0x30, PLAIN_CONTENT))
    encrypted = smime(der(0x30, PLAIN_CONTENT, der(0x30), der(0x80, b"cipher"))).replace(b"signed-d", b"enveloped-d")
    assert read(encrypted) == ("", ("encrypted", "no_text"))
    head, _, body = whole.partition(b"\n\n")
    for size in range(len(body)):
        assert read(head + b"\n\n" + body[:size])[0] in ("", "The text")
    assert read(detached) == ("", ("bad_mime", "no_text"))


def test_the_only_text_is_kept_though_it_is_attached_without_a_name() -> None:
    attached = text(b"plain", b"Words", b"Content-Disposition: attachment\n")
    assert read(group(b"mixed", attached)) == ("Words", ("named_text",))
    assert read(group(b"mixed", attached, FOOTER)) == ("Footer", ())


@pytest.mark.parametrize("content", [b"Hello to all who read this.", b"Hello to all who read this!!", b"A" * 100])
@pytest.mark.parametrize("padded", [True, False])
def test_base64_with_a_plain_footer_is_read_and_the_footer_kept(content: bytes, padded: bool) -> None:
    encoded = base64.encodebytes(content).rstrip(b"\n")
    encoded = encoded if padded else encoded.rstrip(b"=")
    footer = b"_______________\nmembers mailing list\nhttps://x.org/list"
    body, defects = read(IN_BASE64 + b"\n" + encoded + b"\n" + footer + b"\n")
    assert (body, set(defects)) == ((content + b"\n\n" + footer).decode(), {"bad_encoding"})
