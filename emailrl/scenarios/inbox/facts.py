"""Facts that a body states in so many words: one pattern and one canonical form for each kind.

Two mentions with the same canonical form are the same fact. Patterns err on the side of finding too much, because a
fact is asked for only where a mail holds exactly one of its kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

_MONTH = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?"
    r"|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\.?"
)
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_WEEKDAY = r"(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?"
_FRACTION = r"(?:1/[2-9]|2/[3579]|3/[457]|4/5)(?![\d/])"
_DATE = (
    rf"(?:{_MONTH}\s+(?!0\d\b(?!,?\s+(?:19|20)\d\d)|'|99)\d{{1,2}}(?:st|nd|rd|th)?(?!\d|[:.,]\d\d)"
    r"(?:,?\s+(?:19|20)\d\d)?"
    rf"|\d{{1,2}}(?:st|nd|rd|th)?\s+(?:of\s+)?{_MONTH}(?:,?\s+(?:19|20)\d\d)?"
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
_CODE = r"[A-Z]{0,3}-?\d[\dA-Za-z-]*"


@dataclass(frozen=True, slots=True)
class Fact:
    """One mention: its canonical form, and as it stands in the mail."""

    key: str
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Extractor:
    """Finds the facts of one kind; ``text`` and ``key`` are made from the pattern's group ``fact`` (or the whole)."""

    pattern: re.Pattern[str]
    key: Callable[[str], str]
    rivals: re.Pattern[str] | None = None
    """Other mentions that could answer the same question, looked for in what the pattern leaves over."""
    ranges: re.Pattern[str] | None = None
    """Mentions of a span (3 to 5 pm) or a list, which are no single fact."""
    lookalikes: re.Pattern[str] | None = None
    """Texts that may be another fact of the kind if they are as long as the fact found."""
    in_file_names: bool = False
    """Whether the name of an attached file states a fact of this kind."""

    def find(self, text: str) -> list[Fact]:
        """Every mention, in order."""
        facts = []
        for match in self.pattern.finditer(text):
            shown = " ".join(match["fact"].split())
            facts.append(Fact(self.key(shown), shown))
        return facts

    def only(self, own: str, whole: str) -> Fact | None:
        """The one fact of its kind in the whole body, if it stands in the mail's own text; else None."""
        mine = self.find(own if self.in_file_names else _FILE_NAMES.sub(" ", own))
        if not mine or len({fact.key for fact in self.find(whole)}) != 1:
            return None
        if self.lookalikes is not None and any(
            len(other) == len(mine[0].text) and self.key(other) != mine[0].key
            for other in self.lookalikes.findall(whole)
        ):
            return None
        if self.rivals is not None and self.rivals.search(self.pattern.sub(" ", whole)):
            return None
        if self.ranges is not None and self.ranges.search(whole):
            return None
        return mine[0]


def _letters(text: str) -> str:
    return re.sub(r"[\W_]+", "", text.lower())


def _phone(text: str) -> str:
    return re.sub(r"\D", "", text)[-10:]


def _number(text: str) -> str:
    return (
        re.sub(r"[,\s]", "", text.lower()).rstrip("0").rstrip(".")
        if "." in text
        else re.sub(r"[,\s]", "", text.lower())
    )


def _time(text: str) -> str:
    text = text.lower().replace(".", ":", 1) if re.match(r"\d+\.\d", text) else text.lower()
    if text in ("noon", "midnight"):
        return "12:00p" if text == "noon" else "0:00a"
    hour, minute = re.match(r"(\d+)(?::(\d+))?", text).groups()  # type: ignore[union-attr]
    half = "p" if "p" in text else "a" if "a" in text else ""
    return f"{int(hour)}:{minute or '00'}{half}"


def _date(text: str) -> str:
    text = text.lower()
    if month := re.search(_MONTH, text):
        day = re.search(r"\d{1,2}", text)
        return f"{month[0][:3]} {int(day[0])}" if day else text
    numbers = [int(n) for n in re.findall(r"\d+", text)]
    if numbers[0] > 31:
        numbers = numbers[1:]
    return f"{_MONTHS[numbers[0] - 1]} {numbers[1]}" if 1 <= numbers[0] <= 12 else text


def _pattern(body: str, flags: int = re.IGNORECASE) -> re.Pattern[str]:
    return re.compile(body if "(?P<fact>" in body else f"(?P<fact>{body})", flags)


PHONE = Extractor(
    _pattern(r"(?<![\d-])(?:\+?1[-. ])?(?:\(\d{3}\)\s?|\d{3}[-./ ])\d{3}[-. ]\d{4}(?![\d-])"),
    _phone,
    rivals=re.compile(
        r"\(?\d{3}\)?[-. /]{0,2}\d{3}[-. ]?\d{4}|\+\d\d[\d -]{6,}|(?<!\d)\d-\d{4}(?!\d)|\bx\s?\d{4,5}\b|\bfax\b", re.I
    ),
)
AMOUNT = Extractor(
    _pattern(
        r"\$\s?\d+(?:,\d{3})*(?:\.\d+)?(?:\s{0,3}(?:million|billion|thousand|mm|bn|[mk])\b)?"
        r"(?:\s?(?:/|per\s|an?\s(?=hour|day|week|month|year))\s?(?:mmbtu|mwh|mcf|dth|hour|day|week|month|year|person|share|unit)\b)?"
    ),
    _number,
    rivals=re.compile(
        rf"\$|\b\d[\d,.]*\s?(?:dollars|cents|bucks|usd|million|billion|mm|k)\b|[€£]|{_LARGE_NUMBER}(?!\s?{_UNIT})",
        re.IGNORECASE,
    ),
    ranges=re.compile(rf"\$\s?\d[\d,.]*\s?(?:million|[mk]\b)?{_TO}\$?\d", re.IGNORECASE),
)
PERCENT = Extractor(
    _pattern(r"(?<![\d.])\d{1,3}(?:\.\d+)?\s?(?:%|percent\b)"),
    lambda text: re.sub(r"[^\d.]", "", text),
    ranges=re.compile(rf"\d{_TO}\d+(?:\.\d+)?\s?(?:%|percent)", re.IGNORECASE),
)
TIME = Extractor(
    _pattern(rf"(?<![\d:/.$]){_TIME}(?![\d:])"),
    _time,
    ranges=re.compile(rf"\d{_TO}{_TIME}|{_TIME}{_TO}\d", re.IGNORECASE),
)
DATE = Extractor(
    _pattern(rf"(?<![\d/$.:])\b(?:{_WEEKDAY},?\s+(?:the\s+)?)?{_DATE}(?![\d/])\b"),
    _date,
    ranges=re.compile(
        rf"{_DATE}{_TO}(?:{_WEEKDAY},?\s)?\d|{_DATE}{_TO}{_MONTH}|\d{_TO}{_DATE}|{_DATE}\s?,\s?\d{{1,2}}(?!\d)",
        re.IGNORECASE,
    ),
    rivals=re.compile(
        rf"\b(?:today|tomorrow|tonight|yesterday|{_WEEKDAY})\b|(?<!\d){_FRACTION}|\b{_MONTH}\s+'?\d\d?\b", re.IGNORECASE
    ),
)
_WHEN = (
    r"(?:(?:close\s+of\s+business|cob|the\s+end\s+of)\s+(?:on\s+)?)?"
    rf"(?:{_TIME}\s+(?:on\s+)?)?(?:{_WEEKDAY}\b(?:,?\s+(?:the\s+)?{_DATE})?|{_DATE})(?:\s+(?:at\s+)?{_TIME})?"
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
URL = Extractor(_pattern(r"(?:https?://|www\.)[^\s<>\"')\]]*[\w/]"), lambda text: text.lower().rstrip("/"))
EMAIL_ADDRESS = Extractor(_pattern(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)*\.[a-z]{2,4}\b"), str.lower)
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
    _pattern(rf"(?<![\d.,$])\d[\d,]*(?:\.\d+)?\s?{_UNIT}\b(?:\s?(?:/|per\s)\s?(?:day|d|hour|month|year)\b)?"),
    _number,
    rivals=re.compile(_LARGE_NUMBER),
    ranges=re.compile(rf"\d{_TO}\d[\d,.]*\s?{_UNIT}", re.IGNORECASE),
)
FLIGHT = Extractor(
    _pattern(r"\b(?:(?i:flight)s?\s+(?:(?i:no\.?|number)\s*)?(?:#\s?)?)(?P<fact>(?:[A-Z]{2}\s?)?\d{2,4})\b", 0),
    lambda text: re.sub(r"\D", "", text),
)


def numbered(noun: str) -> Extractor:
    """The number that stands behind a noun: ``deal 148376``, ``Meter #: 8018``."""
    return Extractor(
        _pattern(
            rf"\b{noun}s?[ \t]*(?:id|no\.?|number|num|ticket)?s?[ \t]*(?:is|:)?[ \t]*[#{{]?"
            r"[ \t]*:?[ \t]*(?P<fact>[A-Z]{0,3}-?\d{4,}(?:[.-]\d+)*)\b"
        ),
        _letters,
        rivals=re.compile(rf"\b{noun}s?\s*(?:#|no\.|number|\d)", re.IGNORECASE),
        lookalikes=re.compile(r"(?<![\w$.,/-])\d{4,}(?:\.\d+)?(?![\w,/-])"),
    )
