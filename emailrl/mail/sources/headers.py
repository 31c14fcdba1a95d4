"""Reads the values of header fields as mail programs write them: text, addresses, names, dates, and who sends."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from email.errors import HeaderParseError
from email.header import decode_header
from email.utils import parsedate_tz
from functools import lru_cache
from zoneinfo import ZoneInfo

from emailrl.mail.database import clean_text
from emailrl.mail.sources.text import decode

_MAX_ENCODED = 65_536  # characters read from a header with encoded words, which take the library quadratic time
MAX_ADDRESS_CHARS = 1_000_000  # maximum characters read from an address header
_MAX_DATE_CHARS = 200

_QUOTED = r'"(?:[^"\\]|\\.)*+"'
_AROUND_COMMENTS = re.compile(rf"{_QUOTED}|\\.|[()]", re.DOTALL)
_TOKEN = re.compile(
    rf'(?P<quoted>{_QUOTED})|<(?P<angle>[^<>]*)>|<(?P<open>[^<>,;]*)|(?P<end>[,;:])|\[[^\[\]<>,"]*\]|[^"<,;:\[\\]+|\\.|.',
    re.DOTALL,
)
_PREFIX = re.compile(rf'\A(?:(?:{_QUOTED}|[^":\[])*+:)+')  # a route, a group name, or ``mailto``
_MAILTO = re.compile(r"\[mailto:([^\[\]<>]*)\]", re.IGNORECASE)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_AROUND_SIGNS = re.compile(r"\s*([@.])\s*")
_ADDRESS = r"[^\s,;:<>()\[\]\"\\@]++@[^\s,;:<>()\[\]\"\\@]++"
_BARE = re.compile(rf"{_ADDRESS}(?:, *+{_ADDRESS})*+")
# A name does not begin with a space: otherwise spaces after a comma match in two ways and backtracking explodes.
_ITEM = rf"(?:(?:[\w.'&/-][\w .'&/-]*)?<{_ADDRESS}>|{_ADDRESS})"
_NAMED = re.compile(rf"{_ITEM}(?:, *{_ITEM})*", re.ASCII)
_NAME = re.compile(r"[^,<]*<|>")
_COMMENTED = re.compile(rf"({_ADDRESS})\s*\(([^()]*)\)")  # ``ann@x.org (Ann Lee)``, as before RFC 822
_UNSHOWN = re.compile(r"[\s\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]+")
"""Space, controls and marks that turn the direction of text, by which a name could pose as another."""
_MOST_LISTED = 30  # people: by default an email of that release to more is skipped
LABEL = re.compile(r'"([^"]*+)"|([^",\s][^",]*+)')  # of Gmail, as Takeout lists them
_MESSAGE_ID = re.compile(r"(?<![^>,;)] )<[^<> ]{1,998}>|<[^<> ]{0,99}\d{5}[^<> ]{1,899}>")
"""After words, as in ``Your message of Monday <bob@x.org>``, only what has a long number as addresses have not."""
_MAX_REFERENCES = 100
_MAX_REMEMBERED = 1000  # characters of a header
MAX_NAME_CHARS = 200  # maximum characters of a person's or file's name; longer ones are cut
_LISTED = re.compile(
    r'(\s*+(?:"([^"]*)"|([^<,"]++(?:,[^<,"]++)?(?=\s*</)|[^<,"]*+))\s*+(?:<[^<>]*>)?(?:\s*@\s*\w++)?\s*+(?:,|\Z))'
)
"""A person in an X-To header of CMU's Enron release: ``Ann Lee``, ``Lee, Ann </O=ENRON/…>``, ``"Ann" <ann@x.org>``."""

_DATE = re.compile(
    r"(?:[A-Z][a-z]{2}, )?(\d{1,2}) ([A-Z][a-z]{2}) (\d{4}) ((?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d) ([+-]\d\d[0-5]\d)"
    r"(?: \(\w*\))?",
    re.ASCII,
)
_MONTHS = {"JanFebMarAprMayJunJulAugSepOctNovDec"[3 * n - 3 : 3 * n]: f"{n:02}" for n in range(1, 13)}
_POSIX_ZONE = re.compile(r"\b([A-Z]{3})\d[A-Z]{3}\b")
_RULED_ZONE = re.compile(r":\d\d\s*(EST5EDT|CST6CDT|MST7MDT|PST8PDT)(?!\s*[+-]\d)")
"""A zone whose daylight saving time is in the zone database."""
_COMMENT = re.compile(r"\(([^()]*)\)")
_AROUND_COLON = re.compile(r"\s*:\s*")
_TWELVE_HOURS = re.compile(r"\b(\d{1,2})((?::\d\d){1,2}) ?([ap])\.?m\b\.?", re.IGNORECASE)
_OFFSETS = """
    +0000 UT UTC GMT WET, +0100 WEST BST CET MET, +0200 CEST MEST EET, +0300 EEST MSK, +0800 HKT AWST SGT,
    +0900 JST KST, +1000 AEST, +1100 AEDT, +1200 NZST, +1300 NZDT, -0230 NDT, -0300 ADT, -0330 NST, -0400 AST EDT,
    -0500 EST CDT, -0600 CST MDT, -0700 MST PDT, -0800 PST AKDT, -0900 AKST, -1000 HST"""
_ZONES = {name: offset for offset, *names in map(str.split, _OFFSETS.split(",")) for name in names}
"""Zone names that are unambiguous, at least in mail; the library knows only a few."""
_ZONE = re.compile(
    r"(?P<time>:\d\d)(?:\.\d+)?(?:\s*(?P<name>[A-Z]{1,5}))?"
    r"(?:\s*(?P<sign>[+-])(?P<hours>\d{1,2}):?(?P<minutes>\d\d)?)?(?!\S)"
)


class FieldNames(dict[str, str | None]):
    """The wanted names of fields in lower case, "" for others; None for no field, or one that files have."""

    def __missing__(self, name: str) -> str | None:
        lower = name.lower()
        if " " in name or "\t" in name or lower == "content-disposition" or len(name) > 100:
            return None
        kept = self.get(lower) or ""
        return self.setdefault(name, kept) if len(self) < 4096 else kept


def header_text(text: str, defects: list[str]) -> str:
    """Return a header's value with its encoded words decoded."""
    if "=?" not in text:
        return text
    if len(text) > _MAX_ENCODED:
        defects.append("long_header")
    try:
        parts = decode_header(text[:_MAX_ENCODED])
    except HeaderParseError:
        defects.append("bad_encoded_word")
        return text
    words = [part if isinstance(part, str) else decode(part, charset or "utf-8", defects) for part, charset in parts]
    return re.sub(r"[\r\n]+", " ", "".join(words)).strip()


# -- addresses --------------------------------------------------------------------------------------------------------


def addresses_of(value: str, names: dict[str, str] | None = None) -> list[str]:
    """Return the addresses of a header's value in order, bare and in lower case; the value is one line. A single word
    without ``@`` counts as an address, as for local mailboxes, unless the next item shows that it begins a name
    (``Smith, John <john@x.org>``). Adds the display names to ``names``, by address."""
    names = {} if names is None else names
    if (plain := _plain_addresses(value)) is not None:
        if "<" in value:
            written = [item.partition("<")[0] if "<" in item else "" for item in value.split(",")]
            note(names, plain, written, plain=_is_plain(value))
        return plain
    if "(" in value and "<" not in value:
        for address, name in _COMMENTED.findall(value):
            note(names, [address.lower()], [name])
    found: list[str] = []
    words: list[str] = []  # items without an address since the last one
    for bare, angles, name in _items(_MAILTO.sub(r"<\1>", _without_comments(value))):
        # Normally there is one address between angle brackets, but some programs put several there.
        specs = [_PREFIX.sub("", spec, count=1).split() for angle in angles for spec in re.split("[,;]", angle.lower())]
        inside = ["".join(spec) for spec in specs if spec and spec[0][0] != "@"]
        complete = [address for address in inside if "@" in address] or inside[-1:]
        if complete:
            if angles:
                begun = words[:1] if len(words) == 1 else [each for each in words if " " not in each]
                note(names, map(_bare, complete[:1]), [", ".join([*begun, name])])
            words.clear()
        elif angles:
            continue
        else:
            tokens = _AROUND_SIGNS.sub(r"\1", bare).split()
            complete = [token for token in tokens if "@" in token.strip("@")]
            if not complete:
                words += [" ".join(tokens)] if tokens and "@" not in bare else []
                continue
            if len(tokens) > len(complete):  # the preceding words also begin a name
                words.clear()
        found += [*words, *map(_bare, complete)]
        words.clear()
    return [each.lower() for each in (*found, *words) if " " not in each]


def note(names: dict[str, str], addresses: Iterable[str], written: Iterable[str], *, plain: bool = False) -> None:
    """Add display names to ``names`` as they are written, the first of each address; an address is none. ``plain``:
    all are printable ASCII without encoded words, quotes or repeated spaces."""
    for address, name in zip(addresses, written, strict=False):
        if name and address not in names:
            name = name.strip() if plain else shown_name(name)
            if name[:1] == "'" == name[-1:]:
                name = name[1:-1].strip()
            if name and "@" not in name:
                names[address] = name[:MAX_NAME_CHARS]


def _is_plain(value: str) -> bool:
    return value.isascii() and value.isprintable() and "=?" not in value and "  " not in value and '"' not in value


def shown_name(text: str) -> str:
    """Return the name of a person or file as it is written, decoded and on one line."""
    if "=?" in text:
        text = header_text(text, [])
    return clean_text(_UNSHOWN.sub(" ", text)).strip()[:MAX_NAME_CHARS]


def note_listed(names: dict[str, str], addresses: list[str], listed: str) -> None:
    """Add the names in an X-From, X-To or X-cc header of CMU's Enron release to ``names``, if it lists as many people
    as there are addresses: both are in the same order."""
    if len(addresses) > _MOST_LISTED:
        return
    items = [item for item in _LISTED.findall(listed) if item[0]]
    if len(items) == len(addresses) and sum(len(whole) for whole, _, _ in items) == len(listed):
        note(names, addresses, [quoted or plain for _, quoted, plain in items], plain=_is_plain(listed))


def _plain_addresses(value: str) -> list[str] | None:
    """The addresses of a header of bare addresses, or of ``plain name <address>``, as most are; None for others."""
    if not value:
        return []
    value = value.lower()
    if (_NAMED if "<" in value else _BARE).fullmatch(value) is None:
        return None
    bare = (_NAME.sub("", value) if "<" in value else value).replace(" ", "")
    # A dot or quote at the end of an address may not belong to it.
    return None if bare.endswith((".", "'")) or ".," in bare or "'," in bare else bare.split(",")


def _bare(address: str) -> str:
    """An address without enclosing single quotes and without a final dot."""
    bare = address.rstrip(".")
    if bare[0:1] == "'" == bare[-1:]:
        bare = bare[1:-1]
    return bare if "@" in bare.strip("@") else address


def _items(value: str) -> Iterator[tuple[str, list[str], str]]:
    """The items between commas and semicolons: the text outside angle brackets, the content of each pair, the name."""
    text: list[str] = []
    angles: list[str] = []
    name: list[str] = []
    quoted = ""
    for token in _TOKEN.finditer(value):
        kind = token.lastgroup
        if kind == "end":
            if token[0] != ":":  # else a group's name ends, or ``mailto``
                yield "".join(text).strip() or quoted, angles, "".join(name).strip()
            text, angles, name, quoted = [], [], [], ""
            continue
        if kind in ("angle", "open"):
            angles.append(token[kind])
            continue
        name.append(_ESCAPED.sub(r"\1", token[0][1:-1] if kind == "quoted" else token[0]))
        if kind != "quoted":
            text.append(token[0])
        elif value[token.end() : token.end() + 1] == "@":
            text.append("".join(token[0].split()))
        elif "@" in token[0]:
            quoted = token[0][1:-1]
    yield "".join(text).strip() or quoted, angles, "".join(name).strip()


def _without_comments(value: str) -> str:
    """The value without parenthesized comments; unmatched parentheses stay."""
    opened: list[int] = []
    comments: list[tuple[int, int]] = []
    for token in _AROUND_COMMENTS.finditer(value) if "(" in value else ():
        if token[0] == "(":
            opened.append(token.start())
        elif token[0] == ")" and opened:
            start = opened.pop()
            while comments and comments[-1][0] > start:
                comments.pop()
            comments.append((start, token.end()))
    begins, ends = [0, *(end for _, end in comments)], [*(start for start, _ in comments), len(value)]
    return "".join(value[begin:end] for begin, end in zip(begins, ends, strict=True))


@lru_cache(4096)
def _remembered(value: str, listed: str) -> tuple[list[str], dict[str, str]]:
    names: dict[str, str] = {}
    addresses = addresses_of(value, names)
    if listed and not names:
        note_listed(names, addresses, listed)
    return addresses, names


def people_in(value: str, listed: str = "") -> tuple[list[str], dict[str, str]]:
    """Return the addresses of a header and the display names beside them, or else those in the header ``listed`` that
    goes with it. The results may be shared, and are not to be changed: most headers are those of an earlier email."""
    if len(value) + len(listed) <= _MAX_REMEMBERED:
        return _remembered(value, listed)
    return _remembered.__wrapped__(value[:MAX_ADDRESS_CHARS], listed[:MAX_ADDRESS_CHARS])


def message_ids(values: str) -> list[str]:
    """Return the Message-IDs in References and In-Reply-To: the first, which began the thread, and the last."""
    found = [*dict.fromkeys(map(clean_text, _MESSAGE_ID.findall(" ".join(values.split()))))] if values else []
    return found[:1] + found[1:][-_MAX_REFERENCES:]


# -- who sends --------------------------------------------------------------------------------------------------------

_AUTO_REPLIES = ("x-autoreply", "x-autorespond", "x-autoresponder")
MACHINE_FIELDS = frozenset(
    ("list-id", "list-unsubscribe", "list-post", "precedence", "auto-submitted", "return-path", "feedback-id")
).union(_AUTO_REPLIES, ("x-auto-response-suppress",))
"""Headers by which programs say what they send: RFC 2076, 2369, 2919 and 3834, and the senders' own."""
_NOBODY = re.compile(r"(?:[\w.+-]*[._+-])?(?:(?:no|do-?not|donot)[._-]?reply|mailer-daemon|notifications?)\b[^@]*@")


def machine_of(fields: Mapping[str, str], sender: str, kind: str = "") -> str:
    """Return what kind of program sent an email, by its headers (names in lower case): ``calendar`` for an invitation
    or its answer, ``auto-reply`` also for a delivery report, ``newsletter`` for what goes to a list that only its owner
    writes to, ``notification`` for the rest; empty for a person, also on a discussion list (List-Post). ``kind`` is the
    type of its most telling part."""
    is_nobody = ("reply" in sender or "daemon" in sender or "notif" in sender) and _NOBODY.match(sender)
    if not kind and MACHINE_FIELDS.isdisjoint(fields):
        return "notification" if is_nobody else ""
    if kind == "text/calendar":
        return "calendar"
    present = MACHINE_FIELDS.intersection(fields)
    precedence = fields.get("precedence", "").strip().lower()
    submitted = fields.get("auto-submitted", "").strip().lower()
    if (
        kind == "multipart/report"
        or (present and fields.get("return-path", "").replace(" ", "") == "<>")
        or submitted.startswith("auto-replied")
        or precedence.startswith("auto")
        or not present.isdisjoint(_AUTO_REPLIES)
    ):
        return "auto-reply"
    posted_to = fields.get("list-post", "no").strip(" <>").lower()
    is_list = not present.isdisjoint(("list-id", "list-unsubscribe")) or precedence in ("bulk", "list", "junk")
    if is_list and posted_to.startswith("no"):
        return "newsletter"
    is_automatic = submitted not in ("", "no") or (
        not is_list and not present.isdisjoint(("x-auto-response-suppress", "feedback-id"))
    )
    return "notification" if is_automatic or is_nobody else ""


# -- dates ------------------------------------------------------------------------------------------------------------


def parse_date(value: str) -> datetime | None:
    """Return the time of a Date header, aware and in UTC; a time without a zone counts as UTC. None if it cannot be
    read or its zone offset is a day or more."""
    try:
        if (match := _DATE.fullmatch(value)) and match[2] in _MONTHS:
            day, month, year, clock, offset = match.groups()
            return datetime.fromisoformat(f"{year}-{_MONTHS[month]}-{day:0>2} {clock}{offset}").astimezone(UTC)
        if value[4:5] != "-" and (fields := parsedate_tz(_readable(value[:_MAX_DATE_CHARS]))):
            moment, seconds = fields[:6], fields[9] or 0
            years = 1900 if 100 <= moment[0] < 1000 else 0  # from which those of three digits count (RFC 5322, 4.3)
            moment = (moment[0] + years, *moment[1:])
            zone = _RULED_ZONE.search(_COMMENT.sub(" ", value[:_MAX_DATE_CHARS]))
        else:
            time = datetime.fromisoformat(value)
            return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
        if abs(seconds) >= 24 * 60 * 60:
            return None
        # A leap second is read as the second before it.
        time = datetime(*moment[:5], 59 if moment[5] == 60 else moment[5], tzinfo=UTC)
        return time.replace(tzinfo=ZoneInfo(zone[1])).astimezone(UTC) if zone else time - timedelta(seconds=seconds)
    except (ValueError, OverflowError, TypeError, IndexError, KeyError):
        return None  # the library accepts odd fields or fails on them; KeyError: a machine without a zone database


def _readable(value: str) -> str:
    """The date in the form ``parsedate_tz`` reads: no comments, 24 hours, and a zone that it knows."""
    comments = _COMMENT.findall(value)
    value = _AROUND_COLON.sub(":", _COMMENT.sub(" ", value))
    value = _TWELVE_HOURS.sub(_of_24_hours, _POSIX_ZONE.sub(r"\1", value))
    zone = _ZONE.search(value)
    if zone is None:
        return value
    name = zone["name"] or ""
    if zone["sign"]:
        number = f"{zone['sign']}{zone['hours']:0>2}{zone['minutes'] or '00'}"
    elif not name or name == "UT":
        number = next((_ZONES[word] for word in comments if word in _ZONES), name)
    else:
        number = _ZONES.get(name, name)
    return f"{value[: zone.end('time')]} {number} {value[zone.end() :]}"


def _of_24_hours(match: re.Match[str]) -> str:
    hour = int(match[1])
    if hour <= 12:
        hour = hour % 12 + (12 if match[3] in "pP" else 0)
    return f"{hour}{match[2]} "
