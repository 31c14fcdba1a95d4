"""Adds the text of attached files to the body that an agent reads and searches, each below a line with its name."""

from __future__ import annotations

from dataclasses import replace

from emailrl.mail.database import clean_text
from emailrl.mail.sources.documents import MAX_CHARS, PDF_START, WORD_MEMBER, ZIP_START, Documents
from emailrl.mail.sources.headers import shown_name
from emailrl.mail.sources.message import Part
from emailrl.mail.sources.reading import RawEmail
from emailrl.mail.sources.text import as_text, beginning, decode

documents = Documents()

_KINDS = dict.fromkeys(["text/plain", "text/csv", "text/markdown", "txt", "csv", "tsv", "md", "log"], "text/plain")
_KINDS |= dict.fromkeys(["text/html", "application/xhtml+xml", "html", "htm"], "text/html")
_KINDS |= dict.fromkeys(["text/calendar", "ics"], "text/calendar") | dict.fromkeys(["application/pdf", "pdf"], "paged")
_KINDS["docx"] = "paged"
"""As what to read a file by its type, or else by the ending of its name."""


def with_attachments(email: RawEmail) -> RawEmail:
    """Return an email whose body is followed by the text of its attached files. Defects: ``attachment_unread`` if no
    text of a file of a known kind can be read, ``attachment_cut`` if it is longer than ``MAX_CHARS``."""
    texts, defects = {"": email.body}, set(email.defects)
    for part in email.files:
        name = shown_name(part.name)
        try:
            text = _text(name, part)
        except Exception:  # as in ``parse_message``: the library raises many kinds on hostile input
            text = ""
        if text == "":
            defects.add("attachment_unread")
        elif text and text not in email.body:  # a file is the body where there is no other text
            if len(text) >= MAX_CHARS:
                defects.add("attachment_cut")
            title = f": {name}" if name else ""
            texts[text] = f"[Attachment{title}]\n{text[:MAX_CHARS]}"  # once: it may be inside and attached
    return replace(email, body="\n\n".join(filter(None, texts.values())), defects=tuple(sorted(defects)))


def _text(name: str, part: Part) -> str | None:
    """The text of a file: an empty one if it cannot be read, None if it is of no known kind."""
    content = part.decoded([])
    kind = _KINDS.get(part.get_content_type()) or _KINDS.get(name.rpartition(".")[2].lower())
    is_word = content.startswith(ZIP_START) and WORD_MEMBER.encode() in content
    if PDF_START in content[:1024] or is_word or kind == "paged":
        return clean_text(documents.text(content)).replace("\u00ad", "")
    if kind is None:
        return None
    charset = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else part.charset
    content = beginning(content, 4 * MAX_CHARS)
    if b"\0" in content and charset != "utf-16":
        return ""
    text = decode(content, charset or "us-ascii", []).replace("\r\n", "\n").removeprefix("\ufeff")
    return clean_text(as_text(kind, text, part.parameter, [])).replace("\u00ad", "").strip()
