"""The decision: does an answer give what the reference gives for the question?

What has to be given depends on what is asked. Yes/no questions compare the side taken; "when" the dates and times; "how
many" the quantities; "who" the names; anything else every fact and name of the reference and enough of its words,
leaving out what the question already said. Against an answer stand: a denial over the matched part, a rival candidate
of the same kind, a hedge between several, a word's opposite, and a flood of text that would hold any answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from emailrl.environment.rubric import is_i_dont_know
from emailrl.rewards.matching.dates import Date, Time
from emailrl.rewards.matching.language import OPPOSITES, STOPWORDS, content_stems, stem
from emailrl.rewards.matching.quantities import Quantity
from emailrl.rewards.matching.statement import Fact, Literal, Name, Statement, agree, clean, read, same_kind

_TEMPORAL = re.compile(
    r"\bwhen\b|\b(?:what|which)\s(?:(?:is|was|are|will be)\s)?(?:the\s)?(?:\w+\s)?(?:time|date|day|dates|days|weekday|month|year|deadline)s?\b",
    re.IGNORECASE,
)
_QUANTITY = re.compile(
    r"\bhow\s(?:many|much|long|large|big|far|old|tall|high|wide|fast|often)\b|\b(?:price|cost|costs|fee|budget|rate|amount"
    r"|salary|share|percentage|percent|discount|rent|strike|size|total|value|volume|number of|balance|limit|threshold)\b",
    re.IGNORECASE,
)
_PERSON = re.compile(
    r"^(?:and\s|so\s)?(?:to\s|from\s|with\s|by\s|for\s)?(?:who|whom|whose)\b|\b(?:which|what)\s(?:\w+\s)?(?:person|people|colleagues?"
    r"|employees?|candidates?|names?|members?|managers?|analysts?|banks?|companies|company)\b",
    re.IGNORECASE,
)
_SEVERAL_ASKED = re.compile(r"(?:\band|,)\s(?:by\s|to\s|at\s)?(?:who|whom|what|when|where|why|how|which)\b", re.IGNORECASE)
_POLAR = re.compile(
    r"^(?:and\s|so\s)?(?:is|are|was|were|am|do|does|did|can|could|will|would|should|shall|has|have|had|may|might|must"
    r"|isn't|aren't|wasn't|weren't|don't|doesn't|didn't|can't|won't|hasn't|haven't)\b",
    re.IGNORECASE,
)
_YES = re.compile(r"(?:^|[.,;!:]\s*|\bso\s+)(?:yes|yeah|yep|correct|affirmative|indeed)\b", re.IGNORECASE)
_NO = re.compile(r"(?:^|[.,;!:]\s*|\bso\s+)(?:no|nope)\b(?!\s(?:later|more|less)\b)", re.IGNORECASE)
_UNDECIDED = re.compile(
    r"\b(?:maybe|perhaps|possibly|unclear|unsure|sometimes|depend\w*|uncertain|unknown|undecided|might|not sure|not clear"
    r"|nobody knows|yes and no|yes or no)\b",
    re.IGNORECASE,
)
_NO_ANSWER = re.compile(
    r"(?:\b(?:do not|don't|did not|didn't|cannot|can't|could not|couldn't|unable to|was not able to)\s(?:know|find|tell|determine"
    r"|say|confirm|locate|answer)\b)|\b(?:unknown|not (?:mentioned|specified|stated|found|available|provided|clear|sure))\b"
    r"|\bno (?:mention|information|emails?|answer|record)\b",
    re.IGNORECASE,
)
_BRIEF_REPLY = re.compile(r"(?:he|she|it|they|we|i|you|that)\s(?:\w+n't|\w+(?:\snot)?)[.!]?", re.IGNORECASE)
_OR = re.compile(r"\bor\b(?!\s(?:so|more|less|later|earlier|after|before|not|else\b.{0,8}$|higher|lower)\b)", re.IGNORECASE)
_REGIONS = frozenset(
    """texas california florida york virginia alberta ontario colorado oregon nevada arizona ohio louisiana oklahoma
    georgia illinois massachusetts connecticut washington pennsylvania tx ca fl ny nj co la ok ga il ma ct wa pa uk usa us
    england scotland ireland germany france spain italy norway sweden denmark poland netherlands canada mexico brazil
    india japan china singapore australia argentina""".split()
)
_GENERIC = frozenset("system group trust bank company project restaurant hotel center centre corp inc ltd llc energy team plan".split())


@dataclass(frozen=True, slots=True)
class _Question:
    statement: Statement
    stems: frozenset[str]
    polar: bool
    temporal: bool
    quantity: bool
    person: bool
    open: bool
    """It asks for several things at once, so everything in the reference counts."""


def match(question: str, reference: str, answer: str) -> bool:
    """True if ``answer`` gives what ``reference`` gives for ``question``. Deterministic; a fraction of a millisecond."""
    answer = clean(answer)
    if not re.search(r"\w", answer) or is_i_dont_know(answer):
        return False
    asked, expected = _read_question(clean(question)), _read_reference(clean(question), clean(reference))
    if answer.casefold().strip(" .") == expected.text.casefold().strip(" ."):
        return True
    codes = [fact for fact in expected.all_facts() if isinstance(fact, Literal) and fact.kind in ("code", "extension")]
    known = asked.stems if asked.polar else asked.stems | expected.all_stems()
    given = read(answer, temporal=_is_temporal(asked, expected), codes=codes, known=known)
    if asked.polar and (side := _side(expected, asked)) is not None:
        return _side(given, asked, expected) is side and not _rivals(expected, given, asked, (Date, Time))
    if _NO_ANSWER.search(answer) and not _NO_ANSWER.search(expected.text):
        return False
    if _OR.search(answer) and not _OR.search(expected.text) and len(answer.split()) <= 40:
        return False
    if len(given.all_stems()) > 40 + 4 * len(expected.all_stems()):
        return False
    return _covers(asked, expected, given)


@lru_cache(maxsize=4096)
def _read_question(question: str) -> _Question:
    statement = read(question.rstrip("? "), temporal=bool(_TEMPORAL.search(question)))
    return _Question(
        statement,
        frozenset(content_stems(question)),
        polar=bool(_POLAR.match(question)) and not re.search(r"\bor\b(?! not)", question),
        temporal=bool(_TEMPORAL.search(question)),
        quantity=bool(_QUANTITY.search(question)),
        person=bool(_PERSON.search(question)),
        open=bool(_SEVERAL_ASKED.search(question)),
    )


@lru_cache(maxsize=4096)
def _read_reference(question: str, reference: str) -> Statement:
    asked = _read_question(question)
    # What happened can be a refusal: only where a side is asked for does a word like "declined" deny the rest.
    known = frozenset() if asked.polar else frozenset(content_stems(reference))
    return read(reference, temporal=asked.temporal, known=known)


def _is_temporal(asked: _Question, expected: Statement) -> bool:
    return asked.temporal or any(isinstance(fact, Date) for fact in expected.all_facts())


def _side(statement: Statement, asked: _Question, expected: Statement | None = None) -> bool | None:
    """Yes, no, or None where the text takes no side; an answer (``expected`` given) must also speak of the matter."""
    text = statement.text
    if expected and (_UNDECIDED.search(text) or not _to_the_point(statement, asked, expected)):
        return None
    yes, no = _YES.search(text), _NO.search(text)
    if yes and no:
        return yes.start() < no.start()
    if yes or no:
        return yes is not None
    if _BRIEF_REPLY.fullmatch(text):
        return not re.search(r"n't\b|\bnot\b", text)
    denied = asked.stems & set(statement.denied_stems)
    asserted = asked.stems & (set(statement.stems) | statement.trailing_stems)
    if not denied and not asserted:
        return None
    return not denied


def _to_the_point(given: Statement, asked: _Question, expected: Statement) -> bool:
    """At least half of what the answer's first words speak of comes from the question or the reference."""
    opening = (given.stems + given.denied_stems)[:6]
    said = asked.stems | expected.all_stems()
    return 2 * sum(_has_word(word, sorted(said)) for word in opening) >= len(opening)


def _covers(asked: _Question, expected: Statement, given: Statement) -> bool:
    if not asked.open:
        kinds = _asked_kinds(asked, expected)
        if kinds:
            wanted = _unsaid([fact for fact in expected.facts if isinstance(fact, kinds)], asked)
            if wanted:
                return _has_facts(wanted, given) and not _conflicts(asked, expected, given, kinds)
        if asked.quantity and _is_zero(expected):
            return _is_zero(given) and not any(isinstance(fact, Quantity) and fact.value for fact in given.facts)
        names = _wanted_names(asked, expected)
        if asked.person and names:
            return _has_names(names, expected, given, part=True) and not _conflicts(asked, expected, given, ())
    return _covers_text(asked, expected, given)


def _asked_kinds(asked: _Question, expected: Statement) -> tuple[type, ...]:
    """The kinds of fact that answer the question, as far as the reference has them."""
    if asked.temporal and any(isinstance(fact, Date | Time) for fact in expected.facts):
        whole_month = all(fact.day is None and fact.weekday is None for fact in expected.facts if isinstance(fact, Date))
        if not (whole_month and expected.stems):
            return (Date, Time)
    if asked.quantity and any(isinstance(fact, Quantity) for fact in expected.facts):
        return (Quantity,)
    return ()


def _covers_text(asked: _Question, expected: Statement, given: Statement) -> bool:
    """Every fact and name, and enough of the words, each asserted or denied as in the reference."""
    facts = _unsaid([fact for fact in expected.facts if not (isinstance(fact, Quantity) and fact.weak)], asked)
    names = _wanted_names(asked, expected)
    named = {stem(token) for name in names for token in name.tokens}
    words = [word for word in expected.stems if word not in asked.stems and word not in named]
    denied = [word for word in expected.denied_stems if word not in asked.stems and word not in named]
    if not (facts or names or words or denied):
        words, denied = expected.stems, expected.denied_stems
        if not (words or denied):
            return _same_words(expected, given)
    if not _has_facts(facts, given) or not _has_names(names, expected, given, part=asked.person):
        return False
    weak = _unsaid([fact for fact in expected.facts if isinstance(fact, Quantity) and fact.weak], asked)
    hits = sum(_has_word(word, given.stems, given.trailing_stems) for word in words)
    hits += sum(_has_word(word, given.denied_stems) for word in denied)
    hits += sum(any(agree(fact, other) for other in given.facts) for fact in weak)
    total = len(words) + len(denied) + len(weak)
    if total and hits < _enough(total, anchored=bool(facts or names)):
        return False
    return not _denied_core(asked, expected, given) and not _conflicts(asked, expected, given, ())


def _same_words(expected: Statement, given: Statement) -> bool:
    """A reference of small words alone ("He told me that he has it") is compared with all of them."""
    wanted, have = (set(re.findall(r"\w+", statement.text.lower())) for statement in (expected, given))
    return len(wanted & have) >= 0.75 * len(wanted | have)


def _enough(total: int, *, anchored: bool) -> float:
    """How many of ``total`` words must be there: all of a few, fewer of many; ``anchored`` by matched facts or names."""
    if anchored:
        return 0.5 * total
    if total <= 3:
        return total
    return (0.75 if total <= 8 else 0.6) * total - 1e-9


def _denied_core(asked: _Question, expected: Statement, given: Statement) -> bool:
    """The answer denies what the question and the reference take as given."""
    shared = (set(expected.stems) | asked.stems) & set(given.denied_stems)
    return bool(shared) and not expected.denied_stems and not (shared & set(given.stems))


def _conflicts(asked: _Question, expected: Statement, given: Statement, kinds: tuple[type, ...]) -> bool:
    brief = len(expected.stems) + len(expected.facts) <= 4
    rival_kinds = kinds if kinds else (Date, Time, Quantity) if brief else ()
    if _rivals(expected, given, asked, (*rival_kinds, Literal)):
        return True
    names = _wanted_names(asked, expected)
    alone = len(names) == 1 and len(expected.stems) <= len(names[0].tokens) + 1 and not expected.facts
    if names and not kinds and (asked.person or alone) and _rival_names(asked, expected, given):
        return True
    return _opposed(asked, expected, given)


def _rivals(expected: Statement, given: Statement, asked: _Question, kinds: tuple[type, ...]) -> bool:
    """Facts in the answer that contradict every fact of their kind in the reference and the question."""
    said = expected.all_facts() + asked.statement.all_facts()
    for fact in given.facts + given.trailing_facts:
        if not isinstance(fact, kinds) or (isinstance(fact, Quantity) and fact.weak):
            continue
        same = [other for other in said if same_kind(other, fact)]
        mine = [other for other in expected.all_facts() if same_kind(other, fact)]
        if mine and all(other.contradicts(fact) for other in same):  # type: ignore[arg-type]
            return True
    return False


def _opposed(asked: _Question, expected: Statement, given: Statement) -> bool:
    """A word of the reference (or of the question) is answered by its opposite."""
    said = set(expected.stems) | expected.trailing_stems
    for word in given.stems:
        if word not in said and word not in asked.stems:
            opposites = OPPOSITES.get(word, set())
            if opposites & said - set(given.stems) or opposites & asked.stems - set(given.stems) - said:
                return True
    return False


def _unsaid(facts: Sequence[Fact], asked: _Question) -> list[Fact]:
    """The facts that the question does not already hold; all of them where it holds all."""
    known = asked.statement.all_facts()
    fresh = [fact for fact in facts if not any(agree(k, fact) for k in known)]  # type: ignore[arg-type]
    return fresh or list(facts)


def _has_facts(wanted: Sequence[Fact], given: Statement) -> bool:
    """All of up to four, four fifths of more."""
    have = given.facts + given.trailing_facts
    hits = sum(any(agree(fact, other) for other in have) for fact in wanted)  # type: ignore[arg-type]
    return hits >= (len(wanted) if len(wanted) <= 4 else 0.8 * len(wanted))


def _has_word(word: str, stems: Sequence[str], more: set[str] = frozenset()) -> bool:  # type: ignore[assignment]
    if word in stems or word in more:
        return True
    if len(word) < 5:
        return False
    return any(len(other) >= 5 and (word.startswith(other) or other.startswith(word)) for other in (*stems, *more))


def _is_zero(statement: Statement) -> bool:
    numbers = [fact for fact in statement.facts if isinstance(fact, Quantity) and not fact.weak]
    if numbers:
        return all(fact.value == 0 for fact in numbers)
    return re.match(r"(?:there (?:are|were|is|was) )?(?:no|none|zero|nil)\b", statement.text, re.IGNORECASE) is not None


def _wanted_names(asked: _Question, expected: Statement) -> list[Name]:
    """Names of the reference's main assertions that the question does not hold."""
    names = [name for name in expected.names if name.asserted and name.main]
    fresh = [name for name in names if not all(stem(token) in asked.stems for token in name.tokens)]
    return fresh or ([] if expected.facts or set(expected.stems) - asked.stems else names)


def _has_names(wanted: Sequence[Name], expected: Statement, given: Statement, *, part: bool) -> bool:
    """All of up to four names, four fifths of more; ``part`` accepts a person's first or last name alone."""
    hits = sum(_has_name(name, given, part=part) for name in wanted)
    return hits >= (len(wanted) if len(wanted) <= 4 else 0.8 * len(wanted))


def _has_name(name: Name, given: Statement, *, part: bool) -> bool:
    runs = [other for other in given.names if other.asserted]
    if any(_compatible(name, other, part=part) for other in runs):
        return True
    in_runs = {stem(token) for other in given.names for token in other.tokens}
    free = set(given.stems) | given.trailing_stems
    hits = [stem(token) in free and (stem(token) not in in_runs or not part) for token in name.tokens if len(token) > 1]
    return any(hits) if part else all(hit or stem(token) in _GENERIC for hit, token in zip(hits, name.tokens, strict=False))


def _compatible(name: Name, other: Name, *, part: bool) -> bool:
    """The other run can be the same name: no token of either is foreign to the longer one."""
    shorter, longer = sorted((name.tokens, other.tokens), key=len)
    if not all(any(_same_token(a, b) for b in longer) for a in shorter):
        return False
    if not any(len(a) > 1 and a in longer for a in shorter):
        return False
    if part or len(other.tokens) >= len(name.tokens):
        return True
    missing = [token for token in name.tokens if token not in other.tokens]
    return all(stem(token) in _GENERIC for token in missing)


def _same_token(a: str, b: str) -> bool:
    return a == b or (min(len(a), len(b)) == 1 and a[0] == b[0])


def _rival_names(asked: _Question, expected: Statement, given: Statement) -> bool:
    """A name that is neither in the reference nor in the question, given as a further answer."""
    said = expected.all_stems() | asked.stems
    for name in given.names:
        if not name.asserted or name.in_phrase or all(stem(token) in said for token in name.tokens) and _whole(name, expected, asked):
            continue
        if any(_compatible(other, name, part=True) for other in (*expected.names, *asked.statement.names)):
            continue
        if not set(name.tokens) <= _REGIONS:
            return True
    return _rival_pieces(said, given)


def _whole(name: Name, expected: Statement, asked: _Question) -> bool:
    """The run does not mix the tokens of two names ("Ben Hale" of Ben Carver and Lucy Hale)."""
    if len(name.tokens) == 1:
        return True
    parts = [set(other.tokens) & set(name.tokens) for other in (*expected.names, *asked.statement.names)]
    return not any(parts) or any(set(name.tokens) <= part for part in parts)


def _rival_pieces(said: set[str], given: Statement) -> bool:
    """In a short list without capitals, an item of which nothing was said before."""
    items = re.split(r",\s*(?:and\s+|or\s+)?|\s+(?:and|or)\s+|/", given.text.strip(" .").lower())
    if len(items) < 2 or len(given.text.split()) > 10:
        return False
    for item in items:
        words = re.findall(r"[^\W\d_]+", item)
        if words and len(words) <= 3 and not re.search(r"\d", item):
            fresh = [word for word in words if word not in STOPWORDS and word not in _REGIONS]
            if len(fresh) == len(words) and not any(stem(word) in said for word in words):
                return True
    return False
