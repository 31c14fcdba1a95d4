"""Decodes the charsets of mail: from a message's label to a codec, and from bytes to text.

Labels follow the WHATWG Encoding standard, as in mail programs and browsers: the label of an older charset means the
superset that programs really write under it. Only charsets used in mail are known; Python's other codecs (punycode,
zip, rot13 …) are not charsets, and some take quadratic time.
"""

from __future__ import annotations

import re
from encodings.aliases import aliases

_CODEC = re.compile(
    r"ascii|latin_1|utf_(?:7|8|16|32)(?:_[bl]e)?|utf_8_sig|cp\d+|iso8859_\d+|iso2022_(?:jp|kr)\w*|koi8_\w|mac_\w+"
    r"|big5\w*|gb2312|gbk|gb18030|hz|euc_\w+|shift_jis\w*|johab|tis_620|ptcp154|kz1048|hp_roman8"
)
_NO_LETTER = re.compile(r"[^a-z0-9]+")


def _key(label: str) -> str:
    return _NO_LETTER.sub("", label.lower())


_CODECS = {
    _key(name): codec for alias, codec in aliases.items() if _CODEC.fullmatch(codec) for name in (alias, codec)
} | {
    label: codec
    for codec, labels in {
        "big5": "big5eten",
        "cp874": "windows874 dos874",
        "euc_kr": "ksc5601",
        "gb2312": "gb2312",
        "iso8859_6": "iso88596i iso88596e",
        "iso8859_8": "iso88598i iso88598e",
        "koi8_t": "koi8t",
        "koi8_u": "koi8u",
        "mac_cyrillic": "macukrainian",
        "mac_roman": "macintosh mac",
        "utf_8": "unicode11utf8 utf8mb4",
        "utf_16": "unicode ucs2",
    }.items()
    for label in labels.split()
}
"""Codecs by label, reduced to letters and digits."""

_SUPERSETS = {
    "big5": "big5hkscs",
    "cp950": "big5hkscs",
    "euc_jp": "euc_jis_2004",
    "euc_kr": "cp949",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "iso2022_jp": "iso2022_jp_2004",
    "iso8859_9": "cp1254",
    "iso8859_11": "cp874",
    "latin_1": "cp1252",
    "shift_jis": "cp932",
    "tis_620": "cp874",
}
_WITH_CONTROLS = frozenset(("latin_1", "iso8859_9", "iso8859_11", "tis_620"))
"""Charsets that read the bytes 0x80 to 0x9f as control characters; in mail these are letters of the superset."""
_CONTROLS = re.compile("[\x80-\x9f]")
_JIS_X_0208, _JIS_X_0213 = re.compile(rb"\x1b\$[@B]"), b"\x1b$(Q"
_HALF_WIDTH = b"\x1b(I"
"""Begins half-width kana, which only one superset of ISO-2022-JP supports."""
_TRUSTED_SHARE = 4
"""A label is accepted if its charset decodes this many times more non-ASCII characters than it fails to."""


def codec_of(label: str) -> str | None:
    """Return Python's codec for a charset label in any spelling, or None if mail uses no such charset."""
    key = _key(label.partition("*")[0])  # what follows an asterisk is a language (RFC 2231)
    return _CODECS.get(key) or _CODECS.get(key.removeprefix("x"))


def decode(raw: bytes, label: str, defects: list[str]) -> str:
    """Decode bytes by the charset, or else as UTF-8, the charset's superset or Windows-1252.

    ``bad_charset`` is added to ``defects`` if the label is wrong. UTF-8 comes first because other text is hardly ever
    valid UTF-8. Text with a few broken characters keeps all others.
    """
    codec = codec_of(label)
    text = _strictly(raw, codec) if codec else None
    if text is not None and not (codec in _WITH_CONTROLS and _CONTROLS.search(text)):
        return text
    defects.append("bad_charset")
    superset = "iso2022_jp_ext" if codec == "iso2022_jp" and _HALF_WIDTH in raw else _SUPERSETS.get(codec or "")
    for candidate in filter(None, (superset, "utf_8") if raw.isascii() else ("utf_8", superset)):
        text = _strictly(raw, candidate)
        if text is not None:
            return text
    if codec:
        text = raw.decode(superset or codec, "replace")
        broken = text.count("\ufffd")
        if _TRUSTED_SHARE * broken <= sum(character > "\x7f" for character in text) - broken:
            return text
    return raw.decode("cp1252", "replace")


def _strictly(raw: bytes, codec: str) -> str | None:
    if codec == "iso2022_jp_2004":  # its characters are in a charset of another name
        raw = _JIS_X_0208.sub(_JIS_X_0213, raw)
    try:
        return raw.decode(codec)
    except ValueError:
        return None
