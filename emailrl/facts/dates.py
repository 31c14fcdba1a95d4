"""Dates, weekdays and times of day in text, in the formats people write them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from operator import attrgetter

from emailrl.facts.words import CARDINALS, MONTHS, WEEKDAYS

MONTH = r"(?:" + "|".join(sorted(MONTHS, key=len, reverse=True)) + r")\b\.?"
WEEKDAY = r"(?:" + "|".join(sorted(WEEKDAYS, key=len, reverse=True)) + r")"
# Names that are also words of another kind ("sat", "sun", "may") count only where they are written as names.
_WORDLIKE = ("mon", "wed", "sat", "sun")
_WEEKDAY = (
    r"(?:(?:"
    + "|".join(sorted(WEEKDAYS.keys() - set(_WORDLIKE), key=len, reverse=True))
    + r"|(?-i:Mon|Wed|Sat|Sun|MON|WED|SAT|SUN))|(?:mon|tues|wednes|thurs|fri|satur|sun)days)\b\.?"
)
_DAY = r"\d{1,2}(?:st|nd|rd|th)?(?![\d:/]|,\d{3}|\s?(?:[ap]\.?m\b|%))"
_MORE = rf"(?:\s?(?:-|\u2013|,|&|and|or|to|through|until)\s?(?:the\s)?{_DAY}(?!\d)){{0,5}}"
_YEAR = r"(?:,?\s?(?P<{0}>(?:19|20)\d\d|'\d\d)\b)?"
_PART = r"(?:,?\s(?:in\sthe\s)?(?P<part>morning|afternoon|evening|night)s?\b)?"

_HOURS = {word: number for word, number in CARDINALS.items() if 1 <= number <= 12}
_HOUR = "|".join(sorted(_HOURS, key=len, reverse=True))

Zone = dict[str, int]  # Minutes from UTC by season: EST has only a winter offset, ET both.
_STEADY = (("utc", 0), ("gmt", 0), ("jst", 540))
_ZONES: dict[str, Zone] = {name: {"winter": minutes, "summer": minutes} for name, minutes in _STEADY}
_ZONES |= {"bst": {"summer": 60}, "cet": {"winter": 60}, "cest": {"summer": 120}}
for _name, _standard in (("e", -300), ("c", -360), ("m", -420), ("p", -480)):
    _summer, _winter = {"summer": _standard + 60}, {"winter": _standard}
    _ZONES |= {f"{_name}st": _winter, f"{_name}dt": _summer, f"{_name}t": _winter | _summer}
ZONE = (
    rf"(?:(?P<zone>{'|'.join(name for name in _ZONES if len(name) > 2)}|(?-i:[ECMP]T))\b"
    r"|(?P<region>eastern|central|mountain|pacific)\b(?:\s(?P<season>standard|daylight)\b)?(?:\stime\b)?(?!\s(?-i:[A-Z])))"
)

DATE = re.compile(
    rf"\b(?:(?:(?P<weekday>{_WEEKDAY})(?:,?\s|,?\s?\()(?:on\s)?(?:the\s)?)?(?:"
    r"(?P<iso_year>(?:19|20)\d\d)[-/](?P<iso_month>\d{1,2})[-/](?P<iso_day>\d{1,2})(?!\d)"
    r"|(?<![\d/])(?P<first>\d{1,2})(?P<separator>[/.-])(?P<second>\d{1,2})(?P=separator)(?P<short_year>(?:\d\d)?\d\d)\b"
    r"|(?<![\d/])(?P<us_month>\d{1,2})/(?P<us_day>\d{1,2})(?![\d/])"
    rf"|(?P<month>{MONTH})\s?(?:the\s)?(?P<days>{_DAY}{_MORE}){_YEAR.format('year')}"
    rf"|(?:the\s)?(?P<days2>{_DAY}{_MORE})(?:\sof)?,?[\s-]?(?P<month2>{MONTH})(?:-?{_YEAR.format('year2')})"
    rf"|(?P<month3>(?!may\b|mar\b){MONTH}|(?-i:May\b)(?!\s(?:I|we|you|he|she|it|they|the)\b)|(?<=in\s)may\b"
    rf"|(?<=of\s)may\b)(?:\sof)?{_YEAR.format('year3')}"
    r"|(?<=the\s)(?P<day_only>\d{1,2})(?:st|nd|rd|th)\b"
    r"(?!\s(?:floor|street|avenue|quarter|grade|time|place|century|round|edition|amendment|business|working)\b)"
    rf")|(?P<bare>{_WEEKDAY}))\)?{_PART}",
    re.IGNORECASE,
)
TIME = re.compile(
    r"\b(?:"
    r"(?P<range>\d{1,2}(?:[:.]\d\d)?)\s?(?:-|\u2013|to|and)\s?(?=\d{1,2}(?:[:.]\d\d)?\s?[ap]\.?\s?m\b|noon\b)"
    r"|(?P<hour>\d{1,2})(?:[:.](?P<minute>[0-5]\d)(?::[0-5]\d)?)?\s?(?:o'clock\s)?(?P<half>[ap])\.?\s?m\b\.?"
    r"|(?P<hour24>[01]?\d|2[0-3]):(?P<minute24>[0-5]\d)(?!\d)(?:\shours?\b)?"
    r"|(?P<military>[01]\d[0-5]\d|2[0-3][0-5]\d)\s(?:hours|hrs)\b"
    r"|(?P<past>half|quarter|ten|twenty|five)\s(?P<way>past|to|after)\s(?P<spoken>\w+)"
    r"|(?P<clock>\d{1,2}|\w+)\so'clock"
    r"|(?<=at\s)(?P<bare>1[0-2]|[1-9])(?=\s*(?:,(?!\d)|[;)]|\.?$|\.\s|(?:and|or|on|in|sharp|tomorrow|today)\b))"
    rf"|(?P<hour_word>{_HOUR})(?=\sin\sthe\s(?:morning|afternoon|evening)\b|\sat\snight\b)"
    r"|(?:12\s?)?(?P<named>noon|midday|midnight)\b"
    rf")(?:\s(?P<when>in\sthe\s(?:morning|afternoon|evening)|at\snight))?(?:,?\s?\(?{ZONE}\)?)?",
    re.IGNORECASE,
)
_PAST = {"half": 30, "quarter": 15, "five": 5, "ten": 10, "twenty": 20}
_NAMED = {"noon": 720, "midday": 720, "midnight": 0}


@dataclass(frozen=True, slots=True)
class Date:
    """A day as far as a text states it; unstated fields are None."""

    year: int | None = None
    month: int | None = None
    day: int | None = None
    weekday: int | None = None
    part: str | None = None

    def agrees(self, other: Date) -> bool:
        """Whether ``other`` contradicts nothing and states at least the narrowest field stated here."""
        if self.contradicts(other):
            return False
        narrowest = ((self.day, other.day), (self.month, other.month), (self.weekday, other.weekday))
        return next((theirs for mine, theirs in narrowest if mine is not None), other.year) is not None

    def contradicts(self, other: Date) -> bool:
        pairs = zip(_FIELDS(self), _FIELDS(other), strict=True)
        return any(mine is not None and theirs is not None and mine != theirs for mine, theirs in pairs)


_FIELDS = attrgetter("year", "month", "day", "weekday", "part")


@dataclass(frozen=True, slots=True)
class Time:
    """A time of day as the set of minutes since midnight it can mean: two for "3:30" alone."""

    minutes: frozenset[int]
    zone: Zone | None = field(default=None, hash=False)  # None if not given; it then agrees with any.

    def agrees(self, other: Time) -> bool:
        """Whether the two can mean the same time."""
        if self.zone is None or other.zone is None:
            return not self.minutes.isdisjoint(other.minutes)
        offsets = [(self.zone[season], other.zone[season]) for season in self.zone.keys() & other.zone.keys()]
        return any(
            (mine - own - theirs + offset) % 1440 == 0
            for own, offset in offsets or product(self.zone.values(), other.zone.values())
            for mine in self.minutes
            for theirs in other.minutes
        )

    def contradicts(self, other: Time) -> bool:
        return not self.agrees(other)


def read_dates(found: re.Match[str]) -> list[Date]:
    """Return the dates of one match of ``DATE``: several for "17th and 18th of January", none for an impossible one."""
    name = found["weekday"] or found["bare"]
    weekday = WEEKDAYS[name[:3].lower()] if name else None
    part = found["part"].lower() if found["part"] else None
    year: int | None = None
    month: int | None = None
    days: Sequence[int | None] = [None]
    named = next((index for index in ("", "2", "3") if found["month" + index]), None)
    if found["iso_year"]:
        year, month, days = int(found["iso_year"]), int(found["iso_month"]), [int(found["iso_day"])]
    elif found["first"]:
        first, second, year = int(found["first"]), int(found["second"]), _year(found["short_year"])
        # Month first, as Americans write it, unless that is no month or the separator is the European point.
        day_first = first > 12 or (found["separator"] == "." and second <= 12)
        month, days = (second, [first]) if day_first else (first, [second])
    elif found["us_month"]:
        month, day = int(found["us_month"]), int(found["us_day"])
        month, days = (day, [month]) if month > 12 else (month, [day])
    elif named is not None:
        year, month = _year(found["year" + named]), MONTHS[found["month" + named].lower().rstrip(".")]
        days = [int(number) for number in re.findall(r"\d+", found["days" + named])] if named != "3" else days
    elif found["day_only"]:
        days = [int(found["day_only"])]
    elif weekday is None:
        return []
    if month is not None and not 1 <= month <= 12:
        return []
    return [Date(year, month, day, weekday, part) for day in days if day is None or 1 <= day <= 31]


def _year(text: str | None) -> int | None:
    if not text:
        return None
    number = int(text.strip("'"))
    return number if number > 99 else number + (1900 if number >= 70 else 2000)


def read_time(found: re.Match[str]) -> Time | None:
    """Return the time of one match of ``TIME``, or None if it is not a time."""
    minutes = _minutes(found)
    zone: Zone | None = None
    if found["zone"] or found["region"]:
        season = {"standard": "s", "daylight": "d"}.get((found["season"] or "").lower(), "")
        zone = _ZONES[(found["zone"] or f"{found['region'][0]}{season}t").lower()]
    return Time(frozenset(minutes), zone) if minutes else None


def _minutes(found: re.Match[str]) -> set[int]:
    """The minutes since midnight that it can mean, whatever the zone; none if it is not a time."""
    if found["named"]:
        return {_NAMED[found["named"].lower()]}
    if found["military"]:
        return {int(found["military"][:2]) * 60 + int(found["military"][2:])}
    if found["half"]:
        return {int(found["hour"]) % 12 * 60 + int(found["minute"] or 0) + 720 * (found["half"].lower() == "p")}
    minute = 0
    if found["hour24"]:
        hour, minute = found["hour24"], int(found["minute24"])
        if len(hour) == 2 and hour[0] == "0":
            return {int(hour) * 60 + minute}
    elif found["range"]:
        hour, _, rest = found["range"].replace(".", ":").partition(":")
        minute = int(rest or 0)
    else:
        hour = (found["spoken"] or found["bare"] or found["hour_word"] or found["clock"]).lower()
    if found["past"]:
        minute = _PAST[found["past"].lower()] * (-1 if found["way"].lower() == "to" else 1)
    number = int(hour) if hour.isdigit() and not found["past"] else _HOURS.get(hour)
    if number is None:
        return set()
    minutes, when = number * 60 + minute, (found["when"] or "").lower()
    if not 60 <= minutes < 780:
        return {minutes % 1440}
    # Both readings on the twelve-hour clock, unless the words around it choose.
    early, late = minutes % 720, minutes % 720 + 720
    if "morning" in when:
        return {early}
    return {late} if when else {early, late}
