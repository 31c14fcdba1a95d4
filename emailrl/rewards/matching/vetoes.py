"""What stands against an answer that holds the right thing: it takes it back, names a rival, turns it round, says more."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from emailrl.facts.names import find_names, word_before
from emailrl.facts.quantities import Quantity
from emailrl.facts.reading import Unit, agree, contradict, same_kind
from emailrl.facts.words import OPPOSITES, has_word, says_something, stem
from emailrl.rewards.matching.clauses import Clause
from emailrl.rewards.matching.coverage import SHORT, Case, is_whole
from emailrl.rewards.matching.language import COPIED, DOUBT, GIVES_UP, HEDGE, REFUSAL, RETRACTION

_JOINT = re.compile(
    r"\s*,\s*(?:and|or|but also|then)\s+|\s+(?:and|but|as well as|plus|then|or(?!\s(?:so|more|less|later|earlier|not)\b))\s+"
    r"|,\s+|\s?/\s?|\s&\s|;\s|:\s|\n|[()]|(?<=[\w)\ue000][.!?])\s",
    re.IGNORECASE,
)
_OR = re.compile(r"\bor\b", re.IGNORECASE)
_AND = re.compile(r"and|plus|as well|&", re.IGNORECASE)
_BREAK = re.compile(r"[.!?:;()\n]")
_DIRECTION = re.compile(r"\b(?:before|after|more|less|fewer|without|with|over|under|above|below|least|most)\b")
_MORE = re.compile(r"\b(?:who|where|when|why|how|what|which|further|more|other|additional|else|exact|specific)\b", re.I)
_PERSONAL = re.compile(r"\b(?:I(?='|\s[a-z])|me|my|we|we're|we'll|our|us|you|your|please|thanks|Please|Thanks)\b")
_ANAPHOR = re.compile(r"\b(?:it|its|they|their|them|he|she|his|her|this|that|these|those|also|both)\b", re.IGNORECASE)
_BY_WHO = re.compile(
    r"^(?:who|(?:which|what)\s(?!(?:is|are|was|were|do|does|did)\b)\w+)\s(?:(?:is|are|was|were|has|have|had|will|would)\s)*"
    r"(?!(?:did|does|do)\b)(?P<verb>\w+)",
    re.IGNORECASE,
)
_TO_WHOM = re.compile(r"^(?:who|whom|(?:which|what)(?:\s\w+){1,3}?)\s(?:did|does|do)\s", re.IGNORECASE)
_IN_FACT = re.compile(r"\b(?:in fact|actually|in reality|in truth)\b", re.IGNORECASE)
_PLACING = ("of", "in", "at", "from", "on", "for", "with", "near", "via")
_CHANGED = re.compile(r"\b(?:moved|changed|postponed|shifted|rescheduled|pushed|extended)\b[^,;]{0,20} to\b", re.I)
_LIMIT = re.compile(
    r"\b(?:before|after|over|under|above|below|than|by|until|till|within|up to|least|most|maximum|minimum|limit|cap|latest"
    r"|earliest|highest|lowest|since|from)\b",
    re.IGNORECASE,
)
_STRICT = re.compile(r"\b(?:before|after|over|under|above|below|(?:less|more|fewer) than|at (?:least|most))(?:\s\w+)?\s$", re.I)
_LINK = re.compile(r"\s+(?:after|before|if|unless|with|into|for|to|than|then)\s+", re.IGNORECASE)


def stands_against(case: Case) -> bool:
    """Whether anything in an answer speaks against it although it covers the reference."""
    return any(veto(case) for veto in (takes_back, hedges, gives_up, denied, rival_items, rival_facts, rival_clause, opposed, turned_round, mixed_up, says_too_much))


def is_new(case: Case, marker: re.Pattern[str], text: str) -> bool:
    """Whether a marker is in a text, and in neither reference nor question."""
    return marker.search(text) is not None and not marker.search(case.texts)


def hedges(case: Case) -> bool:
    """A clause that holds a part of the reference only supposes it."""
    return any(is_new(case, HEDGE, part.text) for part in case.clauses if case.holds(*part.units))


def takes_back(case: Case) -> bool:
    """The answer retracts what it says, doubts it in a clause that says nothing else, or asks it."""
    if is_new(case, RETRACTION, case.given.masked):
        return True
    last = case.clauses[-1]
    if case.given.text.endswith("?") and case.holds(*last.units):
        return True
    doubted = [part for part in case.clauses if is_new(case, DOUBT, part.text)]
    return any(len(case.new(u for u in part.units if not DOUBT.search(u.text))) <= 1 for part in doubted)


def gives_up(case: Case) -> bool:
    """What a clause says is missing is what was asked for: nothing of its own is named."""
    if GIVES_UP.search(case.expected.full.text) and not case.is_quoted:
        return False
    for number, part in enumerate(case.clauses):
        if GIVES_UP.search(part.text) and not (number and _MORE.search(part.text)):
            rest = re.findall(r"[^\W\d_]+", GIVES_UP.sub(" ", part.text))
            if all(has_word(stem(word), case.known) for word in rest if says_something(word)):
                return True
    return False


@dataclass(frozen=True, slots=True)
class Item:
    """What stands between two joints, and the joint before it."""

    joint: str
    text: str
    units: tuple[Unit, ...]


def lists(text: str, units: Sequence[Unit]) -> Iterator[list[Item]]:
    """A text cut at commas and conjunctions, a list for what stands between two ends of a sentence or brackets."""
    found: list[Item] = []
    joint, position = "", 0
    for cut in [*_JOINT.finditer(text), None]:
        end = cut.start() if cut else len(text)
        here = tuple(unit for unit in units if position <= unit.start < end)
        if here or (found and cut):
            found.append(Item(joint, text[position:end], here))
        if cut:
            joint, position = cut[0], cut.end()
        if cut is None or _BREAK.search(cut[0]) or cut[0] == " ":
            yield found
            found = []


def rival_items(case: Case) -> bool:
    """A list or a choice in which the reference is one item and another is new."""
    chosen = _OR.search(case.expected.full.text) is None or case.is_quoted
    chosen = chosen and not (_OR.search(case.asked.reading.text) and len(case.given.text.split()) > 8)
    for items in lists(case.given.masked, case.given.units):
        bare = case.is_short and all(is_bare(item) for item in items)
        states = [state(case, item, bare) for item in items]
        for at, (left, right) in enumerate(pairwise(items)):
            if _OR.search(right.joint) and chosen and is_choice(case, items[: at + 1], right):
                return True
        if not (case.is_short or (case.asked.person and case.expected.names)):
            continue
        for first, last in runs(states):
            run = items[first:last]
            if "held" in states[first:last] and "new" in states[first:last] and (bare or touches(case, run)):
                news = states[first:last].count("new")
                if any(_AND.search(item.joint) for item in run[1:]):
                    return True
                if bare and len(run) == len(items) and (news > 1 or case.asked.person):
                    return True
    return False


def is_choice(case: Case, before: Sequence[Item], right: Item) -> bool:
    """Whether an "or" joins a part of the reference to something else."""
    left = before[-1]
    if not case.is_short and (case.new(left.units) or case.new(right.units)):
        return True
    if any(case.holds(*one.units) and len(other.units) <= SHORT for one, other in ((left, right), (right, left))):
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
    """A candidate and nothing else."""
    verb = re.search(r"\b(?:is|was|are|were|has|had|will)\b", item.text)
    return len(item.units) <= 3 and len(item.text.split()) <= 4 and verb is None


def state(case: Case, item: Item, bare: bool) -> str:
    """ "held": it has a part of the reference; "new": a short one of which nothing was said; else "other"."""
    if case.holds(*item.units):
        return "held"
    new = case.new(item.units)
    first = re.match(r"(?:(?:the|an?)\s)?(\w*)", item.text.lower())
    if not new or (first and (first[1].endswith(("ed", "ing")) or (first[1] and not says_something(first[1])))):
        return "other"
    if bare:
        return "new"
    named = all(unit.fact is None and (unit.text[0].isupper() or not case.is_mixed) for unit in new)
    return "new" if named and new[0] == item.units[0] and len(new) <= SHORT else "other"


def runs(states: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Where items that can be candidates stand side by side."""
    first = 0
    for at, one in enumerate([*states, "other"]):
        if one == "other":
            if at - first > 1:
                yield first, at
            first = at + 1


def touches(case: Case, run: Sequence[Item]) -> bool:
    """Whether an item touches the next one with a part of the reference: not "by Ada at noon and in Rome"."""
    return any(
        case.holds(*left.units) != case.holds(*right.units)
        and (case.holds(*left.units[-1:]) or case.holds(*right.units[:1]))
        for left, right in pairwise(run)
    )


def rival_facts(case: Case) -> bool:
    """A fact that contradicts the right one, with nothing new between the two, or alone in its sentence."""
    kinds = case.expected.kinds or tuple({type(fact) for fact in case.expected.facts})
    if not case.expected.kinds and len(case.expected.words) > 6:
        return False
    units = [unit for part in case.clauses if part.asserted for unit in part.units]
    values = [unit.fact.value for unit in units if isinstance(unit.fact, Quantity) and not case.holds(unit)]
    if len(values) > 1 and any(isinstance(f, Quantity) and abs(sum(values) - f.value) < 1e-6 for f in case.expected.facts):
        return False  # a breakdown
    return any(
        isinstance(unit.fact, kinds) and is_rival(case, unit) and (is_beside(case, units, at) or is_alone(case, unit))
        for at, unit in enumerate(units)
    )


def is_rival(case: Case, unit: Unit) -> bool:
    """Whether a fact is of the kind of the reference's and contradicts everything said."""
    fact = unit.fact
    if fact is None or (isinstance(fact, Quantity) and fact.weak) or case.is_known(unit):
        return False
    others = [other for other in case.said if same_kind(fact, other)]
    return any(other in case.expected.facts for other in others) and all(contradict(other, fact) for other in others)


def is_beside(case: Case, units: Sequence[Unit], at: int) -> bool:
    """Whether between a fact and one of the reference nothing new is said."""
    for others in (units[:at][::-1], units[at + 1 :]):
        for unit in others:
            if unit.fact is not None and case.holds(unit):
                return True
            if unit.fact is None and not case.is_known(unit) and unit.stem not in ("later", "then", "now"):
                break
    return False


def is_alone(case: Case, unit: Unit) -> bool:
    """Whether a fact stands in a sentence that says nothing else new."""
    own = next(part for part in case.clauses if unit in part.units)
    if _CHANGED.search(own.text[: unit.start - own.start]):
        return True
    whole = [other for part in case.clauses if part.sentence == own.sentence for other in part.units]
    return all(other.fact is not None or case.is_known(other) for other in whole)


def rival_clause(case: Case) -> bool:
    """A clause without the reference has more of the question than those with it, and names another."""
    if not (case.is_mixed and case.expected.names):
        return False
    held = [case.holds(*part.units) for part in case.clauses]
    shared = [len({unit.stem for unit in part.units} & case.asked.stems) for part in case.clauses]
    most = max((count for count, own in zip(shared, held, strict=True) if own), default=0)
    for part, own, count in zip(case.clauses, held, shared, strict=True):
        if part.asserted and not own and (count > most or _IN_FACT.search(part.text)):
            new = case.new(part.units)
            new = [unit for unit in new if unit.stem != "fact"]
            named = bool(new) and new[0].fact is None and new[0].text[0].isupper()
            if named and word_before(case.given.masked, new[0].start) not in _PLACING:
                return True
    return False


def denied(case: Case) -> bool:
    """What the reference asserts is denied and nowhere asserted, or the other way round."""
    if case.is_quoted:
        return False
    asserts, denies, statuses = case.stems(True), case.stems(False), case.expected.statuses
    if {True, False} <= statuses and case.expected.denied & asserts and not denies:
        return True
    if statuses == {True} and not _OR.search(case.asked.reading.text):
        for part in case.clauses:
            if part.asserted is False and part.units and all(unit.stem in case.asked.stems for unit in part.units):
                return True
    return bool(({*case.expected.words} - case.expected.denied) & denies - asserts)


def opposed(case: Case) -> bool:
    """A word of the reference, or of the question, is answered by its opposite."""
    parts = [part for part in case.clauses if case.holds(*part.units)]
    given = {unit.stem for part in parts for unit in part.units if unit.fact is None}
    given |= {word for part in parts for word in _DIRECTION.findall(part.text.lower())}
    before = case.asked.reading.text if case.is_quoted else case.texts
    said = {*(case.asked.stems if case.is_quoted else case.known), *_DIRECTION.findall(before.lower())}
    said |= {stem("refuse")} if REFUSAL.search(before) else set()
    if any(OPPOSITES.get(word, set()) & said - given or word.removeprefix("un") in said for word in given - said):
        return True
    facts = [unit for part in parts for unit in part.units if unit.fact and case.holds(unit) and not is_whole(unit.fact)]
    return any(_STRICT.search(case.given.masked[: unit.start]) for unit in facts) and not _LIMIT.search(before)


def turned_round(case: Case) -> bool:
    """A name of the question stands where the reference belongs."""
    question, text = case.asked.reading.text, case.given.masked
    names = find_names(case.given) if case.is_mixed and case.is_short else []
    own = {token for name in case.expected.names for token in name.tokens if len(token) > 1}
    active, whom = _BY_WHO.match(question), _TO_WHOM.match(question)
    for name in names:
        if not own & {*name.tokens}:
            agent = re.search(r"(\w+) by\s$", text[: name.start])
            if agent and active and stem(agent[1]) in case.asked.stems:
                return True
            continue
        before, after = word_before(text, name.start), re.match(r"\W+(\w+)", text[name.end :])
        if active and stem(before) == stem(active["verb"]) and len(text[: name.start].split()) > 1:
            return True
        if whom and after and stem(after[1]) in case.asked.stems and not after[1].endswith("ing"):
            return True
        for other in names:
            place = question.lower().find(other.tokens[0])
            if place < 0 or own & {*other.tokens}:
                continue
            slot = word_before(question, place)
            if slot in ("from", "for", "to", "of", "into", "with", "against", "under") and before == slot:
                if word_before(text, other.start) != slot:
                    return True
    return False


def mixed_up(case: Case) -> bool:
    """Hardly anything is new but the order: the parts of a list are mixed, or the sides of an "after" exchanged."""
    if case.is_quoted or len(case.new(case.given.units)) > 2:
        return False
    ours, theirs = (parts_of(reading.masked, reading.units) for reading in (case.expected.full, case.given))
    places = [[[at for at, part in enumerate(ours) if has(part, unit)] for unit in part] for part in theirs]
    sure = [[at[0] for at in part if len(at) == 1] for part in places]
    order = [at for part in sure for at in part]
    if order == sorted(order):
        return False
    if len(ours) == len(theirs) and any(sum(len(ours[at]) > 1 for at in {*part}) > 1 for part in sure):
        return True
    own, given = case.expected.full, case.given
    for link in _LINK.finditer(given.masked):
        middle = own.masked.find(link[0])
        behind = [unit for unit in given.units if unit.start >= link.end()][:2]
        early = [unit for unit in own.units if unit.start < middle]
        late = [unit for unit in own.units if unit.start > middle]
        if any(has(early, unit) and not has(late, unit) for unit in behind):
            return True
    return False


def parts_of(text: str, units: Sequence[Unit]) -> list[list[Unit]]:
    """The units between commas, conjunctions and prepositions."""
    found, position = [], 0
    cuts = sorted([*(c.span() for c in _JOINT.finditer(text)), *(c.span() for c in _LINK.finditer(text))])
    for end, following in [*cuts, (len(text), len(text))]:
        part = [unit for unit in units if position <= unit.start < end]
        found += [part] if part else []
        position = max(position, following)
    return found


def has(units: Sequence[Unit], wanted: Unit) -> bool:
    """Whether one of the units says the same."""
    return any(
        agree(unit.fact, wanted.fact) if unit.fact and wanted.fact else unit.fact is wanted.fact and unit.stem == wanted.stem
        for unit in units
    )


def says_too_much(case: Case) -> bool:
    """What the answer adds to reference and question: a flood of it, sentences on something else, or a mail's text.

    An answer with a short reference may go on longer where it repeats the question.
    """
    sentences: dict[int, list[Clause]] = {}
    for part in case.clauses:
        sentences.setdefault(part.sentence, []).append(part)
    units = [[unit for part in parts for unit in part.units] for parts in sentences.values()]
    news = [len(case.new(one)) for one in units]
    strange = sum(
        len(one) == new > 0 and not any(_ANAPHOR.search(part.text) or is_new(case, GIVES_UP, part.text) for part in parts)
        for parts, one, new in zip(sentences.values(), units, news, strict=True)
    )
    held = next((one for one in units if case.holds(*one)), [])
    late = held is not units[0]
    if case.is_short and sum(unit.stem in case.asked.stems - {*case.expected.full.stems} for unit in held) >= 2:
        sentences_on, longest, total = 4, 28, 60
    else:
        sentences_on = 3 if case.is_short and not late else 2
        longest, total = 12 if case.is_mixed else 6, 8 if late else 30
    if strange >= sentences_on or max(news) > longest or sum(news) > total or is_new(case, COPIED, case.given.masked):
        return True
    said = case.texts.lower().split()
    personal = any(word.lower() not in said for word in _PERSONAL.findall(case.given.masked))
    if case.is_short:
        return sum(news) > 8 and personal
    return sum(news) > (3 if strange else 4 if personal else 7)
