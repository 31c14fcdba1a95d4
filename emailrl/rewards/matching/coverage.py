"""Whether an answer contains what the reference requires, and which side it takes on a yes/no question."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from emailrl.facts.dates import Date, Time
from emailrl.facts.lexicon import STOPWORDS, TITLES
from emailrl.facts.literals import Literal
from emailrl.facts.names import Name, same_token
from emailrl.facts.quantities import Quantity
from emailrl.facts.reading import Fact, Reading, Unit, agree
from emailrl.facts.words import OPPOSITES, has_word, says_something, stem
from emailrl.rewards.matching.language import DENIAL, NO_DENIAL, REFUSAL
from emailrl.rewards.matching.question import Clause, Question, Reference

SHORT = 4
"""A reference of at most this many facts and words is a bare answer, not a sentence."""
WHOLE = "whole"
"""The kind of literal made of a long reference's whole text; it is masked in an answer like a fact."""


@dataclass(frozen=True, slots=True)
class Case:
    """A question, its reference and an answer, read and ready to compare."""

    asked: Question
    expected: Reference
    given: Reading
    clauses: tuple[Clause, ...]
    wanted: frozenset[str]
    """Stems that the reference adds to the question."""
    known: frozenset[str]
    """Stems of reference and question."""
    said: tuple[Fact, ...]
    """Facts of reference and question."""

    def is_known(self, unit: Unit) -> bool:
        """Whether a unit also occurs in the reference or the question."""
        if unit.fact is None:
            return has_word(unit.stem, self.known)
        return is_whole(unit.fact) or any(agree(fact, unit.fact) or agree(unit.fact, fact) for fact in self.said)

    def holds(self, *units: Unit) -> bool:
        """Whether any unit is part of what the reference adds to the question."""
        return any(
            has_word(unit.stem, self.wanted)
            if unit.fact is None
            else is_whole(unit.fact) or any(agree(fact, unit.fact) for fact in self.expected.facts)
            for unit in units
        )

    def new(self, units: Iterable[Unit]) -> list[Unit]:
        """Return the units that occur in neither the reference nor the question."""
        return [unit for unit in units if not self.is_known(unit)]

    @property
    def is_short(self) -> bool:
        """Whether the reference is a word, a name or a fact rather than a sentence."""
        return len(self.expected.full.units) <= SHORT

    @property
    def is_quoted(self) -> bool:
        """Whether the answer quotes a long reference word for word."""
        return any(map(is_whole, self.given.facts))

    @property
    def sentences(self) -> dict[int, list[Unit]]:
        """The units of the answer by sentence number."""
        found: dict[int, list[Unit]] = {}
        for part in self.clauses:
            found.setdefault(part.sentence, []).extend(part.units)
        return found

    @property
    def texts(self) -> str:
        """The text of the reference and the question."""
        return f"{self.expected.full.text} {self.asked.reading.text}"

    @property
    def is_mixed(self) -> bool:
        """Whether the answer is in mixed case, so that a capital letter indicates a name."""
        return self.given.text not in (self.given.text.upper(), self.given.text.lower())

    def stems(self, asserted: bool) -> set[str]:
        """Return the stems of the answer's asserted or denied clauses."""
        return {u.stem for part in self.clauses if part.asserted is asserted for u in part.units if u.fact is None}


def is_whole(fact: Fact) -> bool:
    """Whether a fact is the whole reference."""
    return isinstance(fact, Literal) and fact.kind == WHOLE


def make_case(asked: Question, expected: Reference, given: Reading, parts: tuple[Clause, ...]) -> Case:
    """Build the case for a question, its reference and an answer's clauses."""
    names = {stem(word) for name in expected.names for token in name.tokens for word in (token, *token.split("-"))}
    known = asked.stems | names | {*expected.others.stems}
    said = (*expected.others.facts, *asked.reading.facts)
    return Case(asked, expected, given, parts, frozenset(names | {*expected.words}), known, said)


def covers(case: Case) -> bool:
    """Whether the answer contains everything that the question requires."""
    asked, expected = case.asked, case.expected
    if asked.quantity and is_zero(expected.full):
        return is_zero(case.given)
    possible = [part for part in case.clauses if part.asserted or part.asserted in expected.statuses]
    given = [
        unit.fact
        for part in possible
        for unit, behind in pairwise([*part.units, None])
        if unit is not None and unit.fact is not None and not is_counted(case, unit, behind)
    ]
    if any(map(is_whole, given)):
        return True
    if expected.kinds:
        wanted = [in_unit(fact, asked) for fact in expected.facts if isinstance(fact, expected.kinds)]
        return most(any(agree(fact, other) for other in given) for fact in wanted)
    words = [_TOKEN.findall(part.text.replace("'s", "")) for part in possible]
    named = most(any(has_name(name, part, case) for part in words) for name in expected.names)
    if asked.person and expected.names and not asked.several:
        return named
    weak = [fact for fact in expected.facts if isinstance(fact, Quantity) and fact.weak]
    strong = [fact for fact in expected.facts if fact not in weak]
    if not named or not most(any(agree(fact, other) for other in given) for fact in strong):
        return False
    stems, denied = case.stems(True), case.stems(False)
    hits = sum(has_word(word, denied if word in expected.denied else stems) for word in expected.words)
    if ends_in_answer(case) and not has_word(expected.words[-1], stems | denied):
        return False
    weak = [fact for fact in weak if fact != Quantity(1.0, weak=True)]
    hits += sum(any(agree(fact, other) for other in given) for fact in weak)
    if any(isinstance(fact, Literal) for fact in strong):
        return hits >= (len(expected.words) + len(weak)) // 3
    return hits >= enough(len(expected.words) + len(weak), bool(strong or expected.names), not stems)


def ends_in_answer(case: Case) -> bool:
    """Whether the last word of a reference must not be missing, as in "the room was flooded".

    A reference of three words may also be cut short, but nothing may replace its last word.
    """
    expected, count = case.expected, len(case.expected.words)
    linked = any(word in STOPWORDS - {"the", "a", "an"} for word in expected.full.text.lower().split())
    plain = linked and not (expected.names or expected.facts or expected.lasting or case.asked.polar)
    return plain and (3 < count <= 6 or (count == 3 and bool(case.new(case.given.units))))


def is_counted(case: Case, unit: Unit, behind: Unit | None) -> bool:
    """Whether a number counts things ("15 members"), and the reference has an amount in a unit ("15%")."""
    if not isinstance(unit.fact, Quantity) or unit.fact.base is not None or behind is None or behind.fact is not None:
        return False
    measured = any(isinstance(fact, Quantity) and fact.base is not None for fact in case.expected.facts)
    adjacent = behind.start == unit.end + 1 and behind.text.endswith("s")
    return measured and adjacent and not case.is_known(behind)


def enough(total: int, others: bool, bare: bool) -> float:
    """Return how many of ``total`` words an answer must contain.

    Half if there are names or facts (``others``); otherwise all of one or two, and a smaller share of more.
    """
    if others:
        return 0 if total == 1 and bare else (total + 1) // 2
    return max(total, 1) if total <= 2 else (0.66 if total <= 6 else 0.5) * total - 1e-9


def most(hits: Iterable[bool]) -> bool:
    """Whether at least four fifths of ``hits`` are true, which is all of up to four."""
    found = list(hits)
    return sum(found) >= 0.8 * len(found)


def is_zero(reading: Reading) -> bool:
    """Whether a text states zero or none."""
    numbers = [fact for fact in reading.facts if isinstance(fact, Quantity) and not fact.weak]
    if numbers:
        return all(fact.value == 0 for fact in numbers)
    return re.match(r"(?:there (?:are|were|is|was) )?(?:no|none|zero|nil)\b", reading.text, re.IGNORECASE) is not None


def in_unit(fact: Fact, asked: Question) -> Fact:
    """Return a bare number in the unit that the question asks for ("how many feet"); other facts unchanged."""
    if isinstance(fact, Quantity) and fact.base is None and asked.unit is not None:
        return replace(fact, base=asked.unit[0], factor=asked.unit[1])
    return fact


_TOKEN = re.compile(r"[^\W_]+")


def has_name(name: Name, words: Sequence[str], case: Case) -> bool:
    """Whether the words contain a name: all of it, or its first or last word without another name next to it.

    "Moss" and "A. Moss" match Ada Moss; "Ida Moss" does not.
    """
    own = [word for token in name.tokens for word in token.split("-")]
    lower = [word.lower() for word in words]
    if "".join(own) in {*lower, *(one + other for one, other in pairwise(lower))}:
        return True
    at = {place: same for place, word in enumerate(words) if (same := {o for o in own if same_token(word.lower(), o)})}
    held = set().union(*at.values())
    if {one for one in own if len(one) > 1} <= held and (len(own) == 1 or any(b - a <= 2 for a, b in pairwise(at))):
        return True
    for place, same in at.items():
        before = next((near for near in range(place - 1, -1, -1) if near not in at), -1)
        behind = next((near for near in range(place + 1, len(words)) if near not in at), len(words))
        beside = [words[near] for near in (before, behind) if 0 <= near < len(words)]
        stranger = any(
            says_something(word) and word.lower() not in TITLES and (word[0].isupper() or not case.is_mixed)
            for word in beside
        )
        telling = len(words[place]) >= (2 if case.asked.person or words[place].isupper() else 6)
        if same & {own[0], own[-1]} and telling and not stranger:
            return True
    return False


_YES = re.compile(r"(?:^|[.,;!:]\s*|\bso\s+)(?:yes|yeah|yep|correct|affirmative|indeed)\b", re.IGNORECASE)
_NO = re.compile(r"(?:^|[.,;!:]\s*|\bso\s+)(?:no|nope)\b(?!\s(?:later|more|less|doubt)\b)|^not\b(?! only\b)", re.I)
_UNDECIDED = re.compile(
    r"\b(?:maybe|perhaps|possibly|unclear|unsure|sometimes|depend\w*|uncertain|unknown|undecided|might|not sure"
    r"|not clear|nobody knows|yes and no|yes or no|could not tell)\b",
    re.IGNORECASE,
)
_VERDICT = re.compile(
    r"^\W*(?:yes|yeah|yep|no|nope)\b|(?<!said )(?<!says )(?<!saying )(?<!answered )(?<!replied )(?<!voted )"
    r"\b(?:yes|yeah|yep|no|nope)\b(?!\.\s?\ue000)(?=\s*(?:$|[^\w\s'\ue000]|\ue000+\s*(?:$|[^\w\s]|yes|no)))",
    re.IGNORECASE,
)
"""A yes or no that opens a text or ends a part of it; "no" before a noun and "they said no" are none."""
_REPLY = re.compile(
    r"(?:he|she|it|they|we|i|you|that)\s(?:is|are|was|were|do|does|did|has|have|had|can|could|will|would|should|must|may|won)"
    r"(?P<no>(?:n'?t|\snot)?|'t|not)\s*(?:$|[.!,;])",
    re.IGNORECASE,
)


def is_undecided(reading: Reading) -> bool:
    """Whether a text gives both yes and no as its verdict, in any layout."""
    return len({"y" in found[0].lower() for found in _VERDICT.finditer(reading.masked)}) > 1


def side(case: Case) -> bool | None:
    """Return a text's answer to a yes/no question: True for yes, False for no, None for neither."""
    text, stems = case.given.text, case.asked.stems
    if _UNDECIDED.search(text):
        return None
    yes, no = _YES.search(text), _NO.search(text)
    if yes or no:
        return no is None or (yes is not None and yes.start() < no.start())
    if reply := _REPLY.match(text):
        return not reply["no"]
    if refusal := REFUSAL.search(text):
        part = next(
            (part for part in case.clauses if part.start <= refusal.start() < part.start + len(part.text)), None
        )
        if part is not None and part.asserted is None:
            return None
        negated = part is not None and re.search(r"\bnot\b|n't\b|\bnever\b", part.text, re.IGNORECASE) is not None
        return (REFUSAL.search(case.asked.reading.text) is not None) is not negated
    said = {unit.stem for unit in case.given.units if unit.fact is None}
    if any(OPPOSITES.get(word, set()) & stems for word in said - stems):
        return False
    about = [part.asserted for part in case.clauses if any(unit.stem in stems for unit in part.units)]
    return None if not {True, False} & {*about} else False not in about


_FACTUAL = re.compile(r"(?:is|are|was|were|do|does|did|has|have|had)\b", re.IGNORECASE)
_LIMITED = re.compile(
    r"\b(?:will|would|should|shall|can|could|may|might|must|to|only|just|still|some|one|few|most|half|partly|part|yet|but"
    r"|until|if|when|once|after|before|because|as|so|though|although|however|instead|later|than|except)\b",
    re.IGNORECASE,
)
"""Tells that a clause qualifies the yes or no before it."""
_ALL = ("everyone", "everybody")
_SAID_NO = re.compile(r"\b(?:said|says|answered|replied)\s(?:no|not)\b", re.IGNORECASE)


def contradicts_itself(case: Case) -> bool:
    """Whether a yes or no is followed by its opposite: "No, it was signed", "Yes, she refused"."""
    question, text = case.asked.reading, case.given.text
    word = _NO.match(text) or _YES.match(text)
    if word is None or DENIAL.search(question.text):
        return False
    part = next((part for part in case.clauses if re.search(r"\w", rest_of(part, word.end()))), None)
    if part is None:
        return False
    rest = rest_of(part, word.end())
    stems = {unit.stem for unit in part.units if unit.fact is None}
    asked = case.asked.stems - {unit.stem for unit in question.units if unit.text[0].isupper()}
    negated = DENIAL.search(NO_DENIAL.sub(" ", rest)) is not None
    if _YES.match(text):
        opposite = any(OPPOSITES.get(stem, set()) & case.asked.stems for stem in stems - case.asked.stems)
        denied = opposite is not negated and (opposite or bool(stems & asked))
        return not _LIMITED.match(rest) and (denied or _SAID_NO.search(rest) is not None)
    if negated or not _FACTUAL.match(question.text) or question.facts or _LIMITED.search(rest):
        return False
    if case.holds(*(unit for unit in part.units if unit.stem not in case.asked.stems)):
        return False
    new = [unit for unit in case.new(part.units) if not isinstance(unit.fact, Date | Time)]
    return bool(stems & asked) and all(unit.text.lower() in _ALL for unit in new)


def rest_of(part: Clause, start: int) -> str:
    """Return the text of a clause from position ``start`` of the answer."""
    return part.text[max(0, start - part.start) :].lstrip(" .,;:!")
