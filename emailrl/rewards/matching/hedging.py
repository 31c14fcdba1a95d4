"""One rule against hedging: an answer is cut into segments, and no two of them may offer different candidates."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

from emailrl.facts.dates import Date, Time
from emailrl.facts.quantities import Quantity
from emailrl.facts.reading import Unit, contradict, same_kind
from emailrl.facts.words import COUNTRIES, STATES, STOPWORDS, TITLES, listed
from emailrl.rewards.matching.question import Case

JOINT = re.compile(
    r"(?P<stop>(?<=[\w)\ue000%])(?<!\b[A-Z])(?<!\b(?:St|Co|vs|No|Jr|Sr))\s*[.!?]\s+|(?<=[\w\ue000]):\s|\s*(?:[;\n]|\.\.+)\s*"
    r"|(?:^|\s)[A-E]\)\s)"
    r"|(?P<choice>(?:\s*,)?\s+(?:and/or|or(?!\s(?:so|more|less|later|earlier|not)\b)|as well as|vs|versus|aka|a\.?k\.?a"
    r"|alias)\b\.?\s+|(?<=[\w\ue000]{3})/(?=[\w\ue000]{3})|\s*(?:--+|-+>|=+>|[|~\\])\s*"
    r"|\s[^\w\s\ue000()&,.:;!?$%#@'=+\u2013\u2014-]+\s)"
    r"|(?P<and>(?:\s*,)?\s+(?:and|but|plus|along with|then|&)(?:\salso)?\s+)"
    r"|(?P<list>\s*,\s+|\s+[-\u2013\u2014]+\s+)|(?P<bracket>\s*[()\[\]]\s*)"
    r"|(?P<clause>\s+(?:while|whereas|though|although|because|since|if|unless|when|so that)\s+)",
    re.IGNORECASE,
)
_LOOSEST = ("", "list", "and", "clause", "bracket", "stop", "choice")  # Of several joints in a row the last counts.
_FLUENT = re.compile(
    r"\b(?:is|are|was|were|be|been|has|have|had|will|would|can|could|should|may|might|must|do|does|did|he|she|it|they|we"
    r"|you|i|said|says)\b|'(?:s|re|ll|ve)\s(?=[a-z])"
    r"|(?-i:\b[a-z]{2,}(?:ed\b|s\s(?=the\b|an?\b|his\b|her\b|[A-Z])))",
    re.IGNORECASE,
)
_WORD = re.compile(r"\ue000+|[^\W_]+(?:'[^\W_]+)*")
_SKIP = listed("a an the also then so both as each maybe perhaps just about around co inc")
_ASIDE = re.compile(
    r"(?:who|which|where|whose|ie|i\.e|e\.g|called|\w{2,}(?:ed|ing|ly)|not|\w+\sof)\b|(?:\w+\s)*\w+'s?\s"
)
_APPOSED = re.compile(r"(?:an?|the|his|her|its|their|our|your|my)\s+[a-z]")
"""Begins a remark on the candidate before it ("awaiting pickup"), or on a name ("the treasurer")."""
_ANOTHER = re.compile(  # Introduces another candidate, whatever it is.
    r"\b(?:fact|actually|reality|truth|now|currently|today|elsewhere|instead|another|other|answer|enter)\b.{0,20}$"
)
_RENEWED = re.compile(
    r"\b(?:it|that)(?:\sis|\swas|'s)(?:\s(?:at|in|on|by))?$|\b(?:mov|chang|postpon|shift|slip|rais)\w*\b.{0,20}\bto$"
)
"""Introduces the value that really holds."""
_OR = re.compile(r"\bor\b(?!\s(?:so|more|less|later|earlier|not)\b)", re.IGNORECASE)
_WHERE = re.compile(
    r"\b(?:where|(?:what|which)\s(?:\w+\s){0,2}(?:place|location|address|building|floor|room))\b", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of an answer between two joints, and the kind of joint before it."""

    joint: str
    text: str
    units: tuple[Unit, ...]
    held: tuple[Unit, ...]  # Parts of the reference.
    new: tuple[Unit, ...]  # What neither reference nor question says.
    rivals: tuple[Unit, ...]  # What could be another answer.
    left: tuple[str, ...]  # Words before and behind what it holds or, without that, its rivals; no articles.
    right: tuple[str, ...]

    @property
    def is_bare(self) -> bool:
        """Whether it is only a candidate, without a sentence."""
        return not self.left and not self.right and not _FLUENT.search(self.text)

    @property
    def is_loose(self) -> bool:
        """Whether it is only a candidate behind a preposition."""
        return not {*self.left, *self.right} - STOPWORDS and not _FLUENT.search(self.text)


def hedges_between(case: Case) -> bool:
    """Whether an answer offers two candidates: joined by "or", in the same place of two segments, or side by side."""
    if case.asked.polar:
        return False
    echo = [unit for unit in case.given.units if case.is_asked(unit) and not case.holds(unit)]
    parts, fluent = segments(case, about=len(echo) > 1)
    values = [unit.fact.value for part in parts for unit in part.rivals if isinstance(unit.fact, Quantity)]
    totals = [own.value for own in case.expected.facts if isinstance(own, Quantity)]
    if len(values) > 1 and not _OR.search(case.given.text) and any(abs(sum(values) - own) < 1e-6 for own in totals):
        return False  # a breakdown
    tail = [*takewhile(lambda part: part.joint == "list" and part.is_loose and part.new == part.units, parts[:0:-1])]
    if (len(tail) > 1 or (tail and tail[0].rivals and tail[0].is_bare)) and not any(
        is_aside(case, part, fluent) for part in tail
    ):
        return True
    strange = sum(case.new(part.units) == [*part.units] for part in parts)
    if strange > 2 and 3 * strange > 2 * len(parts) and all(part.joint == "list" for part in parts[1:]):
        return True
    manner = Manner(fluent, loose=len(echo) < 2 or not fluent)
    if (
        is_aside_only(case)
        or (not fluent and has_twin(case))
        or any(one.held and is_crowded(case, one, manner) for one in parts)
    ):
        return True
    return any(rivals_beside(case, parts, at, step, manner) for at in range(len(parts)) for step in (-1, 1))


def is_aside_only(case: Case) -> bool:
    """Whether the reference's part is only in brackets, behind another statement."""
    text = case.given.masked
    depths = [(unit, text.count("(", 0, unit.start) - text.count(")", 0, unit.start)) for unit in case.given.units]
    outside = [unit for unit, depth in depths if depth <= 0]
    return not any(map(case.holds, outside)) and len(case.new(outside)) > 0 and any(depth > 0 for _, depth in depths)


@dataclass(frozen=True, slots=True)
class Manner:
    """How an answer is worded."""

    fluent: bool  # In a sentence.
    loose: bool  # Without two words of the question in a sentence.


def rivals_beside(case: Case, parts: Sequence[Segment], at: int, step: int, manner: Manner) -> bool:
    """Whether a segment that has a part of the reference competes with others, up to the next that has one."""
    one, near, joints = parts[at], at + step, set[str]()
    edge = bool(one.held) and not (one.left if step < 0 else one.right)
    while one.held and 0 <= near < len(parts):
        other = parts[near]
        joints.add((parts[near + 1] if step < 0 else other).joint)
        joined = manner.loose or (
            (edge or len(other.units) > 3) and 3 * len(case.new(other.units)) > 2 * len(other.units)
        )
        if "choice" in joints and joined and is_choice(case, other):
            return True
        if other.held:
            return False
        if other.new and competes(case, one, other, joints, edge, manner):
            return True
        edge = edge and other.is_bare
        near += step
    return False


def is_choice(case: Case, other: Segment) -> bool:
    """Whether what an "or" joins to the answer makes it a choice, of which neither question nor reference speaks."""
    if _OR.search(case.expected.full.text):
        return False
    either = _OR.search(case.given.masked) is not None and not _OR.search(case.asked.reading.text)
    return either or (not other.held and bool(case.new(other.units)))


def segments(case: Case, *, about: bool) -> tuple[list[Segment], bool]:
    """Cut an answer at its joints, save where it repeats the reference; and say whether it is a sentence: where it has
    a part of the reference, or anywhere if it is ``about`` the question."""
    text, pieces = case.given.masked, list[tuple[str, int, int, list[Unit], list[Unit]]]()
    plain, said = case.given.text.lower(), case.expected.full.text.lower()
    joint, position = "stop", 0
    for cut in [*JOINT.finditer(text), None]:
        if cut and cut[0].strip() and plain[max(0, cut.start() - 4) : cut.end() + 4] in said:
            continue
        end = cut.start() if cut else len(text)
        if units := [unit for unit in case.given.units if position <= unit.start < end]:
            pieces.append((joint, position, end, units, holders(case, units)))
            joint = ""
        if cut:
            joint = max(joint, cut.lastgroup or "", key=_LOOSEST.index)
            position = cut.end()
    fluent = any(held and _FLUENT.search(text[start:end]) for _, start, end, _, held in pieces)
    fluent = fluent or (about and _FLUENT.search(text) is not None)
    known = {word.lower() for word in _WORD.findall(case.expected.full.text)} | _SKIP
    asserted, found = {unit.start for unit in case.asserted}, list[Segment]()
    for joint, start, end, units, held in pieces:
        new = case.new(unit for unit in units if unit.start in asserted)
        rivals = rivals_of(case, new, not fluent)
        place = held or rivals or new or units
        if rivals and not held and all(unit.text[0].isupper() for unit in units):
            place = units  # "Dan Thomas", where Dan is known
        words = [(word.start(), word[0].lower()) for word in _WORD.finditer(text[start:end])]
        words = [(start + at, word) for at, word in words if word not in known]
        left = tuple(word for at, word in words if at < place[0].start)
        right = tuple(word for at, word in words if at >= place[-1].end)
        found.append(Segment(joint, text[start:end], tuple(units), tuple(held), tuple(new), tuple(rivals), left, right))
    return found, fluent


def has_twin(case: Case) -> bool:
    """Whether the answer asserts a number or code that is one of the reference's but for its digits, in its place."""
    own = case.expected.full.text.lower().split()
    places = {(before, _masked(word)) for before, word in pairwise(["", *own]) if re.search(r"\d", word)}
    codes = {form for _, form in places if form.count("0") > 3}
    known = {place for unit in case.given.units if case.is_known(unit) for place in range(unit.start, unit.end)}
    said = {place for part in case.clauses if part.asserted for place in range(part.start, part.start + len(part.text))}
    digits, before = {re.sub(r"\D", "", word) for word in own}, ""
    for found in re.finditer(r"[^\s()]+", case.given.text.lower()):
        form, at = _masked(found[0]), found.start()
        is_twin = "0" in form and ((before, form) in places or form in codes)
        if is_twin and at in said - known and re.sub(r"\D", "", found[0]) not in digits:
            return True
        before = found[0]
    return False


def _masked(word: str) -> str:
    return re.sub(r"\d", "0", word.strip(".,;:"))


def holders(case: Case, units: Sequence[Unit]) -> list[Unit]:
    """The units that are parts of the reference; a first or last name beside a stranger's is none."""
    held = [unit for unit in units if case.holds(unit) and (unit.fact or not case.expected.kinds)]
    if case.expected.names and (case.asked.person or not case.expected.words) and held and case.is_mixed:
        words = {unit.text.lower() for unit in held}
        part = all(len(name.tokens) > 1 and len(words & {*name.tokens}) == 1 for name in case.expected.names)
        if part and any(unit.text[0].isupper() and not unit.fact for unit in case.new(units)):
            return []
    return held


def rivals_of(case: Case, new: Sequence[Unit], loose: bool) -> list[Unit]:
    """What of the new could be another answer: a fact of the reference's kind, a name for a name, anything for a
    phrase. In a loose answer any name does; places that contain the right one, initials and details of a date do not.
    """
    expected = case.expected
    kinds = expected.kinds or (() if expected.names or expected.words else tuple({type(f) for f in expected.facts}))
    if kinds and not loose:
        return [unit for unit in new if contradicts(case, unit)]
    own = {token for name in expected.names for token in name.tokens}
    initials = {token[0] for token in own} | {*"".join(stem[0] for stem in expected.full.stems if stem)}
    larger = TITLES if own & COUNTRIES else COUNTRIES | TITLES if own & STATES else COUNTRIES | STATES | TITLES
    dated = any(isinstance(fact, Date | Time) for fact in expected.facts)
    new = [
        unit
        for unit in new
        if (contradicts(case, unit) or not (dated and isinstance(unit.fact, Date | Time)))
        and not (isinstance(unit.fact, Quantity) and unit.fact.weak)
        and (unit.fact or not ({unit.text.lower()} & larger or {*unit.text.lower()} <= initials))
    ]
    named = [unit for unit in new if unit.fact or unit.text[0].isupper() or not case.is_mixed]
    if loose and not (kinds or expected.names):
        return new
    if loose:
        return [unit for unit in named if not (kinds and unit.fact) or contradicts(case, unit)]
    return [unit for unit in named if unit.fact is None] if expected.names and not expected.words else new


def competes(case: Case, held: Segment, other: Segment, joints: set[str], edge: bool, manner: Manner) -> bool:
    """Whether a segment without the reference offers another candidate than the one that has it."""
    telling = other.rivals or [unit for unit in other.new if unit.fact or unit.text[0].isupper()]
    if telling and _ANOTHER.search(" ".join(other.left)) and all(word in STOPWORDS for word in other.right):
        return True
    if not other.rivals:
        return False
    if contradicts(case, other.rivals[0]) and _RENEWED.search(" ".join(other.left)):
        return True
    named = bool(case.expected.names) and not case.expected.words
    rest = [unit for unit in other.units if unit not in other.rivals]
    bare = other.is_bare or ("stop" in joints and manner.loose and other.is_loose)
    pure = all(unit.text[0].isupper() if named else case.is_known(unit) for unit in rest)
    near = not manner.fluent or (edge and (manner.loose or "stop" not in joints))
    if bare and pure and near and not is_aside(case, other, manner.fluent):
        lower = not other.rivals[0].fact and other.rivals[0].text[0].islower()
        return manner.loose or not (lower and case.is_mixed)
    if held.left[-2:] == other.left[-2:] != () or held.right[:2] == other.right[:2] != ():
        return True
    about = named and not other.left and any(unit.text[0].islower() for unit in rest)
    if about and all(map(case.is_asked, rest)):  # "Bo will chair it"
        return True
    stated = other.rivals[0].fact and joints == {"stop"} and _FLUENT.search(other.text)
    return bool(stated) and any(map(case.is_asked, rest))


def is_aside(case: Case, other: Segment, fluent: bool) -> bool:
    """Whether a segment is a remark on the candidate before it: "the treasurer", "shipped in May"."""
    text = other.text.lstrip()
    if text.isupper() and {*text.strip()} <= {*re.findall(r"\b[A-Z](?=[a-z])", case.given.text)}:
        return True  # initials: "Federal Power Commission (FPC)"
    if _ASIDE.match(text) or (case.expected.names and _APPOSED.match(text)):
        return True
    detail = text[0].islower() and not _APPOSED.match(text)
    return _WHERE.search(case.asked.reading.text) is not None and (detail or (fluent and other.joint == "list"))


def contradicts(case: Case, unit: Unit) -> bool:
    """Whether a fact has the kind of the reference's and contradicts all known facts of that kind."""
    fact = unit.fact
    kinds = case.expected.kinds or tuple({type(own) for own in case.expected.facts})
    if fact is None or not isinstance(fact, kinds) or (isinstance(fact, Quantity) and fact.weak) or case.is_known(unit):
        return False
    others = [other for other in case.expected.known_facts if same_kind(fact, other)]
    return any(other in case.expected.facts for other in others) and all(contradict(other, fact) for other in others)


def is_crowded(case: Case, one: Segment, manner: Manner) -> bool:
    """Whether another candidate stands in the same segment: a contradicting fact, or words without any link."""
    text = case.given.masked
    if not manner.fluent:
        for unit in one.rivals:
            if contradicts(case, unit) and not re.search(r"\b(?:of|out of)\s(?:the\s)?$", text[: unit.start]):
                return True
    at = [place for place, unit in enumerate(one.units) if unit in one.held]
    said = [one.units[place].stem or one.units[place].fact for place in at]
    if not manner.fluent and len(set(said)) < len(said) and len(one.new) > 0:
        return True  # repeated, with something else between
    glued = list[Unit]()
    for side in (one.units[: at[0] + 1][::-1], one.units[at[-1] :]):
        for near, unit in pairwise(side):
            first, last = sorted((near, unit), key=lambda each: each.start)
            between = {word.lower() for word in _WORD.findall(text, first.end, last.start)} - _SKIP
            if unit not in one.rivals or between - {"to"} or (between and not unit.text[0].isupper() and not unit.fact):
                break
            glued.append(unit)
    place = min(unit.start for unit in (*glued, *one.held))
    if any(contradicts(case, unit) for unit in glued) and not re.search(r"\bfrom\s(?:the\s)?$", text[:place]):
        return True
    upper = case.given.text == case.given.text.upper()
    if upper and not manner.fluent and any(not isinstance(unit.fact, Date | Time) for unit in one.new):
        return True
    if not manner.loose or (manner.fluent and not upper):
        return False
    named = bool(case.expected.names)
    glued = [unit for unit in glued if unit.text[0].isupper() or not named or not case.is_mixed]
    return len(glued) > (0 if upper else 1 if named or (case.expected.words and not case.is_mixed) else 2)
