"""The decision: does an answer give what the reference gives for the question?"""

from __future__ import annotations

import re

from emailrl.environment.rubric import is_i_dont_know
from emailrl.facts.literals import Literal
from emailrl.facts.reading import read
from emailrl.facts.words import clean
from emailrl.rewards.matching.against import stands_against
from emailrl.rewards.matching.case import SHORT, make_case
from emailrl.rewards.matching.clauses import clauses
from emailrl.rewards.matching.coverage import Given, covers
from emailrl.rewards.matching.framing import without_framing
from emailrl.rewards.matching.kinds import KIND_OF, QUOTED, with_names
from emailrl.rewards.matching.question import WHOLE, Question, Reference, context, read_reference
from emailrl.rewards.matching.sides import side

LONGEST = 4000
"""Characters; nothing longer is an answer."""


def match(question: str, reference: str, answer: str, *, kind: str | None = None) -> bool:
    """True if ``answer`` gives what ``reference`` gives for ``question``. Deterministic, about a millisecond.

    ``kind`` is the question's kind where one is known (``kinds.KIND_OF``): the answer is compared as that kind alone.
    """
    if len(answer) > LONGEST:
        return False
    question, reference, answer = clean(question[:LONGEST]), clean(reference[:LONGEST]), clean(answer)
    if not re.search(r"\w", answer) or is_i_dont_know(answer):
        return False
    sort = KIND_OF.get(kind or "")
    if sort == "person":
        answer = with_names(answer, reference)
    parts = [reference] if sort else alternatives(reference)
    return any(_agrees(question, part, answer, sort) for part in parts)


_JOINED = re.compile(
    r"(?<=[^\W\d_.)])/(?=[^\W_(])(?!(?:hour|day|week|month|year|share|head|person|mwh|mmbtu|mcf|h|hr|d)\b)"
    r"|(?<=\d)/(?=[a-z]+$|[A-Za-z]{3,} \d)|(?<=\d{4})/(?=\d)|\s\|\s|\s/\s"
)


def alternatives(reference: str) -> list[str]:
    """ "Emily Bronte/Ellis Bell" gives two; a path, an address or a rate is one."""
    parts = [part.strip() for part in _JOINED.split(reference)]
    plain = not re.search(r"://|www\.|\\|@|(?:^|\s)/\w|(?<!\bSt)(?<!\bMt)[.:;]\s", reference)
    return parts if plain and all(0 < len(part.split()) <= 8 for part in parts) else [reference]


def _agrees(question: str, reference: str, answer: str, kind: str | None) -> bool:
    if _bare(answer) == _bare(reference):
        return True
    asked, expected = read_reference(question, reference, kind)
    given = read_answer(without_framing(answer, _bare(reference), question), asked, expected, quoted=kind in QUOTED)
    case = make_case(asked, expected, given)
    if asked.polar and (wanted := side(expected.reading.text, expected.clauses, asked)) is not None:
        taken = side(given.text, given.clauses, asked)
        if taken is not None:
            return taken is wanted and not stands_against(case)
    if kind in QUOTED and (not case.is_quoted or len(case.new(given.reading.units)) > 1):
        return False
    return covers(asked, expected, given) and not stands_against(case)


def _bare(text: str) -> str:
    return text.casefold().strip(" .")


def read_answer(answer: str, asked: Question, expected: Reference, *, quoted: bool = False) -> Given:
    """Take an answer apart."""
    literals = [fact for fact in expected.facts if isinstance(fact, Literal) and fact.kind != "email"]
    if quoted or len(expected.full.units) >= SHORT:
        whole = Literal(WHOLE, _bare(expected.full.text))
        literals = [whole] if quoted else [*literals, whole]
    reading = read(answer, temporal=asked.temporal, literals=literals)
    parts = tuple(clauses(reading, "" if asked.polar else context(asked.reading.text, expected.full.text)))
    possible = [part for part in parts if part.asserted or (part.asserted in expected.statuses)]
    asserted = [part for part in parts if part.asserted]
    return Given(
        answer,
        reading,
        parts,
        tuple(unit.fact for part in possible for unit in part.units if unit.fact is not None),
        frozenset(unit.stem for part in asserted for unit in part.units if unit.fact is None),
        frozenset(unit.stem for part in parts if part.asserted is False for unit in part.units if unit.fact is None),
        tuple(word for part in possible for word in (*_TOKEN.findall(part.text.replace("'s", "")), "")),
        re.search(r"[a-z]", answer) is not None and re.search(r"[A-Z]", answer) is not None,
    )


_TOKEN = re.compile(r"[^\W_]+|[,:]")
