"""The kind of answer for questions of known kind, such as template questions."""

from __future__ import annotations

import re

from emailrl.facts.literals import EMAIL
from emailrl.facts.names import name_of

_KINDS = {
    "date": "date_received date_sent reply_date my_reply_date first_contact date_stated time deadline",
    "number": "amount percentage quantity",
    "count": "count_in_month count_on_day reply_gap thread_count",
    "person": "sender only_sender_of_day other_recipient copied sent_to reply_from thread_starter last_in_thread",
    "subject": "last_before first_after",
    "phone": "",
    "address": "url email_address",
    "text": "room venue attachment flight deal_number ticket_number meter_number contract_number invoice_number",
}
KIND_OF = {name: kind for kind, names in _KINDS.items() for name in (kind, *names.split())}
"""From a question's kind to its answer's kind; other kinds are unknown."""
QUOTED = frozenset(("subject", "address", "text"))
"""Answers compared word for word."""


def with_names(answer: str, reference: str) -> str:
    """Replace the addresses in an answer by the names they spell, unless the reference is an address."""
    if "@" in reference:
        return answer
    return re.sub(EMAIL, lambda found: name_of(found[0].lower()) or found[0], answer)


_SUBJECT = re.compile(r"\b(?:subject|title)\b", re.IGNORECASE)
_MARKS = re.compile(r"(?<!\w)(?:(?:re|fwd?)\s?:\s*)+(?=\w)", re.IGNORECASE)


def names_subject(question: str, reference: str) -> bool:
    """Whether a question asks for an email's subject, or the reference is marked as one."""
    return bool(_SUBJECT.search(question) or _MARKS.match(reference))


def without_marks(text: str) -> str:
    """Return a text without the "Re:" and "Fwd:" of its subjects."""
    return _MARKS.sub("", text)
