"""Adds the text of attached files to the body that an agent reads and searches, each below a line with its name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from emailrl.mail.database import clean_text
from emailrl.mail.sources.documents import MAX_BYTES, MAX_CHARS, PDF_START, WORD_MEMBER, ZIP_START, Documents
from emailrl.mail.sources.text import decode, html_to_text

MARK = "[Attachment: {}]"
documents = Documents()

_TEXT, _HTML, _CALENDAR = "text", "html", "calendar"
_KINDS = {
    **dict.fromkeys(("text/plain", "text/csv", "text/markdown", "txt", "csv", "tsv", "md", "log"), _TEXT),
    **dict.fromkeys(("text/html", "application/xhtml+xml", "html", "htm"), _HTML),
    **dict.fromkeys(("text/calendar", "ics"), _CALENDAR),
}
"""How to read a file by its type, or else by the ending of its name."""
_BYTE_ORDER = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16", b"\xef\xbb\xbf": "utf-8-sig"}
_FOLD = re.compile(r"\r?\n[ \t]")
_CALENDAR_ESCAPE = re.compile(r"\\([nN,;\\])")


class AttachedFile(NamedTuple):
    """A file of an email, without its transfer encoding."""

    name: str  # as shown
    kind: str  # its declared type
    charset: str
    content: bytes


def with_attachments(body: str, files: Iterable[AttachedFile], defects: list[str]) -> str:
    """Return a body followed by the text of its attached files. ``attachment_unread`` in ``defects``: a file of a known
    kind has no text that can be read; ``attachment_cut``: one is longer than ``MAX_CHARS``."""
    texts = [body]
    for file in files:
        text = _text(file)
        if text == "":
            defects.append("attachment_unread")
        elif text and text not in body:  # a file is the body where there is no other text
            if len(text) >= MAX_CHARS:
                defects.append("attachment_cut")
            texts.append(f"{MARK.format(file.name)}\n{text[:MAX_CHARS]}")
    return "\n\n".join(filter(None, texts))


def _text(file: AttachedFile) -> str | None:
    """The text of a file: an empty one if it cannot be read, None if it is of no known kind."""
    content = file.content
    if PDF_START in content[:1024] or (content.startswith(ZIP_START) and WORD_MEMBER.encode() in content):
        return clean_text(documents.text(content)).strip()
    kind = _KINDS.get(file.kind) or _KINDS.get(file.name.rpartition(".")[2].lower())
    if kind is None:
        return None
    charset = next((code for mark, code in _BYTE_ORDER.items() if content.startswith(mark)), "")
    if len(content) > MAX_BYTES or (b"\0" in content and not charset):
        return ""
    text = decode(content, charset or file.charset or "us-ascii", []).replace("\r\n", "\n").removeprefix("\ufeff")
    if kind == _HTML:
        text = html_to_text(text, [])
    elif kind == _CALENDAR:
        text = _CALENDAR_ESCAPE.sub(lambda found: found[1].replace("n", " ").replace("N", " "), _FOLD.sub("", text))
    return clean_text(text).strip()
