"""Decides whether an answer agrees with the reference for the question.

It must contain what the reference requires, or take its side on a yes/no question, and no veto may stand against it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from emailrl.facts.dates import Date, Time
from emailrl.facts.quantities import Quantity
from emailrl.facts.reading import EMAIL, Fact, Literal, Name, Reading, Unit, agree, name_of, read, same_token
from emailrl.facts.words import OPPOSITES, STOPWORDS, TITLES, clean, has_word, is_i_dont_know, says_something
from emailrl.rewards.matching.language import COURTESY, DENIAL, FRAME, NO_DENIAL, REFUSAL
from emailrl.rewards.matching.question import SHORT, WHOLE, Case, clauses, is_whole, read_reference
from emailrl.rewards.matching.vetoes import has, stands_against

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
QUOTED = frozenset(("subject", "address", "text"))  # Answers compared word for word.

LONGEST = 4000  # Maximum characters of an answer.
_SUBJECT = re.compile(r"\b(?:subject|title)\b", re.IGNORECASE)
_MARKS = re.compile(r"(?<!\w)(?:(?:re|fwd?)\s?:\s*)+(?=\w)", re.IGNORECASE)
_NOT_SHOWN = re.compile(r"<!--.*?(?:-->|$)|~~.*?~~|<(del|s|strike)>.*?</\1>", re.IGNORECASE | re.DOTALL)
_NOT_SIGN = re.compile(r"[\u00ac\u2260\u274c]|!=|<>|(?<!\w)!(?=\w)")


def match(question: str, reference: str, answer: str, *, kind: str | None = None) -> bool:
    """Return whether ``answer`` agrees with ``reference`` as an answer to ``question``. Deterministic, about a
    millisecond. If the question's ``kind`` is known (``KIND_OF``), the answer is compared as that kind only."""
    if len(answer) > LONGEST:
        return False
    if _shown(reference) == reference:
        answer = _shown(answer)
    question, reference, answer = clean(question[:LONGEST]), clean(reference[:LONGEST]), clean(answer)
    if not re.search(r"\w", answer) or is_i_dont_know(answer):
        return False
    sort = KIND_OF.get(kind or "")
    if sort == "subject" or _SUBJECT.search(question) or _MARKS.match(reference):
        reference, answer = _MARKS.sub("", reference), _MARKS.sub("", answer)
    if sort in (None, "person"):
        answer = with_names(answer, reference)
    parts = [reference] if sort else alternatives(reference)
    return any(_agrees(question, part, answer, sort, " / ".join(parts)) for part in parts)


def _shown(answer: str) -> str:
    """An answer without hidden or struck-out text, and with "not" for signs of negation."""
    return _NOT_SIGN.sub(" not ", _NOT_SHOWN.sub(" ", answer))


def with_names(answer: str, reference: str) -> str:
    """Replace the addresses in an answer by the names they spell, unless the reference is an address."""
    if "@" in reference:
        return answer
    return re.sub(EMAIL, lambda found: name_of(found[0].lower()) or found[0], answer)


_JOINED = re.compile(
    r"(?:(?<=[^\W\d_.)])(?<!\band)/(?=[^\W_(])|(?<=\d)/(?=[a-z]+$|[A-Za-z]{3,} \d))"
    r"(?!(?:hour|day|week|month|year|share|head|person|barrel|bbl|gallon|pound|lb|ton|mwh|mmbtu|mcf|h|hr|d)\b)|(?<=\d{4})/(?=\d)|\s\|\s|\s/\s"
)


def alternatives(reference: str) -> list[str]:
    """Split a reference into its alternative answers. "Emily Bronte/Ellis Bell" and "Federal Power Commission (FPC)"
    give two; a path, an address or a rate is one."""
    if short := re.fullmatch(r"(\D{3,})\s\(([A-Z]{2,6})\)", reference):
        return [short[1], short[2]]
    parts = [part.strip() for part in _JOINED.split(reference)]
    plain = not re.search(r"://|www\.|\\|@|(?:^|\s)/\w|(?<!\bSt)(?<!\bMt)(?<!\b[A-Z])(?<!\b[A-Z]{2})[.:;]\s", reference)
    return parts if plain and all(0 < len(part.split()) <= 8 for part in parts) else [reference]


def _agrees(question: str, reference: str, answer: str, kind: str | None, others: str) -> bool:
    bare = _bare(reference)
    if _bare(answer) == bare:
        return True
    asked, expected = read_reference(question, reference, others, kind)
    answer = without_framing(answer, bare, question)
    literals = [fact for fact in expected.facts if isinstance(fact, Literal) and fact.kind != "email"]
    if kind in QUOTED or not (asked.polar or 0 < len(expected.full.units) <= SHORT):
        literals = [*(literals if kind not in QUOTED else ()), Literal(WHOLE, bare)]
    given = read(answer, temporal=asked.temporal, numbering=asked.numbering, literals=literals)
    case = Case(asked, expected, given, clauses(given, expected.said, expected.lasting, expected.echo))
    if not case.clauses:
        return False
    if asked.polar:
        if is_undecided(given) and not is_undecided(expected.full):
            return False
        wanted, taken = side(replace(case, given=expected.full, clauses=expected.clauses)), side(case)
        if wanted is not None and taken is not None:
            return taken is wanted and not contradicts_itself(case) and not stands_against(case)
    if kind in QUOTED and (not case.is_quoted or len(case.new(given.units)) > 1):
        return False
    return (covers(case) or is_part(case)) and not stands_against(case)


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


def covers(case: Case) -> bool:
    asked, expected = case.asked, case.expected
    if asked.quantity and is_zero(expected.full) and is_zero(case.given):
        return True
    possible = [part for part in case.clauses if part.asserted or part.asserted in expected.statuses]
    given = [
        unit.fact
        for part in possible
        for unit, behind in pairwise([*part.units, None])
        if unit is not None and unit.fact is not None and not is_counted(case, unit, behind)
    ]

    def is_given(fact: Fact) -> bool:
        return any(agree(fact, other) for other in given)

    if any(map(is_whole, given)):
        return True
    if expected.kinds:
        wanted = [fact for fact in expected.facts if isinstance(fact, expected.kinds)]
        if asked.unit is not None:  # "how many feet": a bare number is one of feet
            base, factor = asked.unit
            bare = [fact for fact in wanted if isinstance(fact, Quantity) and fact.base is None]
            wanted = [replace(fact, base=base, factor=factor) if fact in bare else fact for fact in wanted]
        return most(map(is_given, wanted))
    words = [_TOKEN.findall(part.text.replace("'s", "")) for part in possible]
    named = most(any(has_name(name, part, case) for part in words) for name in expected.names)
    if asked.person and expected.names and not asked.several:
        return named
    weak = [fact for fact in expected.facts if isinstance(fact, Quantity) and fact.weak]
    strong = [fact for fact in expected.facts if fact not in weak]
    if not named or not most(map(is_given, strong)):
        return False
    stems, denied, count = case.stems(True), case.stems(False), len(expected.words)
    # The last word must not be missing, as in "the room was flooded"; a reference of three words may also be cut short,
    # but nothing may replace its last one.
    linked = any(word in STOPWORDS - {"the", "a", "an"} for word in expected.full.text.lower().split())
    plain = linked and not (expected.names or expected.facts or expected.lasting or asked.polar)
    ends = plain and (3 < count <= 6 or (count == 3 and bool(case.new(case.given.units))))
    if ends and not has_word(expected.words[-1], stems | denied):
        return False
    hits = sum(has_word(word, denied if word in expected.denied else stems) for word in expected.words)
    if expected.words or strong or expected.names:
        weak = [fact for fact in weak if fact != Quantity(1.0, weak=True)]
    hits += sum(map(is_given, weak))
    if any(isinstance(fact, Literal) for fact in strong):
        return hits >= (count + len(weak)) // 3
    return hits >= enough(count + len(weak), bool(strong or expected.names), not stems)


_AND = re.compile(r"(?:'s)?(?:\s?,)?\s(?:and|&|plus)\s(?:the\s|an?\s)?")
_FINITE = re.compile(
    r"\b(?:is|are|was|were|be|been|has|have|had|will|would|can|could|should|may|might|must|do|does|did|[a-z]+ed)\b"
)
_AUXILIARY = r"(?:did|do|does|was|is|were|are|had|has|have|will|would|could|should|can)\b"
_ENTITY = re.compile(  # Asks for a thing that a name, a number or a code answers.
    r"\b(?:which|whose|where|who|whom|when|how (?:much|many|long|far|often))\b"
    rf"|\b(?:at|in|on|for|to|by|of|from|with) what\b|\bwhat (?!{_AUXILIARY})\w+",
    re.IGNORECASE,
)


def is_part(case: Case) -> bool:
    """Whether an answer only repeats what a reference that is a sentence adds to the question, and enough of it: what
    the question asks for (a person, a time, an amount, a third of the names), or a third of all."""
    asked, full = case.asked, case.expected.full
    said = [unit for units in case.sentences.values() if case.holds(*units) for unit in units]
    own, given = ([unit for unit in units if not case.is_asked(unit)] for units in (full.units, said))
    repeated, new = len(full.units) - len(own), case.new(said)
    if not given or len(said) >= len(full.units) or not (repeated > 1 or _FINITE.search(full.text)):
        return False
    if any(unit.fact for unit in new) or 3 * len(new) > len(given) or any(unit not in case.asserted for unit in given):
        return False
    for one, other in pairwise(own):  # "Ada and Bo" need both
        alike = bool(one.fact) is bool(other.fact) and one.text[0].isupper() is other.text[0].isupper()
        if alike and has(given, one) != has(given, other) and _AND.fullmatch(full.text, one.end, other.start):
            return False
    if case.expected.kinds:
        return any(isinstance(unit.fact, case.expected.kinds) for unit in given)
    if _ENTITY.search(asked.reading.text):
        if asked.person and case.expected.names:
            words = _TOKEN.findall(case.given.text.replace("'s", ""))
            return any(has_name(name, words, case) for name in case.expected.names)
        named = [has(given, unit) for unit in own if unit.fact or unit.text[0].isupper()]
        if 3 * sum(named) >= len(named) > 0:
            return True
    return repeated > 1 and 3 * len(given) >= len(own)


def is_counted(case: Case, unit: Unit, behind: Unit | None) -> bool:
    """Whether a number counts things ("15 members"), and the reference has an amount in a unit ("15%")."""
    if not isinstance(unit.fact, Quantity) or unit.fact.base is not None or behind is None or behind.fact is not None:
        return False
    measured = any(isinstance(fact, Quantity) and fact.base is not None for fact in case.expected.facts)
    adjacent = behind.start == unit.end + 1 and behind.text.endswith("s")
    return measured and adjacent and not case.is_known(behind)


def enough(total: int, others: bool, bare: bool) -> float:
    """Return how many of ``total`` words an answer must contain. Half if there are names or facts (``others``);
    otherwise all of one or two, and a smaller share of more."""
    if others:
        return 0 if total == 1 and bare else (total + 1) // 2
    return max(total, 1) if total <= 2 else (0.66 if total <= 6 else 0.5) * total - 1e-9


def most(hits: Iterable[bool]) -> bool:
    """Whether at least four fifths of ``hits`` are true, which is all of up to four."""
    found = list(hits)
    return sum(found) >= 0.8 * len(found)


def is_zero(reading: Reading) -> bool:
    numbers = [fact for fact in reading.facts if isinstance(fact, Quantity) and not fact.weak]
    if numbers:
        return all(fact.value == 0 for fact in numbers)
    return re.match(r"(?:there (?:are|were|is|was) )?(?:no|none|zero|nil)\b", reading.text, re.IGNORECASE) is not None


_TOKEN = re.compile(r"[^\W_]+(?:[&_][^\W_]+)*")


def has_name(name: Name, words: Sequence[str], case: Case) -> bool:
    """Whether the words contain a name: all of it, or its first or last word without another name next to it. "Moss"
    and "A. Moss" match Ada Moss; "Ida Moss" does not."""
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
        at = refusal.start()
        around = [part for part in case.clauses if part.start <= at < part.start + len(part.text)]
        if any(part.asserted is None for part in around):
            return None
        negated = any(re.search(r"\bnot\b|n't\b|\bnever\b", part.text, re.IGNORECASE) for part in around)
        return (REFUSAL.search(case.asked.reading.text) is not None) is not negated
    said = {unit.stem for unit in case.given.units if unit.fact is None}
    if any(OPPOSITES.get(word, set()) & stems for word in said - stems):
        return False
    about = [part.asserted for part in case.clauses if any(unit.stem in stems for unit in part.units)]
    return None if not {True, False} & {*about} else False not in about


_FACTUAL = re.compile(r"(?:is|are|was|were|do|does|did|has|have|had)\b", re.IGNORECASE)
_LIMITED = re.compile(  # Tells that a clause qualifies the yes or no before it.
    r"\b(?:will|would|should|shall|can|could|may|might|must|to|only|just|still|some|one|few|most|half|partly|part|yet|but"
    r"|until|if|when|once|after|before|because|as|so|though|although|however|instead|later|than|except)\b",
    re.IGNORECASE,
)
_ALL = ("everyone", "everybody")
_SAID_NO = re.compile(r"\b(?:said|says|answered|replied)\s(?:no|not)\b", re.IGNORECASE)


def contradicts_itself(case: Case) -> bool:
    """Whether a yes or no is followed by its opposite: "No, it was signed", "Yes, she refused"."""
    question, text = case.asked.reading, case.given.text
    word = _NO.match(text) or _YES.match(text)
    if word is None or DENIAL.search(question.text):
        return False
    rests = [(part, part.text[max(0, word.end() - part.start) :].lstrip(" .,;:!")) for part in case.clauses]
    part, rest = next(((part, rest) for part, rest in rests if re.search(r"\w", rest)), (None, ""))
    if part is None:
        return False
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
