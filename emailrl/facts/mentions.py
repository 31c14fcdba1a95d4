"""Facts stated explicitly in an email: one pattern for each kind that a question can ask for.

Two mentions that the grammar reads alike are the same fact. Patterns err on the side of finding too much, because
questions are asked only about emails with exactly one fact of a kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from emailrl.facts import dates, quantities, reading
from emailrl.facts.dates import MONTH, WEEKDAY

_FRACTION = r"(?:1/[2-9]|2/[3579]|3/[457]|4/5)(?![\d/])"
_DATE = (
    rf"(?:{MONTH}\s+(?!0\d\b(?!,?\s+(?:19|20)\d\d)|'|99)\d{{1,2}}(?:st|nd|rd|th)?(?!\d|[:.,]\d\d)"
    r"(?:,?\s+(?:19|20)\d\d)?"
    rf"|\d{{1,2}}(?:st|nd|rd|th)?\s+(?:of\s+)?{MONTH}(?:,?\s+(?:19|20)\d\d)?"
    rf"|(?!{_FRACTION})(?:1[0-2]|0?[1-9])/(?:3[01]|[12]\d|0?[1-9])(?!\d)(?:/(?:19|20)?\d\d)?|(?:19|20)\d\d-\d\d-\d\d)"
)
_TIME = (
    r"(?:(?:1[0-2]|0?[1-9])(?:[:.][0-5]\d)?\s?(?:[ap]\.m\.?|[ap]m)|(?:[01]?\d|2[0-3]):[0-5]\d|\bnoon\b|\bmidnight\b)"
)
_TO = r"\s?(?:-|–|/|&|\bto\b|\band\b|\bor\b|\bthrough\b|\bthru\b|\btill?\b|\buntil\b)\s?"
_UNIT = (
    r"(?:(?:mm|m)?btus?|(?:mm|m|b|t)cf|[mgk]wh?|megawatts|dth|dekatherms|barrels|bbls?|tons|units|seats|copies"
    r"|gallons|acres|square\sfeet|sq\.?\sft\.?|shares)"
)
_LARGE_NUMBER = r"(?<![\d,.$])\d{1,3}(?:,\d{3})+(?![\d,])"
_FILE_NAMES = re.compile(
    r"<<[^>\n]*>>|^[ \t]*-[ \t][^\n]*\.\w{2,4}[ \t]*$|\(See attached file:[^)]*\)", re.IGNORECASE | re.MULTILINE
)
_JOINED_BEFORE = re.compile(r"(?<=\w)|(?<=\w[.,/–-])|(?<=\d:)")
_JOINED_BEHIND = re.compile(r"\w|[.,/–-]\w|:\d")
_CODE = r"[A-Z]{0,3}-?\d[\dA-Za-z-]*"


@dataclass(frozen=True, slots=True)
class Mention:
    """One mention of a fact: its meaning (``key``) and its text in the email."""

    key: Hashable
    text: str
    is_whole: bool  # False if it ends inside a token: the "room 4" of "room 4.41", the "4 %" of "23,4 %".


@dataclass(frozen=True, slots=True, eq=False)
class Extractor:
    """Finds the facts of one kind; ``text`` and ``key`` are made from the pattern's group ``fact`` (or the whole)."""

    pattern: re.Pattern[str]
    key: Callable[[str], Hashable]
    rivals: re.Pattern[str] | None = None
    """Other mentions that could answer the same question, searched in the text that the pattern leaves over."""
    ranges: re.Pattern[str] | None = None  # Mentions of a range (3 to 5 pm) or a list, which are not a single fact.
    lookalikes: re.Pattern[str] | None = None
    """Texts that may be another fact of the kind if they have the length of the fact found."""
    in_file_names: bool = False  # Whether the name of an attached file can state a fact of this kind.

    def find(self, text: str) -> list[Mention]:
        facts = []
        for match in self.pattern.finditer(text):
            start, end = match.span("fact")
            shown = " ".join(match["fact"].split())
            is_whole = not _JOINED_BEFORE.match(text, start) and not _JOINED_BEHIND.match(text, end)
            facts.append(Mention(self.key(shown), shown, is_whole))
        return facts

    def only(self, own: str, full_text: str) -> Mention | None:
        """Return the only fact of its kind in the whole body if it is in the email's own text, else None."""
        if not (mine := self.find(own if self.in_file_names else _FILE_NAMES.sub(" ", own))):
            return None
        fact, every = mine[0], self.find(full_text)
        if len({other.key for other in every}) != 1 or not all(other.is_whole for other in (*mine, *every)):
            return None
        alike = self.lookalikes.findall(full_text) if self.lookalikes else []
        if any(len(other) == len(fact.text) and self.key(other) != fact.key for other in alike):
            return None
        if self.rivals is not None and self.rivals.search(self.pattern.sub(" ", full_text)):
            return None
        return None if self.ranges is not None and self.ranges.search(full_text) else fact


def _letters(text: str) -> str:
    return re.sub(r"[\W_]+", "", text.lower())


def _literal(kind: str) -> Callable[[str], reading.Literal]:
    return lambda text: reading.read_literal(kind, text)


def _read(pattern: re.Pattern[str], read: Callable[[re.Match[str]], Hashable]) -> Callable[[str], Hashable]:
    """What the grammar reads in a text, or the text itself."""
    return lambda text: (read(found) if (found := pattern.search(text)) else None) or text.lower()


_amount = _read(quantities.NUMBER, quantities.read_quantity)
_time = _read(dates.TIME, dates.read_time)
# A year or a weekday only adds detail to the same day.
_date = _read(dates.DATE, lambda found: next(((day.month, day.day) for day in dates.read_dates(found)), None))


def _pattern(body: str, flags: int = re.IGNORECASE) -> re.Pattern[str]:
    return re.compile(body if "(?P<fact>" in body else f"(?P<fact>{body})", flags)


PHONE = Extractor(
    _pattern(r"(?<![\d-])(?:\+?1[-. ])?(?:\(\d{3}\)\s?|\d{3}[-./ ])\d{3}[-. ]\d{4}(?![\d-])"),
    _literal("phone"),
    rivals=re.compile(
        r"\(?\d{3}\)?[-. /]{0,2}\d{3}[-. ]?\d{4}|\+\d\d[\d -]{6,}|(?<!\d)\d-\d{4}(?!\d)|\bx\s?\d{4,5}\b|\bfax\b", re.I
    ),
)
AMOUNT = Extractor(
    _pattern(
        r"\$\s?\d+(?:,\d{3})*(?:\.\d+)?(?:\s{0,3}(?:million|billion|thousand|mm|bn|[mk])\b)?"
        r"(?:\s?(?:/|per\s|an?\s(?=hour|day|week|month|year))\s?(?:mmbtu|mwh|mcf|dth|hour|day|week|month|year|person|share|unit)\b)?"
    ),
    _amount,
    rivals=re.compile(
        rf"\$|\b\d[\d,.]*\s?(?:dollars|cents|bucks|usd|million|billion|mm|k)\b|[€£]|{_LARGE_NUMBER}(?!\s?{_UNIT})",
        re.IGNORECASE,
    ),
    ranges=re.compile(rf"(?<!\w)[-\u2212]\$|\$\s?\d[\d,.]*\s?(?:million|[mk]\b)?{_TO}\$?\d", re.IGNORECASE),
)
PERCENT = Extractor(
    _pattern(r"(?<![\d.])(?:(?<!\w)[-\u2212])?\d{1,3}(?:\.\d+)?\s?(?:%|percent\b)"),
    _amount,
    ranges=re.compile(rf"\d{_TO}\d+(?:\.\d+)?\s?(?:%|percent)", re.IGNORECASE),
)
TIME = Extractor(
    _pattern(rf"(?<![\d:/.$]){_TIME}(?![\d:])"),
    _time,
    ranges=re.compile(rf"\d{_TO}{_TIME}|{_TIME}{_TO}\d", re.IGNORECASE),
)
DATE = Extractor(
    _pattern(rf"(?<![\d/$.:])\b(?:{WEEKDAY},?\s+(?:the\s+)?)?{_DATE}(?![\d/])\b"),
    _date,
    ranges=re.compile(
        rf"{_DATE}{_TO}(?:{WEEKDAY},?\s)?\d|{_DATE}{_TO}{MONTH}|\d{_TO}{_DATE}|{_DATE}\s?,\s?\d{{1,2}}(?!\d)",
        re.IGNORECASE,
    ),
    rivals=re.compile(
        rf"\b(?:today|tomorrow|tonight|yesterday|{WEEKDAY})\b|(?<!\d){_FRACTION}|\b{MONTH}\s+'?\d\d?\b", re.IGNORECASE
    ),
)
_WHEN = (
    r"(?:(?:close\s+of\s+business|cob|the\s+end\s+of)\s+(?:on\s+)?)?"
    rf"(?:{_TIME}\s+(?:on\s+)?)?(?:{WEEKDAY}\b(?:,?\s+(?:the\s+)?{_DATE})?|{_DATE})(?:\s+(?:at\s+)?{_TIME})?"
)
_DUTY = (
    r"(?:please|needs?|needed|must|rsvp|respon[ds]e?|reply|send|submit(?:ted)?|provide|returned?|complete[d]?|comments?"
    r"|feedback|finali[sz]ed?|turned\s+in|let\s+(?:me|us)\s+know|register|received?|filed?|review|order|deliver(?:ed)?)"
)
DEADLINE = Extractor(
    _pattern(
        rf"\b(?:(?:no\s+later\s+than|due(?:\s+(?:by|on))?|deadline(?:\s+(?:is|of|for\s[\w ]{{1,30}}\sis))?"
        rf"|{_DUTY}\b[^.?!]{{0,80}}?(?<!stop )(?<!come )(?<!drop )(?<!swing )(?<!run )\bby)\s+"
        rf"(?:this\s+|next\s+|on\s+)?)(?P<fact>{_WHEN})"
    ),
    _letters,
    rivals=re.compile(rf"\b(?:deadline|no later than|due (?:by|on)|by\s+(?:this\s+|next\s+)?{_WHEN})\b", re.IGNORECASE),
)
ROOM = Extractor(
    _pattern(
        rf"\b(?P<fact>(?:(?i:conference|conf\.?|meeting)\s+)?(?i:room|rm\.?)[ \t]+(?:#[ \t]?)?{_CODE}"
        r"|(?:(?i:conference|meeting)\s+(?i:room)|Room)\s+[A-Z][a-z]{2,}(?=[\s.,;])|EB\s?-?\d{2,4}[A-Z]?\d?\b)",
        0,
    ),
    lambda text: _letters(re.sub(r"(?i)\b(?:conference|conf|meeting|room|rm|eb)\b|^eb", "", text)),
)
VENUE = Extractor(
    _pattern(
        r"\b(?:(?:the|at|in|to)\s+)?(?P<fact>(?!(?:The|This|That|Our|Your|My|An?)\s)"
        r"(?:[A-Z][\w'&-]+\s){1,3}(?:Hotel|Restaurant|Grill|Cafe|Café|Inn|Airport|Museum|Theat(?:re|er)|Stadium|Ballroom|(?:Country|Golf|Athletic|Yacht)\sClub|Steakhouse))\b",
        0,
    ),
    _letters,
)
URL = Extractor(_pattern(reading.URL), _literal("url"))
EMAIL_ADDRESS = Extractor(_pattern(reading.EMAIL), _literal("email"))
ATTACHMENT = Extractor(
    _pattern(
        r"(?:<<|^[ \t]*-[ \t]|\()(?P<fact>[^\n<>:*?\"|]{1,60}\.(?:xlsx?|docx?|pptx?|pdf|txt|csv|zip|jpg|rtf|mdb))"
        r"(?=>>|[ \t]*$|\))",
        re.IGNORECASE | re.MULTILINE,
    ),
    str.lower,
    rivals=re.compile(r"\.(?:xlsx?|docx?|pptx?|pdf|zip)\b", re.IGNORECASE),
    in_file_names=True,
)
QUANTITY = Extractor(
    _pattern(
        rf"(?<![\d.$])(?:\d{{1,3}}(?:,\d{{3}})+|\d+)(?:\.\d+)?\s?{_UNIT}\b(?:\s?(?:/|per\s)\s?(?:day|d|hour|month|year)\b)?"
    ),
    lambda text: re.sub(r"[,\s]", "", text.lower()),
    rivals=re.compile(_LARGE_NUMBER),
    ranges=re.compile(rf"\d{_TO}\d[\d,.]*\s?{_UNIT}", re.IGNORECASE),
)
FLIGHT = Extractor(
    _pattern(r"\b(?:(?i:flight)s?\s+(?:(?i:no\.?|number)\s*)?(?:#\s?)?)(?P<fact>(?:[A-Z]{2}\s?)?\d{2,4})\b", 0),
    lambda text: re.sub(r"\D", "", text),
)


def numbered(noun: str) -> Extractor:
    """Return an extractor of the number after a noun: ``deal 148376``, ``Meter #: 8018``."""
    return Extractor(
        _pattern(
            rf"\b{noun}s?[ \t]*(?:id|no\.?|number|num|ticket)?s?[ \t]*(?:is|:)?[ \t]*[#{{]?"
            r"[ \t]*:?[ \t]*(?P<fact>[A-Z]{0,3}-?\d{4,}(?:[.-]\d+)*)\b"
        ),
        _letters,
        rivals=re.compile(rf"\b{noun}s?\s*(?:#|no\.|number|\d)", re.IGNORECASE),
        lookalikes=re.compile(r"(?<![\w$.,/-])\d{4,}(?:\.\d+)?(?![\w,/-])"),
    )
