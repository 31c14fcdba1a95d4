"""Vetoes on rivals: another fact or name in place of the right one, joined to it, in a clause of its own, or beside it
in an answer without a sentence."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from emailrl.facts.quantities import Quantity
from emailrl.facts.reading import Reading, Unit, contradict, same_kind
from emailrl.facts.words import COUNTRIES, STATES, TITLES, says_something
from emailrl.rewards.matching.question import SHORT, Case, Clause

_VERSUS = r"(?:vs|versus|aka|a\.?k\.?a|alias)\b\.?"
_SYMBOL = r"[^\w\s\ue000()\[\]&,.:;!?$%#@'+=\u2013\u2014-]+|-+>|=+>"
"""A token of symbols between two candidates: "/", "|", ">", "->"."""
JOINT = re.compile(
    r"\s*,\s*(?:and|or|but also|then)\s+|\s+(?:and|but|as well as|plus|then"
    r"|or(?!\s(?:so|more|less|later|earlier|not)\b))\s+|,\s+|\s?/\s?|\s&\s|;\s|:\s|\n|[()]"
    r"|(?<=[\w)\ue000][.!?])(?<!\b[A-Z]\.)(?<!\b(?:St|Co|vs|No|Jr|Sr)\.)\s"
    rf"|\s+(?:{_VERSUS})\s+|\s(?:{_SYMBOL}|[=+]|\.\.+)\s|\s?(?:[\[\]|~]|--+)\s?|(?:^|\s)[A-E]\)\s",
    re.IGNORECASE,
)
LAYOUT = re.compile(rf"{JOINT.pattern}|\s-\s", re.IGNORECASE)  # Also splits a list at dashes.
OR = re.compile(r"\bor\b", re.IGNORECASE)
_CHOICE = re.compile(rf"^\s*(?:{_VERSUS}|{_SYMBOL}|/|\[|\||\.\.+)\s*$", re.IGNORECASE)
"""Joins two candidates like "or"."""
_AND = re.compile(r"and|but|plus|as well|&", re.IGNORECASE)
_BREAK = re.compile(r"[!?:;()\n]|(?<!\.)(?<!\bvs)\.(?!\.)", re.IGNORECASE)
_IN_FACT = re.compile(  # Introduces what really answers, or what another source says.
    r"(?:\b(?:in fact|actually|in reality|in truth|now|currently|today|elsewhere|another|the other|instead|answer is)\b"
    r"|\banswer:)",
    re.IGNORECASE,
)
_OTHERWISE = re.compile(rf"{_IN_FACT.pattern}\W*(?:(?:in|on|at|it|is|says?|the)\W+)*$", re.IGNORECASE)
_PLACED = re.compile(r"\b(?:of|in|at|from|on|for|with|near|via)\s(?:the\s)?$")
_VERB = re.compile(r"\b(?:is|are|was|were|has|have|had|will|would)\b", re.IGNORECASE)
_CHANGED = re.compile(r"\b(?:moved|changed|postponed|shifted|rescheduled|pushed|extended)\b[^,;]{0,20} to\b", re.I)


@dataclass(frozen=True, slots=True)
class Item:
    """One item of a list: the text between two joints, and the joint before it."""

    joint: str
    text: str
    units: tuple[Unit, ...]


def lists(reading: Reading, joints: re.Pattern[str]) -> Iterator[list[Item]]:
    """Cut a text at ``joints`` and yield the items between two sentence ends or brackets as one list."""
    text = reading.masked
    found: list[Item] = []
    joint, position = "", 0
    for cut in [*joints.finditer(text), None]:
        end = cut.start() if cut else len(text)
        here = tuple(unit for unit in reading.units if position <= unit.start < end)
        if here or (found and cut):
            found.append(Item(joint, text[position:end], here))
        if cut:
            joint, position = cut[0], cut.end()
        if cut is None or _BREAK.search(cut[0]) or cut[0] == " ":
            yield found
            found = []


def rival_items(case: Case) -> bool:
    """Whether a list or a choice contains the reference as one item and something new as another."""
    person = case.asked.person
    every = [item for one in lists(case.given, LAYOUT) for item in one] if person else []
    asserted = all(part.asserted for part in case.clauses) and not re.search("[(:]", case.given.masked)
    if asserted and all(map(is_bare, every)) and other_names(case, every):
        return True  # nothing but names, in any layout, and one of them is somebody else's
    chosen = OR.search(case.expected.full.text) is None or case.is_quoted
    chosen = chosen and not (OR.search(case.asked.reading.text) and len(case.given.text.split()) > 8)
    for items in lists(case.given, JOINT):
        for at, (left, right) in enumerate(pairwise(items), 1):
            if chosen and OR.search(right.joint) and is_choice(case, items[:at], right):
                return True
            if (case.is_short or case.is_quoted) and _CHOICE.match(right.joint):
                held, rest = (left, right) if case.holds(*left.units) else (right, left)
                loose = (is_bare(held) and is_bare(rest)) or not case.echoes([*held.units, *rest.units])
                if loose and case.holds(*held.units) and not case.holds(*rest.units) and case.new(rest.units):
                    return True
        whole = [unit for item in items for unit in item.units]
        if case.holds(*whole) and not case.echoes(whole) and any(_beside(case, *two) for two in pairwise(items)):
            return True
        if not (case.is_short or (person and case.expected.names)):
            continue
        others = [item for item in items if len(item.units) == len(case.new(item.units)) > 0]
        if case.is_short and case.holds(*whole) and len(others) > 2 and items[0] is others[0]:
            return True
        if case.expected.kinds:
            others = [item for item in others if any(isinstance(u.fact, case.expected.kinds) for u in item.units)]
        aside = re.search(r"\((?!.*\bor\b)", case.given.masked) or (_VERB.search(case.given.masked) and len(others) < 4)
        if case.holds(*whole) and not case.echoes(whole) and len(others) > 1 and not aside:
            return True
        bare = case.is_short and all(map(is_bare, items))
        states = zip((state(case, item, bare) for item in items), items, strict=True)
        for _, group in groupby(states, key=lambda pair: pair[0] == "other"):
            run, news = [], 0
            for said, item in group:
                run.append(item)
                news += said == "new"
            if not 0 < news < len(run) or not touches(case, run):
                continue
            if any(_AND.search(item.joint) for item in run[1:]) or news > 2 or other_names(case, run) > 1:
                return True
            if bare and len(run) == len(items) and (news > 1 or person):
                return True
    return False


def _beside(case: Case, left: Item, right: Item) -> bool:
    """Whether "and" joins the answer to something else that stands alone."""
    if not _AND.search(right.joint) or case.holds(*left.units) == case.holds(*right.units):
        return False
    one, other = (left.units[-1:], right.units) if case.holds(*left.units) else (right.units[:1], left.units)
    if "well" in right.joint:
        return 2 * len(case.new(other)) > len(other)
    if not case.holds(*one) or len(case.new(other)) < max(len(other), 1):
        return False
    first = (
        right.text.lstrip()[:1].isupper() if other is right.units else len(other) > 1 and other[-1].text[0].isupper()
    )
    return first or other[0].fact is not None


def is_choice(case: Case, before: Sequence[Item], right: Item) -> bool:
    """Whether an "or" joins a part of the reference to something else."""
    left = before[-1]
    if not case.is_short and (case.new(left.units) or case.new(right.units)):
        return True
    for one, other in ((left, right), (right, left)):
        if case.holds(*one.units) and other.units and len(case.new(other.units)) == len(other.units):
            return True
    if case.holds(*left.units[-1:]) or case.holds(*right.units[:1]):
        return True
    for earlier, later in zip(before[-2::-1], before[::-1], strict=False):
        if not is_bare(later):
            return False
        if case.holds(*earlier.units):
            return True
    return False


def is_bare(item: Item) -> bool:
    """Whether an item is only a short candidate, without a verb."""
    verb = re.search(r"\b(?:is|was|are|were|has|had|will)\b", item.text)
    return len(item.units) <= 3 and len(item.text.split()) <= 4 and verb is None


def state(case: Case, item: Item, bare: bool) -> str:
    """Return "held" if an item contains part of the reference, "new" if it is short and unknown, else "other"."""
    if case.holds(*item.units):
        return "held"
    new = case.new(item.units)
    if case.expected.kinds and not any(isinstance(unit.fact, case.expected.kinds) for unit in new):
        return "other"
    if bare and new:
        first = re.sub(r"^(?:the|an?)\s", "", item.text.lower()).split(" ")[0]
        return "other" if first.endswith(("ed", "ing")) or (first.isalpha() and not says_something(first)) else "new"
    named = all(unit.fact is None and (unit.text[0].isupper() or not case.is_mixed) for unit in new)
    return "new" if new and named and new[0] == item.units[0] and len(new) <= SHORT else "other"


def other_names(case: Case, items: Iterable[Item]) -> int:
    """Count the items that consist of somebody else's first and last name."""
    return sum(
        len(case.new(item.units)) == len(item.units) == 2
        and all(unit.text[0].isupper() and unit.text.lower() not in TITLES for unit in item.units)
        for item in items
    )


def touches(case: Case, run: Sequence[Item]) -> bool:
    """Whether a part of the reference is directly next to a rival; it is not in "by Ada at noon and in Rome"."""
    return any(
        case.holds(*left.units) != case.holds(*right.units)
        and not case.new(left.units[-1:] if case.holds(*left.units) else right.units[:1])
        for left, right in pairwise(run)
    )


def is_padded(case: Case) -> bool:
    """Whether an answer that repeats nothing of the question puts more beside the reference: in capitals, in a list, or
    in a heap of words."""
    text = case.given.text.split("(")[0]
    units = [unit for unit in case.asserted if unit.start < len(text)]
    new, held = len(case.new(units)), sum(case.holds(unit) for unit in units)
    if case.asked.polar or case.expected.kinds or not held > 0 or case.echoes(units):
        return False
    if text.isupper():
        return new > 1 or new >= held
    if _VERB.search(text):
        return False
    return new > max(held, 2) and (not case.is_mixed or len(re.findall("[,;\n]", text)) > 1)


def rival_facts(case: Case) -> bool:
    """Whether a fact contradicts the right one: next to it, alone in its sentence, or as the new value of a change."""
    units = case.asserted
    values = [unit.fact.value for unit in units if isinstance(unit.fact, Quantity) and not case.holds(unit)]
    totals = [fact.value for fact in case.expected.facts if isinstance(fact, Quantity)]
    if len(values) > 1 and any(abs(sum(values) - total) < 1e-6 for total in totals):
        return False  # a breakdown
    for at, unit in enumerate(units):
        if is_rival(case, unit):
            own = next(part for part in case.clauses if unit in part.units)
            if case.echoes(case.sentences[own.sentence]):
                apart = not case.holds(*case.sentences[own.sentence]) and not case.new(
                    u for u in own.units if not u.fact
                )
                apart = apart and not re.search(
                    r"\b(?:before|had|previous\w*|earlier|also|first)\b", own.text, re.IGNORECASE
                )
                if apart or is_joined(case, units, at) or _renewed(case, own, unit):
                    return True
            elif is_beside(case, units, at) or is_alone(case, own, unit):
                return True
    return False


def is_rival(case: Case, unit: Unit) -> bool:
    """Whether a fact has the kind of the reference's fact and contradicts all known facts of that kind."""
    fact = unit.fact
    kinds = case.expected.kinds or tuple({type(own) for own in case.expected.facts})
    if fact is None or not isinstance(fact, kinds) or (isinstance(fact, Quantity) and fact.weak) or case.is_known(unit):
        return False
    others = [other for other in case.expected.known_facts if same_kind(fact, other)]
    return any(other in case.expected.facts for other in others) and all(contradict(other, fact) for other in others)


def is_beside(case: Case, units: Sequence[Unit], at: int) -> bool:
    """Whether nothing new stands between a fact and one of the reference."""
    for others in (units[:at][::-1], units[at + 1 :]):
        for unit in others:
            if unit.fact is not None and case.holds(unit):
                return True
            if unit.fact is None and not case.is_known(unit) and unit.stem not in ("later", "then", "now"):
                break
    return False


_JOINED = re.compile(
    r"(?P<to>\s(?:to|through)\s)|\W*(?:(?:or|and|but|vs|versus|then|now|later|plus)\W*)*", re.IGNORECASE
)
_FROM = re.compile(r"\bfrom\s(?:the\s)?$", re.IGNORECASE)


def is_joined(case: Case, units: Sequence[Unit], at: int) -> bool:
    """Whether only a joint stands between a fact and one of the reference, not "from ... to"."""
    text, unit = case.given.masked, units[at]
    for other in units[max(0, at - 1) : at + 2]:
        first, last = sorted((unit, other), key=lambda one: one.start)
        if other is not unit and other.fact is not None and case.holds(other):
            joint = _JOINED.fullmatch(text, first.end, last.start)
            if joint and not (joint["to"] and _FROM.search(text[: first.start])):
                return True
    return False


def _renewed(case: Case, own: Clause, unit: Unit) -> bool:
    """Whether a fact is the new value of a change."""
    changed = _CHANGED.search(own.text[: unit.start - own.start])
    return changed is not None or _OTHERWISE.search(case.given.masked[: unit.start]) is not None


def is_alone(case: Case, own: Clause, unit: Unit) -> bool:
    """Whether a fact is in a sentence that says nothing else new, or is the new value of a change."""
    return _renewed(case, own, unit) or all(
        other.fact is not None or case.is_known(other) for other in case.sentences[own.sentence]
    )


def rival_clause(case: Case) -> bool:
    """Whether a clause without the reference takes up the question and names only somebody else."""
    if not (case.is_mixed and case.expected.names and (case.is_short or case.asked.person)):
        return False
    for part in case.clauses:
        about = _IN_FACT.search(part.text) or any(unit.stem in case.asked.stems for unit in part.units)
        if part.asserted and about and not case.holds(*part.units):
            new = [unit for unit in case.new(part.units) if unit.stem != "fact"]
            named = bool(new) and all(unit.fact is None and unit.text[0].isupper() for unit in new)
            if named and not _PLACED.search(case.given.masked[: new[0].start]):
                return True
    return False


_JOINING = frozenset(("the", "a", "an", "or", "also", "then", "as", "so", "both", "each", "to"))
_PLACE = re.compile(  # Asks for a place, at any level ("where") or at one ("which city").
    r"\bwhere\b|\b(?:what|which)\s(?:(?:is|was|are|were|will be)\s)?(?:(?:the|his|her|their|your|my|our)\s)?(?:\w+\s)?"
    r"(?:place|location|venue|region|address|hotel|airport|inn|restaurant|office|building|floor|room|setting"
    r"|(?P<level>city|town|village|county|country|state(?! of\b)))\b",
    re.IGNORECASE,
)
_WITHIN = re.compile(r"\s*(?:,|\(|\s-\s)?\s*")  # Joins a place to a larger one or to a detail.
_APPOSED = re.compile(r"(?:the|an?)\s|\w+(?:ed|ing|ly)\s\w", re.IGNORECASE)
"""Begins a remark on a candidate ("shipped, awaiting pickup") rather than another one."""


def bare_rivals(case: Case) -> bool:
    """Whether an answer of loose words and facts offers another candidate, however the two are separated."""
    expected, text = case.expected, case.given.masked
    linked = any(not says_something(word) and word not in _JOINING for word in re.findall(r"[a-z']+", text.lower()))
    units = case.asserted
    if linked or not case.is_short or not any(part.asserted for part in case.clauses):
        return False
    if is_twin(case):
        return True
    aside = len(text.split("(")[0])
    if any(unit.start < aside and is_rival(case, unit) for unit in units):
        return True
    items = [item for one in lists(case.given, LAYOUT) for item in one if item.units]
    place = _PLACE.search(case.asked.reading.text)
    if place and place["level"]:
        # Names alone, one of them new and no state or country that contains the right place.
        own = {token for name in expected.names for token in name.tokens}
        larger = TITLES if own & COUNTRIES else COUNTRIES | TITLES if own & STATES else COUNTRIES | STATES | TITLES
        named = [i for i in items if all(not u.fact and (u.text[0].isupper() or not case.is_mixed) for u in i.units)]
        return any(unit.text.lower() not in larger for item in named for unit in case.new(item.units))
    told = any(unit.stem in case.asked.stems and not case.holds(unit) for unit in units)
    if told or not (expected.names or expected.words) or expected.kinds:
        return False
    if any(is_run(case, item.units) for item in items):
        return True
    beside = [item for item in items if item.units[0].start < aside]
    return any(case.holds(*item.units) for item in items) and any(
        is_candidate(case, item) and not (place and _WITHIN.fullmatch(item.joint)) for item in beside
    )


def is_twin(case: Case) -> bool:
    """Whether a part of the answer is the reference but for its digits."""
    right = case.expected.full.text.lower().strip(" .")
    parts = [part.strip(" .") for part in JOINT.split(case.given.text.lower()) if part]
    masks = [re.sub(r"\d", "0", part) for part in (right, *parts)]
    twins = (part for mask, part in zip(masks[1:], parts, strict=True) if masks[0] == mask and part != right)
    return masks[0].count("0") > 0 and any(twins)


def is_candidate(case: Case, item: Item) -> bool:
    """Whether an item is a candidate of its own: all new, and a name if the reference is one."""
    words = [unit for unit in item.units if unit.fact is None and unit.text.lower() not in TITLES]
    if not words or len(words) < len(item.units) or len(case.new(words)) < len(words):
        return False
    initials = {token[0] for name in case.expected.names for token in name.tokens}
    if "'" in item.text or all({*unit.text.lower()} <= initials for unit in words):
        return False
    named = all(unit.text[0].isupper() for unit in words) or not case.is_mixed
    return named if case.expected.names else _APPOSED.match(item.text.lstrip()) is None


def is_run(case: Case, units: Sequence[Unit]) -> bool:
    """Whether loose new words stand on both sides of the reference, or a whole other name on one."""
    held = [at for at, unit in enumerate(units) if case.holds(unit)]
    if not held:
        return False
    new = {unit.start for unit in case.new(units) if unit.fact is None and unit.text.lower() not in TITLES}
    sides = [[unit for unit in side if unit.start in new] for side in (units[: held[0]], units[held[-1] :])]
    if all(sides) or len(sides[1]) > 2:
        return True
    whole = any(len([token for token in name.tokens if len(token) > 1]) > 1 for name in case.expected.names)
    return whole and case.is_mixed and any(len(s) > 1 and all(u.text[0].isupper() for u in s) for s in sides)
