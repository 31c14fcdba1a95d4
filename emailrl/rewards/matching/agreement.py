"""Decides whether an answer agrees with the reference for the question."""

from __future__ import annotations

import re

from emailrl.facts.literals import EMAIL, Literal
from emailrl.facts.names import name_of
from emailrl.facts.reading import read
from emailrl.facts.words import clean, is_i_dont_know
from emailrl.rewards.matching.coverage import SHORT, WHOLE, contradicts_itself, covers, is_undecided, make_case, side
from emailrl.rewards.matching.language import COURTESY, FRAME
from emailrl.rewards.matching.question import clauses, read_reference
from emailrl.rewards.matching.vetoes import stands_against

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


LONGEST = 4000
"""Maximum characters of an answer."""


def match(question: str, reference: str, answer: str, *, kind: str | None = None) -> bool:
    """Return whether ``answer`` agrees with ``reference`` as an answer to ``question``.

    Deterministic, about a millisecond. If the question's ``kind`` is known (``kinds.KIND_OF``), the answer is compared
    as that kind only.
    """
    if len(answer) > LONGEST:
        return False
    if as_shown(reference) == reference:
        answer = as_shown(answer)
    question, reference, answer = clean(question[:LONGEST]), clean(reference[:LONGEST]), clean(answer)
    if not re.search(r"\w", answer) or is_i_dont_know(answer):
        return False
    sort = KIND_OF.get(kind or "")
    if sort == "subject" or names_subject(question, reference):
        reference, answer = without_marks(reference), without_marks(answer)
    if sort == "person":
        answer = with_names(answer, reference)
    parts = [reference] if sort else alternatives(reference)
    return any(_agrees(question, part, answer, sort, " / ".join(parts)) for part in parts)


_NOT_SHOWN = re.compile(r"<!--.*?(?:-->|$)|~~.*?~~|<(del|s|strike)>.*?</\1>", re.IGNORECASE | re.DOTALL)
_NOT_SIGN = re.compile(r"[\u00ac\u2260\u274c]|!=|<>|(?<!\w)!(?=\w)")


def as_shown(answer: str) -> str:
    """Return an answer without hidden or struck-out text, and with "not" for signs of negation."""
    return _NOT_SIGN.sub(" not ", _NOT_SHOWN.sub(" ", answer))


_JOINED = re.compile(
    r"(?:(?<=[^\W\d_.)])/(?=[^\W_(])|(?<=\d)/(?=[a-z]+$|[A-Za-z]{3,} \d))"
    r"(?!(?:hour|day|week|month|year|share|head|person|barrel|bbl|gallon|pound|lb|ton|mwh|mmbtu|mcf|h|hr|d)\b)|(?<=\d{4})/(?=\d)|\s\|\s|\s/\s"
)


def alternatives(reference: str) -> list[str]:
    """Split a reference into its alternative answers.

    "Emily Bronte/Ellis Bell" and "Federal Power Commission (FPC)" give two; a path, an address or a rate is one.
    """
    if short := re.fullmatch(r"(\D{3,})\s\(([A-Z]{2,6})\)", reference):
        return [short[1], short[2]]
    parts = [part.strip() for part in _JOINED.split(reference)]
    plain = not re.search(r"://|www\.|\\|@|(?:^|\s)/\w|(?<!\bSt)(?<!\bMt)(?<!\b[A-Z])(?<!\b[A-Z]{2})[.:;]\s", reference)
    return parts if plain and all(0 < len(part.split()) <= 8 for part in parts) else [reference]


def _agrees(question: str, reference: str, answer: str, kind: str | None, others: str) -> bool:
    if _bare(answer) == _bare(reference):
        return True
    asked, expected = read_reference(question, reference, others, kind)
    answer = without_framing(answer, _bare(reference), question)
    literals = [fact for fact in expected.facts if isinstance(fact, Literal) and fact.kind != "email"]
    if kind in QUOTED or len(expected.full.units) > SHORT:
        whole = Literal(WHOLE, _bare(reference))
        literals = [whole] if kind in QUOTED else [*literals, whole]
    given = read(answer, temporal=asked.temporal, numbering=asked.numbering, literals=literals)
    parts = tuple(clauses(given, expected.said, expected.lasting))
    if not parts:
        return False
    case = make_case(asked, expected, given, parts)
    if asked.polar:
        if is_undecided(given) and not is_undecided(expected.full):
            return False
        wanted = side(make_case(asked, expected, expected.full, expected.clauses))
        taken = side(case)
        if wanted is not None and taken is not None:
            return taken is wanted and not contradicts_itself(case) and not stands_against(case)
    if kind in QUOTED and (not case.is_quoted or len(case.new(given.units)) > 1):
        return False
    return covers(case) and not stands_against(case)


def _bare(text: str) -> str:
    return text.casefold().strip(" .")


_SENTENCE = re.compile(r"[^\s.!?](?:[^\n.!?]|[.!?](?![\s]|$))*[.!?]*")


def without_framing(answer: str, keep: str, question: str = "") -> str:
    """Remove courtesy, sources and lead-ins from a cleaned answer; text that contains ``keep`` stays."""

    def cut(found: re.Match[str]) -> str:
        return found[0] if len(keep) > 3 and keep in found[0].casefold() else " "

    if len(question) > 8 and answer.casefold().startswith(question.casefold()):
        answer = answer[len(question) :]
    text = _SENTENCE.sub(lambda found: cut(found) if COURTESY.match(found[0]) else found[0], FRAME.sub(cut, answer))
    return FRAME.sub(cut, text).strip()
