"""Parses the Date header of an email as programs write it."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_tz
from zoneinfo import ZoneInfo

_DATE = re.compile(
    r"(?:[A-Z][a-z]{2}, )?(\d{1,2}) ([A-Z][a-z]{2}) (\d{4}) (\d\d):(\d\d):(\d\d) ([+-])(\d\d)(\d\d)(?: \(\w*\))?"
)
_DAY_MINUTES = 24 * 60
_LAST_SECOND = 59
"""A leap second is read as the second before it."""
_SHORT_YEARS = range(100, 1000)
"""Years of three digits count from 1900 (RFC 5322, 4.3)."""
_POSIX_ZONE = re.compile(r"\b([A-Z]{3})\d[A-Z]{3}\b")
_RULED_ZONE = re.compile(r":\d\d\s*(EST5EDT|CST6CDT|MST7MDT|PST8PDT)(?!\s*[+-]\d)")
"""A zone whose daylight saving time is in the zone database."""
_MONTHS = {
    name: i + 1
    for i, name in enumerate(["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"])
}
_MAX_CHARS = 200
_COMMENT = re.compile(r"\(([^()]*)\)")
_AROUND_COLON = re.compile(r"\s*:\s*")
_TWELVE_HOURS = re.compile(r"\b(\d{1,2})((?::\d\d){1,2}) ?([ap])\.?m\b\.?", re.IGNORECASE)
_ZONES = {
    "WET": "+0000", "WEST": "+0100", "BST": "+0100", "CET": "+0100", "MET": "+0100", "CEST": "+0200",
    "MEST": "+0200", "EET": "+0200", "EEST": "+0300", "MSK": "+0300", "HKT": "+0800", "AWST": "+0800", "SGT": "+0800",
    "JST": "+0900", "KST": "+0900", "AEST": "+1000", "AEDT": "+1100", "NZST": "+1200", "NZDT": "+1300",
    "AKST": "-0900", "AKDT": "-0800", "HST": "-1000", "NST": "-0330", "NDT": "-0230",
}  # fmt: skip
"""Unambiguous zone names, at least in mail, that the library lacks."""
_ZONE_NAMES = frozenset(_ZONES) | {
    "UT", "UTC", "GMT", "AST", "ADT", "EST", "EDT", "CST", "CDT", "MST", "MDT", "PST", "PDT",
}  # fmt: skip
_ZONE = re.compile(
    r"(?P<time>:\d\d)(?:\.\d+)?(?:\s*(?P<name>[A-Z]{1,5}))?"
    r"(?:\s*(?P<sign>[+-])(?P<hours>\d{1,2}):?(?P<minutes>\d\d)?)?(?!\S)"
)


def parse_date(value: str) -> datetime | None:
    """Return the time of a Date header, aware and in UTC; a time without a zone counts as UTC.

    None if the header cannot be read or its zone offset is a day or more.
    """
    try:
        if (match := _DATE.fullmatch(value)) and match[2] in _MONTHS:
            day, month, year, hour, minute, second, sign, zone_hours, zone_minutes = match.groups()
            offset = int(zone_hours) * 60 + int(zone_minutes)
            if offset >= _DAY_MINUTES:
                return None
            local = datetime(
                int(year), _MONTHS[month], int(day), int(hour), int(minute), _second(int(second)), tzinfo=UTC
            )
            return local - timedelta(minutes=offset if sign == "+" else -offset)
        fields = parsedate_tz(_plain(value[:_MAX_CHARS]))
        if fields is None:
            moment = datetime.fromisoformat(value)
            return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
        if abs(fields[9] or 0) >= _DAY_MINUTES * 60:
            return None
        year = fields[0] + 1900 if fields[0] in _SHORT_YEARS else fields[0]
        local = datetime(year, *fields[1:5], _second(fields[5]), tzinfo=UTC)
        if ruled := _RULED_ZONE.search(_COMMENT.sub(" ", value[:_MAX_CHARS])):
            return local.replace(tzinfo=ZoneInfo(ruled[1])).astimezone(UTC)
        return local - timedelta(seconds=fields[9] or 0)
    except (
        ValueError,
        OverflowError,
        TypeError,
        IndexError,
        KeyError,  # a machine without a zone database
    ):  # the library accepts odd fields or fails on them
        return None


def _second(second: int) -> int:
    return _LAST_SECOND if second == _LAST_SECOND + 1 else second


def _plain(value: str) -> str:
    """The date in the form ``parsedate_tz`` reads: no comments, 24 hours, and a zone that it knows."""
    comments = _COMMENT.findall(value)
    value = _COMMENT.sub(" ", value)
    value = _AROUND_COLON.sub(":", value)
    value = _POSIX_ZONE.sub(r"\1", value)
    value = _TWELVE_HOURS.sub(_of_24_hours, value)
    zone = _ZONE.search(value)
    if zone is None:
        return value
    name = zone["name"] or ""
    if zone["sign"]:
        number = f"{zone['sign']}{zone['hours']:0>2}{zone['minutes'] or '00'}"
    elif not name or name == "UT":
        number = next((_ZONES.get(word, word) for word in comments if word in _ZONE_NAMES), name)
    else:
        number = _ZONES.get(name, name)
    return f"{value[: zone.end('time')]} {number} {value[zone.end() :]}"


def _of_24_hours(match: re.Match[str]) -> str:
    hour = int(match[1])
    if hour <= 12:
        hour = hour % 12 + (12 if match[3] in "pP" else 0)
    return f"{hour}{match[2]} "
