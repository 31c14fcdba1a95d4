"""Charsets of mail: what a label means, and what becomes of text that does not fit it."""

from __future__ import annotations

import pytest

from emailrl.mail.sources.text import codec_of, decode


@pytest.mark.parametrize(
    ("label", "codec"),
    [
        ("x-sjis", "shift_jis"), ("cp-850", "cp850"), ("iso-8859-8-i", "iso8859_8"), ("x-mac-roman", "mac_roman"),
        ("macintosh", "mac_roman"), ("ks_c_5601-1987", "euc_kr"), ("Windows-1252", "cp1252"), ("utf8", "utf_8"),
        ("unicode-1-1-utf-7", "utf_7"), ("windows-874", "cp874"), ("ISO_8859-1:1987", "latin_1"), ("KOI8-R", "koi8_r"),
        ("x-gbk", "gbk"), ("utf-8*en", "utf_8"), ("csISO2022JP", "iso2022_jp"), ("us-ascii", "ascii"),
        ("punycode", None), ("idna", None), ("zip", None), ("hex", None), ("rot13", None), ("base64", None),
        ("unicode_escape", None), ("raw_unicode_escape", None), ("undefined", None), ("x-unknown", None), ("", None),
    ],
)  # fmt: skip
def test_labels(label: str, codec: str | None) -> None:
    assert codec_of(label) == codec


@pytest.mark.parametrize(
    ("label", "codec", "text"),
    [
        ("gb2312", "gb18030", "镕是朱的名字"), ("gbk", "gb18030", "中文㐀"), ("euc-kr", "cp949", "똠방각하 한국어"),
        ("ks_c_5601-1987", "cp949", "펲시콜라"), ("shift_jis", "cp932", "①②㈱ 日本語"), ("x-sjis", "cp932", "髙橋"),
        ("big5", "big5hkscs", "香港嘅㗎"), ("euc-jp", "euc_jis_2004", "①日本語"), ("iso-8859-9", "cp1254", "“İyi”"),
        ("iso-8859-1", "cp1252", "“It’s 5 €”"), ("us-ascii", "cp1252", "It’s"), ("tis-620", "cp874", "ไทย…"),
        ("iso-8859-1", "utf-8", "Æ 中文"), ("gb2312", "utf-8", "中文 text"),  # UTF-8 under another label is UTF-8
    ],
)  # fmt: skip
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
