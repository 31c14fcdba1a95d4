"""Ten thousand mails spoiled at random: every one is stored or counted, each in a moment."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hang import must_end

from emailrl.mail.build import build_database
from emailrl.mail.sources import RawEmail, parse_message

SOUND = [
    b"From: Ann Lee <ann@x.org>\nTo: bob@x.org,\n\tCy <cy@x.org>\nSubject: Gas\nMessage-ID: <1@x>\n"
    b"Date: Mon, 14 May 2001 16:39:00 -0700 (PDT)\n\nHello,\n\nFrom here on we drill.\n",
    b"From: =?utf-8?q?J=C3=B6rg?= <j@x.org>\nTo: \"Lee, Ann\" <ann@x.org>, team: b@x, c@x;\n"
    b"Subject: =?iso-8859-1?b?Q2Fm6Q==?= =?utf-8?b?w6k=?=\nDate: 14 May 01 06:09:22 PM EDT\n"
    b'Content-Type: multipart/mixed;\n boundary="one\n two"\n\nPreamble\n--one two\n'
    b"Content-Type: multipart/alternative; boundary=in\n\n--in\n"
    b"Content-Type: text/plain; charset=iso-8859-1\nContent-Transfer-Encoding: quoted-printable\n\nCaf=E9 =\nat noon\n"
    b"--in\nContent-Type: text/html; charset=utf-8\n\n<p>Caf\xc3\xa9 <b>at</b> noon &amp; then</p><!-- x -->\n--in--\n"
    b"--one two\nContent-Type: message/rfc822\nContent-Transfer-Encoding: base64\n\nU3ViamVjdDogcw0KDQpJbm5lcg0K\n"
    b'--one two\nContent-Type: text/plain; name="a.txt"\nContent-Disposition: attachment\n\nAttached\n--one two--\n',
    b"From : root (the (real) one)\nTo: <@r.org:a@x.org>, 'b@x' <b@x.org>\nDate: 2001-05-14T16:39:00+02:00\n"
    b"an odd line\nSubject: s\nContent-Type: text/plain; charset=gb2312\n\n\xd6\xd0\xce\xc4\xe9F\n",
    b"From: a@x\nSubject: s\nContent-Type: text/html\n\n"
    b"<html><meta charset=koi8-r><table><tr><td>\xf0\xf2<br>x</table>",
    b'From: a@x\nContent-Type: message/partial; number=1; total=2; id="i"\n\nSubject: s\nMIME-Version: 1.0\n\nText\n',
    b"From: a@x\nContent-Type: text/plain; charset*=utf-8''iso-2022-jp\nContent-Transfer-Encoding: x-uuencode\n\n"
    b"begin 644 a\n#0V%T\n`\nend\n",
]  # fmt: skip
SPLINTERS = [
    b"\n", b"\n\n", b"\r\n", b"\0", b"\xff", b"<", b">", b'"', b"\\", b"(", b")", b",", b";", b":", b"@", b"=", b"=?",
    b"?=", b"--", b"\n--one two\n", b"\n--in--\n", b"charset=punycode", b"charset=utf-16", b"base64", b"From ",
    b"\nFrom - \n", b"multipart/mixed", b"message/rfc822", b"boundary=", b"\x1b$B", b"+AAA-", b"&#", b"<!--", b"</",
    b"\xef\xbb\xbf",
]  # fmt: skip


def spoiled(random_: random.Random) -> bytes:
    mail = bytearray(random_.choice(SOUND))
    for _ in range(random_.choice([1, 2, 5, 20])):
        at = random_.randrange(len(mail) + 1)
        size = random_.choice([1, 1, 4, 40])
        match random_.randrange(5):
            case 0:
                del mail[at : at + size]
            case 1:
                mail[at:at] = random_.choice(SPLINTERS) * random_.choice([1, 1, 1, 50])
            case 2:
                mail[at : at + size] = random_.randbytes(size)
            case 3:
                mail[at:at] = mail[random_.randrange(len(mail) + 1) :][: 10 * size]
            case _:
                other = random_.choice(SOUND)
                mail[at:] = other[random_.randrange(len(other)) :]
    return bytes(mail)


@pytest.mark.slow
def test_ten_thousand_spoiled_mails(tmp_path: Path) -> None:
    random_ = random.Random(0)
    read = []
    for number in range(10_000):
        raw = spoiled(random_) + b" %d" % number
        with must_end():
            email = parse_message(raw, f"{number}.")
        assert isinstance(email, RawEmail) or email.reason in ("empty", "not_mail"), raw
        read.append(email)
    report = build_database(read, tmp_path / "mail.db")
    assert report.emails + sum(report.skipped.values()) == 10_000
    assert report.emails > 5000 and len(report.defects) > 12
