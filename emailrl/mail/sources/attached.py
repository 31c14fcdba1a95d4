"""Adds the text of attached files to the body that an agent reads and searches, each below a line with its name."""

from __future__ import annotations

import time
from dataclasses import replace

from emailrl.mail.database import clean_text
from emailrl.mail.sources.documents import CPU_SECONDS, PDF_START, WORD_MEMBER, ZIP_START, Documents
from emailrl.mail.sources.headers import shown_name
from emailrl.mail.sources.message import Part
from emailrl.mail.sources.reading import MAX_READ_BYTES, RawEmail
from emailrl.mail.sources.text import MAX_CHARS, as_text, beginning, decode

documents = Documents()

_KINDS = dict.fromkeys(["text/plain", "text/csv", "text/markdown", "txt", "csv", "tsv", "md", "log"], "text/plain")
_KINDS |= dict.fromkeys(["text/html", "application/xhtml+xml", "html", "htm"], "text/html")
_KINDS |= dict.fromkeys(["text/calendar", "ics"], "text/calendar") | dict.fromkeys(["application/pdf", "pdf"], "paged")
_KINDS["docx"] = "paged"
"""As what to read a file by its type, or else by the ending of its name."""


_MARK, _IN_TEXT = "[Attachment", "[ Attachment"  # no text that is read has the mark itself


def with_attachments(email: RawEmail) -> RawEmail:
    """Return an email whose body is followed by the text of its attached files, until ``MAX_READ_BYTES`` characters are
    exceeded. Defects: ``attachment_unread`` for one of a known kind without text, ``long_text`` over ``MAX_CHARS``."""
    texts, defects, size = {"": email.body.replace(_MARK, _IN_TEXT)}, [*email.defects], len(email.body)
    until = time.monotonic() + CPU_SECONDS  # by the clock: no file is begun after it
    for part in email.files:
        name = shown_name(part.name)
        try:
            is_begun = size <= MAX_READ_BYTES and time.monotonic() < until
            text = _text(name, part, defects, is_begun=is_begun)
        except Exception:  # as in ``parse_message``: the library raises many kinds on hostile input
            text = ""
        if text == "":
            defects.append("attachment_unread")
        elif text and text not in email.body:  # a file is the body where there is no other text
            if len(text) > MAX_CHARS:
                defects.append("long_text")
            shown = f"{f': {name}' if name else ''}]\n{text[:MAX_CHARS]}".replace(_MARK, _IN_TEXT)
            texts[text] = _MARK + shown  # once: it may be inside and attached
            size += len(shown)
    return replace(email, body="\n\n".join(filter(None, texts.values())), defects=tuple(sorted({*defects})))


def _text(name: str, part: Part, defects: list[str], *, is_begun: bool) -> str | None:
    """The text of a file: an empty one if it cannot be read or is not begun, None if it is of no known kind."""
    content = part.decoded([])
    kind = _KINDS.get(part.get_content_type()) or _KINDS.get(name.rpartition(".")[2].lower())
    is_word = content.startswith(ZIP_START) and WORD_MEMBER.encode() in content
    kind = "paged" if PDF_START in content[:1024] or is_word else kind
    if kind is None or not is_begun:
        return None if kind is None else ""
    if kind == "paged":
        return clean_text(documents.text(content)).replace("\u00ad", "")
    charset = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else part.charset
    start = beginning(content, 8 * MAX_CHARS)
    if len(start) < len(content):
        defects.append("long_text")
    if b"\0" in start and charset != "utf-16":
        return ""
    text = decode(start, charset or "utf-8", defects).replace("\r\n", "\n").removeprefix("\ufeff")
    return clean_text(as_text(kind, text, part.parameter, defects)).replace("\u00ad", "").strip()
