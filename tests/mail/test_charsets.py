"""Charsets of mail: what a label means, and what becomes of text that does not fit it."""

from __future__ import annotations

import pytest
from mail.mails import TABLES

from emailrl.mail.sources.message import parse_message
from emailrl.mail.sources.reading import RawEmail
from emailrl.mail.sources.text import codec_of, decode


@pytest.mark.parametrize(("label", "codec"), TABLES["test_labels"])
def test_labels(label: str, codec: str | None) -> None:
    assert codec_of(label) == codec


@pytest.mark.parametrize(("label", "codec", "text"), TABLES["test_a_sign_of_the_superset_spoils_nothing"])
def test_a_sign_of_the_superset_spoils_nothing(label: str, codec: str, text: str) -> None:
    defects: list[str] = []
    assert (decode(text.encode(codec), label, defects), defects) == (text, ["bad_charset"])


def test_iso_2022_jp_of_other_programs_has_signs_of_windows_and_half_width_kana() -> None:
    for raw, text in ((b"\x1b$B-!F|K\\\x1b(B", "①日本"), (b"\x1b(I1234\x1b(B \x1b$B$3$s\x1b(B", "ｱｲｳｴ こん")):
        defects: list[str] = []
        assert (decode(raw, "iso-2022-jp", defects), defects) == (text, ["bad_charset"])


@pytest.mark.parametrize(
    ("label", "codec", "text", "broken"),
    [
        *((label, label, "中文中文中文中文中文", b" \xff.") for label in ("utf-8", "gb2312", "shift_jis")),
        ("euc-kr", "euc_kr", "한국어 한국어 한국어", b" \xff."),
        ("windows-1253", "cp1253", "ελληνικά κείμενα", b" \xd2."),
        *((label, label, text, b"") for label, text in (("koi8-r", "привет"), ("utf-7", "héé"), ("cp850", "é½"))),
    ],
)
def test_one_broken_sign_costs_itself_alone(label: str, codec: str, text: str, broken: bytes) -> None:
    defects: list[str] = []
    assert decode(text.encode(codec) + broken, label, defects).startswith(text)
    assert defects == (["bad_charset"] if broken else [])


@pytest.mark.parametrize("label", ["utf-8", "us-ascii", "gb2312", "no-such", "hex"])
def test_what_fits_nothing_is_windows_1252_or_utf_8(label: str) -> None:
    assert decode(b"caf\xe9.", label, []) == "café."
    assert decode("It’s a café".encode(), label, []) == "It’s a café"


def test_a_subject_cut_within_its_last_character_keeps_the_others() -> None:
    email = parse_message(b"From: a@x.org\nSubject: =?utf-8?Q?r=C3=A9par=C3=A9e_=E2=82?=\n\nb")
    latin = parse_message(b"From: a@x.org\nSubject: =?utf-8?Q?caf=E9?=\n\nb")
    assert isinstance(email, RawEmail) and isinstance(latin, RawEmail)
    assert (email.subject, latin.subject) == ("réparée", "café")
