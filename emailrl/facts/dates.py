"""Dates, weekdays and times of day in text, in the formats people write them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from itertools import product

from emailrl.facts.lexicon import CARDINALS, MONTHS, WEEKDAYS

MONTH = r"(?:" + "|".join(sorted(MONTHS, key=len, reverse=True)) + r")\b\.?"
WEEKDAY = r"(?:" + "|".join(sorted(WEEKDAYS, key=len, reverse=True)) + r")"
# Names that are also words of another kind ("sat", "sun", "may") count only where they are written as names.
_WORDLIKE = ("mon", "wed", "sat", "sun")
_WEEKDAY = (
    r"(?:(?:"
    + "|".join(sorted(WEEKDAYS.keys() - set(_WORDLIKE), key=len, reverse=True))
    + r"|(?-i:Mon|Wed|Sat|Sun|MON|WED|SAT|SUN))|(?:mon|tues|wednes|thurs|fri|satur|sun)days)\b\.?"
)
_DAY = r"\d{1,2}(?:st|nd|rd|th)?(?![\d:/]|\s?(?:[ap]\.?m\b|%))"
_MORE = rf"(?:\s?(?:-|\u2013|,|&|and|or|to|through|until)\s?(?:the\s)?{_DAY}(?!\d)){{0,5}}"
_YEAR = r"(?:,?\s?(?P<{0}>(?:19|20)\d\d|'\d\d)\b)?"
_PART = r"(?:,?\s(?:in\sthe\s)?(?P<part>morning|afternoon|evening|night)s?\b)?"

_HOURS = {word: number for word, number in CARDINALS.items() if 1 <= number <= 12}
_HOUR = "|".join(sorted(_HOURS, key=len, reverse=True))

_REGIONS = {"e": -300, "c": -360, "m": -420, "p": -480}
"""Standard time of the US zones, in minutes from UTC."""
Zone = dict[str, int]
"""Minutes from UTC by season: EST has only a winter offset, ET both."""


def _zone(winter: int | None, summer: int | None) -> Zone:
    return {season: offset for season, offset in (("winter", winter), ("summer", summer)) if offset is not None}


_ZONES = {
    **{f"{name}st": _zone(offset, None) for name, offset in _REGIONS.items()},
    **{f"{name}dt": _zone(None, offset + 60) for name, offset in _REGIONS.items()},
    **{f"{name}t": _zone(offset, offset + 60) for name, offset in _REGIONS.items()},
    **{"utc": _zone(0, 0), "gmt": _zone(0, 0), "jst": _zone(540, 540)},
    **{"bst": _zone(None, 60), "cet": _zone(60, None), "cest": _zone(None, 120)},
}
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
    r"(?!\s(?:floor|street|avenue|quarter|grade|time|place|century|round|edition|amendment)\b)"
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
    r"|(?<=at\s)(?P<bare>1[0-2]|[1-9])(?=\s*(?:[,;)]|\.?$|\.\s|(?:and|or|on|in|sharp|tomorrow|today)\b))"
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
        if self.day is not None:
            return other.day is not None
        if self.month is not None:
            return other.month is not None
        if self.weekday is not None:
            return other.weekday is not None
        return other.year is not None

    def contradicts(self, other: Date) -> bool:
        """Whether a field that both state differs."""
        return any(
            mine is not None and theirs is not None and mine != theirs
            for mine, theirs in (
                (self.year, other.year),
                (self.month, other.month),
                (self.day, other.day),
                (self.weekday, other.weekday),
                (self.part, other.part),
            )
        )


@dataclass(frozen=True, slots=True)
class Time:
    """A time of day as the set of minutes since midnight it can mean: two for "3:30" alone."""

    minutes: frozenset[int]
    zone: Zone | None = field(default=None, hash=False)
    """None if not given; it then agrees with any."""

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
        """Whether the two cannot mean the same time."""
        return not self.agrees(other)


def read_dates(found: re.Match[str]) -> list[Date]:
    """Return the dates of one match of ``DATE``: several for "17th and 18th of January", none for an impossible one."""
    name = found["weekday"] or found["bare"]
    weekday = WEEKDAYS[name[:3].lower()] if name else None
    part = found["part"].lower() if found["part"] else None
    if found["iso_year"]:
        return _valid(int(found["iso_year"]), int(found["iso_month"]), [int(found["iso_day"])], weekday, part)
    if found["first"]:
        first, second, year = int(found["first"]), int(found["second"]), _year(found["short_year"])
        # Month first, as Americans write it, unless that is no month or the separator is the European point.
        day_first = first > 12 or (found["separator"] == "." and second <= 12)
        month, day = (second, first) if day_first else (first, second)
        return _valid(year, month, [day], weekday, part)
    if found["us_month"]:
        month, day = int(found["us_month"]), int(found["us_day"])
        month, day = (day, month) if month > 12 else (month, day)
        return _valid(None, month, [day], weekday, part)
    for index in ("", "2", "3"):
        if found["month" + index]:
            days = found["days" + index] if index != "3" else ""
            numbers: list[int] | list[None] = [int(number) for number in re.findall(r"\d+", days)] or [None]
            number = MONTHS[found["month" + index].lower().rstrip(".")]
            return _valid(_year(found["year" + index]), number, numbers, weekday, part)
    if found["day_only"]:
        return _valid(None, None, [int(found["day_only"])], weekday, part)
    return [Date(weekday=weekday, part=part)] if weekday is not None else []


def read_time(found: re.Match[str]) -> Time | None:
    """Return the time of one match of ``TIME``, or None if it is not a time."""
    time = _clock(found)
    if time is None or not (found["zone"] or found["region"]):
        return time
    season = {"standard": "s", "daylight": "d"}.get((found["season"] or "").lower(), "")
    return replace(time, zone=_ZONES[(found["zone"] or f"{found['region'][0]}{season}t").lower()])


def _clock(found: re.Match[str]) -> Time | None:
    """Return the clock time, whatever the zone."""
    when = (found["when"] or "").lower()
    if found["named"]:
        return Time(frozenset({_NAMED[found["named"].lower()]}))
    if found["military"]:
        return Time(frozenset({int(found["military"][:2]) * 60 + int(found["military"][2:])}))
    if found["past"]:
        full, offset = _HOURS.get(found["spoken"].lower()), _PAST[found["past"].lower()]
        sign = -1 if found["way"].lower() == "to" else 1
        return None if full is None else _either(full * 60 + sign * offset, when)
    if found["bare"]:
        return _either(int(found["bare"]) * 60, when)
    if found["hour_word"]:
        return _either(_HOURS[found["hour_word"].lower()] * 60, when)
    if found["clock"]:
        clock = int(found["clock"]) if found["clock"].isdigit() else _HOURS.get(found["clock"].lower())
        return None if clock is None else _either(clock * 60, when)
    if found["range"]:
        hour, _, minute = found["range"].replace(".", ":").partition(":")
        return _either(int(hour) * 60 + int(minute or 0), when)
    if found["half"]:
        minutes = int(found["hour"]) % 12 * 60 + int(found["minute"] or 0)
        return Time(frozenset({minutes + (720 if found["half"].lower() == "p" else 0)}))
    minutes = int(found["hour24"]) * 60 + int(found["minute24"])
    if len(found["hour24"]) == 2 and found["hour24"][0] == "0":
        return Time(frozenset({minutes}))
    return _either(minutes, when)


def _either(minutes: int, when: str) -> Time:
    """Both readings of a time on the twelve-hour clock, unless the words around it choose."""
    if not 60 <= minutes < 780:
        return Time(frozenset({minutes % 1440}))
    early, late = minutes % 720, minutes % 720 + 720
    if "morning" in when:
        return Time(frozenset({early}))
    return Time(frozenset({late})) if when else Time(frozenset({early, late}))


def _year(text: str | None) -> int | None:
    if not text:
        return None
    number = int(text.strip("'"))
    return number if number > 99 else number + (1900 if number >= 70 else 2000)


def _valid(
    year: int | None, month: int | None, days: list[int] | list[None], weekday: int | None, part: str | None
) -> list[Date]:
    if month is not None and not 1 <= month <= 12:
        return []
    return [Date(year, month, day, weekday, part) for day in days if day is None or 1 <= day <= 31]
