"""The decision: does an answer give what the reference gives for the question?

What has to be given depends on what is asked. Yes/no questions compare the side taken; "when" the dates and times; "how
many" the quantities; "who" the names; anything else every fact and name of the reference and enough of its words,
leaving out what the question already said. What can stand against an answer is in ``rivals``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from emailrl.environment.rubric import is_i_dont_know
from emailrl.rewards.matching.dates import Date, Time
from emailrl.rewards.matching.language import stem
from emailrl.rewards.matching.names import Name, has_names
from emailrl.rewards.matching.quantities import Quantity
from emailrl.rewards.matching.question import Question, read_question, read_reference
from emailrl.rewards.matching.rivals import conflicts, evades, rival_facts
from emailrl.rewards.matching.sides import side, takes_side
from emailrl.rewards.matching.statement import Fact, Literal, Statement, agree, clean, read


def match(question: str, reference: str, answer: str) -> bool:
    """True if ``answer`` gives what ``reference`` gives for ``question``. Deterministic, about half a millisecond."""
    question, reference, answer = clean(question), clean(reference), clean(answer)
    if not re.search(r"\w", answer) or is_i_dont_know(answer):
        return False
    if _bare(answer) == _bare(reference):
        return True
    asked, expected = read_question(question), read_reference(question, reference)
    given = _read_answer(answer, asked, expected)
    if asked.polar and (wanted := side(expected, asked)) is not None:
        return takes_side(given, asked, expected) is wanted and not rival_facts(asked, expected, given, (Date, Time))
    return not evades(expected, given) and _covers(asked, expected, given)


def _bare(text: str) -> str:
    return text.casefold().strip(" .")


def _read_answer(answer: str, asked: Question, expected: Statement) -> Statement:
    return read(
        answer,
        temporal=asked.temporal or any(isinstance(fact, Date) for fact in expected.all_facts()),
        person=asked.person,
        literals=[fact for fact in expected.all_facts() if isinstance(fact, Literal) and fact.kind != "email"],
        known=asked.stems if asked.polar else asked.stems | expected.all_stems(),
    )


def _covers(asked: Question, expected: Statement, given: Statement) -> bool:
    names = _wanted_names(asked, expected)
    if not asked.several:
        kinds = _asked_kinds(asked, expected)
        if kinds:
            wanted = _unsaid([fact for fact in expected.facts if isinstance(fact, kinds)], asked)
            return _has_facts(wanted, given) and not conflicts(asked, expected, given, names, kinds)
        if asked.quantity and _is_zero(expected):
            return _is_zero(given) and not any(isinstance(fact, Quantity) and fact.value for fact in given.facts)
        if asked.person and names:
            return _has_names(names, given, part=True) and not conflicts(asked, expected, given, names)
    return _covers_text(asked, expected, given, names) and not conflicts(asked, expected, given, names)


def _asked_kinds(asked: Question, expected: Statement) -> tuple[type, ...]:
    """The kinds of fact that answer the question, as far as the reference has them."""
    dates = [fact for fact in expected.facts if isinstance(fact, Date)]
    if asked.temporal and (dates or any(isinstance(fact, Time) for fact in expected.facts)):
        # "By the end of April" is more than its month.
        vague = dates and all(date.day is None and date.weekday is None for date in dates)
        return () if vague and expected.stems else (Date, Time)
    if asked.quantity and any(isinstance(fact, Quantity) for fact in expected.facts):
        return (Quantity,)
    return ()


def _covers_text(asked: Question, expected: Statement, given: Statement, names: Sequence[Name]) -> bool:
    """Every fact and name, and enough of the words, each asserted or denied as in the reference."""
    weak: list[Fact] = [fact for fact in expected.facts if isinstance(fact, Quantity) and fact.weak]
    facts = _unsaid([fact for fact in expected.facts if fact not in weak], asked)
    if not _has_facts(facts, given) or not _has_names(names, given, part=asked.person):
        return False
    said = asked.stems | {stem(token) for name in names for token in name.tokens}
    words = [word for word in expected.stems if word not in said]
    denied = [word for word in expected.denied_stems if word not in said]
    weak = _unsaid(weak, asked) if weak else []
    if not (facts or names or words or denied or weak):
        words, denied = expected.stems, expected.denied_stems
        if not (words or denied):
            return _same_words(expected, given)
    hits = sum(_has_word(word, given.stems) or word in given.trailing_stems for word in words)
    hits += sum(_has_word(word, given.denied_stems) for word in denied)
    hits += sum(any(agree(fact, other) for other in given.facts) for fact in weak)
    total = len(words) + len(denied) + len(weak)
    if facts and total == 1 and not set(given.stems) - asked.stems:
        return True  # "three", for "three pallets"
    if any(isinstance(fact, Literal) for fact in facts):
        return hits >= total // 3
    return hits >= (total + 1) // 2 if facts or names else hits >= _enough(total)


def _enough(total: int) -> float:
    """How many of ``total`` words must be there where nothing but words is wanted: all of a few, fewer of many."""
    if total <= 3:
        return total
    return (0.75 if total <= 8 else 0.6) * total - 1e-9


def _same_words(expected: Statement, given: Statement) -> bool:
    """A reference of small words alone ("He told me that he has it") is compared with all of them."""
    wanted, have = (set(re.findall(r"\w+", statement.text.lower())) for statement in (expected, given))
    return len(wanted & have) >= 0.75 * len(wanted | have)


def _unsaid(facts: Sequence[Fact], asked: Question) -> list[Fact]:
    """The facts that the question does not already hold; all of them where it holds all."""
    known = asked.statement.all_facts()
    return [fact for fact in facts if not any(agree(other, fact) for other in known)] or list(facts)


def _has_facts(wanted: Sequence[Fact], given: Statement) -> bool:
    """All of up to four, four fifths of more."""
    have = given.facts + given.trailing_facts
    hits = sum(any(agree(fact, other) for other in have) for fact in wanted)
    return hits >= (len(wanted) if len(wanted) <= 4 else 0.8 * len(wanted))


def _wanted_names(asked: Question, expected: Statement) -> list[Name]:
    """Names of the reference's main assertions that the question does not hold; all where it holds everything."""
    names = [name for name in expected.names if name.asserted and name.main]
    fresh = [name for name in names if not all(stem(token) in asked.stems for token in name.tokens)]
    return fresh or ([] if expected.facts or set(expected.stems) - asked.stems else names)


def _has_names(names: Sequence[Name], given: Statement, *, part: bool) -> bool:
    return has_names(names, given.names, set(given.stems) | given.trailing_stems, part=part)


def _has_word(word: str, stems: Iterable[str]) -> bool:
    """The stem, or a longer or shorter form of it."""
    if word in stems:
        return True
    return len(word) >= 5 and any(len(s) >= 5 and (word.startswith(s) or s.startswith(word)) for s in stems)


def _is_zero(statement: Statement) -> bool:
    numbers = [fact for fact in statement.facts if isinstance(fact, Quantity) and not fact.weak]
    if numbers:
        return all(fact.value == 0 for fact in numbers)
    return re.match(r"(?:there (?:are|were|is|was) )?(?:no|none|zero|nil)\b", statement.text, re.IGNORECASE) is not None
