"""Literals, copied character by character: email and web addresses, paths, file names, phone numbers, extensions,
versions, codes."""

from __future__ import annotations

import re
from dataclasses import dataclass

EMAIL = r"[\w.+'-]{1,64}@[\w-]+(?:\.[\w-]+)+"
URL = r"(?:https?://|www\.)[^\s<>()\"']+[\w/]"
_PATTERNS = {
    "email": EMAIL,
    "url": URL,
    "path": r"(?:\b[A-Za-z]:|\\)\\[^\s,;()]*[\w\\]|(?<![\w/])/(?:[\w.-]+/)+[\w.-]*\w",
    "file": r"(?<![\w.@/\\-])[a-z\d][\w-]*(?:\.[\w-]+)*"
    r"\.(?:xlsx?|docx?|pptx?|pdf|txt|csv|zip|jpe?g|png|gif|rtf|mdb|html?|xml|json|eml|wpd|tiff?)\b(?![\w@])",
    "phone": r"\+\d[\d\s().-]{6,16}\d"
    r"|(?<![\w.])(?:\(?\d{1,3}\)?[\s.-]+)?(?:\(?\d{3}\)?[\s./-]*)?\d{3}[\s.-]\d{4}(?!\w)"
    r"|(?<!\w)\(?\d{3}\)?[\s.-]*\d{7}(?!\w)",
    "extension": r"\b(?:ext(?:ension)?\b\.?\s*|x\s?)\d[\d-]*\d\b|(?<![\w.-])\d-\d{4}(?![\w-])",
    "version": r"\b(?!\d{1,2}\.\d{1,2}\.(?:\d\d){1,2}(?!\d|\.\d))v?\d+(?:\.\d+){2,}(?!\w)|\b(?:v"
    r"|version\s)\d+(?:\.\d+)+(?!\w)",
    "code": r"\b[a-z]{1,4}-?\d{2,}(?:\.[a-z\d]+)+\b|"
    r"\b(?!(?:USD|EUR|GBP|US|MAY|JUN|JUL|SEP|IN|AT|ON|BY|NO|FY|CY|PM) )(?-i:[A-Z]{2,4}[ -](?!\d{5}\b)"
    r"|[A-Z]-)\d{2,}[A-Z]?\b(?!-[A-Z\d]{1,3}\b)"
    r"|\b(?=[\w/-]{0,40}\d)(?=[\w/-]{0,40}[a-z])(?!\d+(?:st|nd|rd|th|k|m|mm|bn|b|[ap]m|h|hrs?|kg|t|km|mw|kw|l|s"
    r"|-[a-z]{3,})\b)"
    r"[a-z0-9]+(?:[-/][a-z0-9]+){0,8}\b(?:\s\d{2,}\b)?",
}
PATTERNS = {kind: re.compile(pattern, re.IGNORECASE) for kind, pattern in _PATTERNS.items()}
"""Patterns by kind, in search order; text taken by one is hidden from the next."""


@dataclass(frozen=True, slots=True)
class Literal:
    """A literal: its kind, and its characters in one normalized spelling."""

    kind: str
    text: str

    def agrees(self, other: Literal) -> bool:
        """Whether the characters are the same; phone numbers may lack country and area code."""
        if self.kind == other.kind == "phone":
            shorter, longer = sorted((self.text, other.text), key=len)
            return len(shorter) >= 7 and longer.endswith(shorter)
        return self.text == other.text

    def contradicts(self, other: Literal) -> bool:
        """Whether the other is another literal of the same form: INV-20449 or PO-20448 for INV-20448, but not 12A."""
        if self.kind == "code":
            forms = {re.sub(r"\d+", "9", re.sub(r"[a-z]+", "a", code)) for code in (self.text, other.text)}
            return self.text != other.text and len(forms) == 1
        return not self.agrees(other)

    @property
    def spellings(self) -> re.Pattern[str]:
        """A pattern that finds the literal in any spelling: other separators, with or without a prefix."""
        if self.kind in ("code", "phone", "extension"):
            runs = re.findall(r"[a-z]+|\d", self.text)
            body = r"[\s().\u2013/-]{0,3}".join(map(re.escape, runs))
        elif self.kind == "file":
            name, _, ending = self.text.rpartition(".")
            body = r"[\s_-]+".join(map(re.escape, re.split(r"[_-]+", name))) + rf"(?:\.{ending})?(?!\.\w)"
        else:
            body = re.escape(self.text)
        return re.compile(rf"(?<![\w@.]){_PREFIX.get(self.kind, '')}{body}/?(?![\w@/]|\.\d)", re.IGNORECASE)


_PREFIX = {
    "version": r"v?",
    "url": r"(?:https?://)?(?:www\.)?",
    "phone": r"(?:\+?\(?\d{1,3}\)?[\s(.-]{1,3}|\(?0|\()?",
    "extension": r"(?:\b(?:ext(?:ension)?\b\.?\s*|x\s?))?",
}


def read_literal(kind: str, text: str) -> Literal:
    """Return the literal of one match of ``PATTERNS[kind]``."""
    text = text.lower()
    match kind:
        case "phone" | "extension":
            digits = re.sub(r"\D", "", text)
            return Literal(kind, digits[-10:] if kind == "phone" else digits)
        case "url":
            return Literal(kind, re.sub(r"^(?:https?://)?(?:www\.)?", "", text).rstrip("/."))
        case "code":
            return Literal(kind, re.sub(r"[^a-z0-9]", "", text))
        case "version":
            return Literal(kind, re.sub(r"[^\d.]", "", text).strip("."))
    return Literal(kind, text.strip("'."))
