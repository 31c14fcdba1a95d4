"""Makes text of what mail holds: bytes in any charset, HTML, enriched and flowed text.

As in mail programs (WHATWG Encoding), the label of an older charset means the superset that programs really write
under it. Python's codecs that are no charsets (punycode, zip …) are not used: some take quadratic time.
"""

from __future__ import annotations

import binascii
import re
import tomllib
from collections.abc import Callable
from encodings.aliases import aliases
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bs4.element import PageElement

_CODEC = re.compile(
    r"ascii|latin_1|utf_(?:7|8|16|32)(?:_[bl]e)?|utf_8_sig|cp\d+|iso8859_\d+|iso2022_(?:jp|kr)\w*|koi8_\w|mac_\w+"
    r"|big5\w*|gb2312|gbk|gb18030|hz|euc_\w+|shift_jis\w*|johab|tis_620|ptcp154|kz1048|hp_roman8"
)


def _key(label: str) -> str:
    return re.sub("[^a-z0-9]+", "", label.lower())


_TABLES = tomllib.loads(Path(__file__).with_name("charsets.toml").read_text(encoding="utf-8"))
_SUPERSETS: dict[str, str] = _TABLES["supersets"]
_CODECS = {
    _key(name): codec for alias, codec in aliases.items() if _CODEC.fullmatch(codec) for name in (alias, codec)
} | {label: codec for codec, labels in _TABLES["labels"].items() for label in labels.split()}
"""Codecs by label, reduced to letters and digits."""
_WITH_CONTROLS = frozenset(("latin_1", "iso8859_9", "iso8859_11", "tis_620"))
"""Charsets that read the bytes 0x80 to 0x9f as control characters; in mail these are letters of the superset."""
_CONTROLS = re.compile("[\x80-\x9f]")
_JIS_X_0208, _JIS_X_0213 = re.compile(rb"\x1b\$[@B]"), b"\x1b$(Q"
_HALF_WIDTH = b"\x1b(I"  # begins half-width kana, which only one superset of ISO-2022-JP supports
_LONGEST_LINE = 1000  # RFC 5322, 2.1.1
_TRUSTED_SHARE = 4
"""A label is accepted if its charset decodes this many times more non-ASCII characters than it fails to."""

_NO_BASE64 = re.compile(rb"[^A-Za-z0-9+/]+")
_STRAY_SHARE = 20  # Base64 has at most one stray character in this many; content with more is plain text
_BASE64_LINES = re.compile(rb"\s*+((?:[A-Za-z0-9+/]++={0,2}[ \t]*+(?:\n|\Z))++)")
_BASE64_LINE = 16  # a first line of this length without a space is Base64, not a word

MAX_CHARS = 500_000
"""Maximum characters of one HTML text, whose tree takes about a hundred times its memory, or of an attached file."""
_BLOCKS = re.compile(
    r"<(?=/?(?:address|blockquote|br|center|d[dlt]|div|h[1-6]|hr|li|ol|p|pre|table|title|tr|ul)[\s/>])", re.IGNORECASE
)
_CELLS = re.compile(r"<(?=/?t[dh][\s/>])", re.IGNORECASE)
# The parser searches for the end of an unclosed comment or tag again at every following "<", so half a megabyte of
# them takes minutes; both are closed before parsing.
_COMMENT = re.compile(r"<!--.*?(?:--!?>|\Z)", re.DOTALL)
_PRE = re.compile(r"(<pre(?:\s[^<>]*)?>)(.*?)(?=</pre|\Z)", re.DOTALL | re.IGNORECASE)
_LINE_END = re.compile(r"<[^<>]*>|\n")
_HIDDEN = re.compile(r"display\s*:\s*none", re.IGNORECASE)
_EVENT = re.compile(r"^BEGIN:(?:VEVENT|VTODO)\n.*?(?=^END:V(?:EVENT|TODO)|\Z)", re.MULTILINE | re.DOTALL)
_ALARM = re.compile(r"^BEGIN:VALARM\n.*?^END:VALARM", re.MULTILINE | re.DOTALL)
_TOLD = re.compile(
    r'^(SUMMARY|DTSTART|DTEND|DUE|LOCATION|ORGANIZER|DESCRIPTION)((?:;[^":\n]*(?:"[^"\n]*"[^":\n]*)*)?):(.+)$',
    re.MULTILINE,
)
_PARAMETER = re.compile(r';([A-Z]+)="?([^";]*)')
_ESCAPED = re.compile(r"\\(.)")
_TIME = re.compile(r"(\d{4})(\d\d)(\d\d)(?:T(\d\d)(\d\d)\d\d(Z?))?")
_ENRICHED = re.compile(r"<param>[^<]*</param>|\n(?=\n)", re.IGNORECASE)


def codec_of(label: str) -> str | None:
    """Return Python's codec for a charset label in any spelling, or None if mail uses no such charset."""
    key = _key(label.partition("*")[0])  # what follows an asterisk is a language (RFC 2231)
    return _CODECS.get(key) or _CODECS.get(key.removeprefix("x"))


def beginning(content: bytes, most: int) -> bytes:
    """Return at most so many first bytes of a text, whole lines unless they are longer than those of mail may be."""
    end = content.rfind(b"\n", max(most - _LONGEST_LINE, 0), most) + 1
    return content if len(content) <= most else content[: end or most]


def decode(raw: bytes, label: str, defects: list[str]) -> str:
    """Decode bytes by the charset, or else as UTF-8, the charset's superset or Windows-1252. ``bad_charset`` is added
    to ``defects`` if the label is wrong. UTF-8 comes first because other text is hardly ever valid UTF-8. Text with a
    few broken characters keeps all others."""
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
        text = raw.decode(superset or codec, "replace").rstrip("\ufffd")  # its last character may be cut
        broken = text.count("\ufffd")
        if max(1, _TRUSTED_SHARE * broken) <= sum(character > "\x7f" for character in text) - broken:
            return text
    return raw.decode("cp1252", "replace")


def _strictly(raw: bytes, codec: str) -> str | None:
    if codec == "iso2022_jp_2004":  # its characters are in a charset of another name
        raw = _JIS_X_0208.sub(_JIS_X_0213, raw)
    try:
        return raw.decode(codec)
    except ValueError:
        return None


def from_base64(body: bytes, defects: list[str]) -> bytes:
    """Return the content of Base64, with the plain-text footer that a mailing list may have added."""
    found = _BASE64_LINES.match(body)
    if found and (footer := body[found.end() :].strip()) and _has_strays(footer):
        lines = found[1].rstrip()
        if len(lines.split(None, 1)[0]) >= _BASE64_LINE or lines.endswith(b"="):
            defects.append("bad_encoding")
            return from_base64(lines, []).rstrip() + b"\n\n" + footer
    try:
        return binascii.a2b_base64(body)
    except binascii.Error:
        defects.append("bad_encoding")
    content = body.replace(b"=", b"")
    if _has_strays(content):
        return body
    letters = _NO_BASE64.sub(b"", content)
    return binascii.a2b_base64(letters[: len(letters) - (len(letters) % 4 == 1)] + b"==")


def _has_strays(content: bytes) -> bool:
    """Whether there are more other characters among those of Base64 than a broken line has."""
    written = content.translate(None, b" \t\n\r\v\f")
    return _STRAY_SHARE * (len(written) - len(_NO_BASE64.sub(b"", written))) > len(written)


def as_text(kind: str, text: str, parameter: Callable[[str], str], defects: list[str]) -> str:
    """Return what a text of a MIME type, which may have a ``parameter``, shows."""
    match kind:
        case "text/html":
            return html_to_text(text, defects)
        case "text/calendar":
            return calendar_to_text(text)
        case "text/enriched":  # RFC 1896: one line end is a space, and n line ends are n - 1
            html = _ENRICHED.sub(lambda it: "<br>" * (it[0] == "\n"), text.replace("<<", "&lt;"))
            return html_to_text(html, defects)
        case "text/plain" if parameter("format").lower() == "flowed":
            return flowed_to_text(text, delete_spaces=parameter("delsp").lower() == "yes")
    return text


def flowed_to_text(text: str, *, delete_spaces: bool) -> str:
    """Return the text of ``format=flowed`` (RFC 3676) with each paragraph on one line; ``delete_spaces`` is DelSp. A
    line that ends in a space continues on the next one of the same quote depth; signature separators and empty lines
    stay alone."""
    paragraphs: list[list[str]] = []
    open_depth = None  # of the paragraph being continued
    for line in text.split("\n"):
        content = line.lstrip(">")
        depth = len(line) - len(content)
        content = content.removeprefix(" ")
        is_mark = content == "-- "
        flows = content.endswith(" ") and not is_mark
        shown = content[:-1] if flows and delete_spaces else content
        if depth == open_depth and content and not is_mark:
            paragraphs[-1].append(shown)
        else:
            paragraphs.append([f"{'>' * depth} {shown}" if depth else shown])
        open_depth = depth if flows else None
    return "\n".join(map("".join, paragraphs))


def calendar_to_text(text: str) -> str:
    """Return what the events and tasks of iCalendar (RFC 5545) tell people; the text itself if there are none."""
    shown = list[str]()
    for event in _EVENT.findall(text.replace("\n ", "").replace("\n\t", "")):
        for name, written, value in _TOLD.findall(_ALARM.sub("", event)):
            parameters = dict(_PARAMETER.findall(written))
            value = _ESCAPED.sub(lambda found: "\n" if found[1] in "nN" else found[1], value.strip())
            if time := _TIME.fullmatch(value):
                zone = " UTC" if time[6] else f" {parameters['TZID']}" if "TZID" in parameters else ""
                value = "-".join(time.groups()[:3]) + (f" {time[4]}:{time[5]}{zone}" if time[4] else "")
            shown.append(
                f"{name.removeprefix('DT').capitalize()}: {' '.join(filter(None, (parameters.get('CN'), value)))}"
            )
    return "\n".join(shown) or text


def html_to_text(html: str, defects: list[str]) -> str:
    """Return the visible text of an HTML email, one line per block. Only the first ``MAX_CHARS`` characters are
    read (``long_text`` in ``defects``); if the parser rejects the markup, only its tags are removed (``bad_html``)."""
    from bs4 import ParserRejectedMarkup

    if len(html) > MAX_CHARS:
        defects.append("long_text")
        complete, begun, _ = html[:MAX_CHARS].rpartition("<")  # a tag may be cut through
        html = complete if begun else html[:MAX_CHARS]
    html = _PRE.sub(_with_breaks, _COMMENT.sub("", html).replace("\0", ""))
    html = _CELLS.sub(" <", _BLOCKS.sub("\n<", " ".join(html.split())))
    complete, end, rest = html.rpartition(">")
    html = complete + end + rest.replace("<", "&lt;")
    try:
        text = _visible_text(html)
    except ParserRejectedMarkup:
        defects.append("bad_html")
        text = re.sub(r"<[^>]*>", " ", html)
    lines = (" ".join(line.split()) for line in text.split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _visible_text(html: str) -> str:
    """The text outside the title and hidden tags; all of it if none is visible. Each node is visited once: taking tags
    out of the tree takes quadratic time if they are nested or many."""
    from bs4 import BeautifulSoup
    from bs4.element import CData, NavigableString, Tag

    class Soup(BeautifulSoup):
        def _linkage_fixer(self, el: Tag) -> None:
            """Do nothing: it serves parsers that move nodes, and climbs to the root at each text in nested blocks."""

    soup = Soup(html, "html.parser")
    shown: list[str] = []
    nodes: list[PageElement] = [soup]
    while nodes:
        node = nodes.pop()
        if isinstance(node, Tag):
            if node.name != "title" and not _HIDDEN.search(str(node.get("style", ""))):
                nodes += reversed(node.contents)
        elif type(node) in (NavigableString, CData):  # not comments, scripts and styles
            shown.append(str(node))
    text = "".join(shown)
    return text if text.strip() else soup.get_text()


def _with_breaks(preformatted: re.Match[str]) -> str:
    """Preformatted text with a break for each line end outside tags."""
    inside = preformatted[2].removeprefix("\n")
    return preformatted[1] + _LINE_END.sub(lambda found: "<br>" if found[0] == "\n" else found[0], inside)
