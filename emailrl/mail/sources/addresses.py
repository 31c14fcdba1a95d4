"""Reads the addresses of a header as mail programs write them, in time linear in its length.

If an item has ``<address>``, that is the address and the text around it is a name, even if it is ``bob@x.org`` or
``Smith, John``. Comments and group names are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

MAX_ADDRESS_CHARS = 1_000_000
"""Maximum characters read from an address header."""

_QUOTED = r'"(?:[^"\\]|\\.)*+"'
_AROUND_COMMENTS = re.compile(rf"{_QUOTED}|\\.|[()]", re.DOTALL)
_TOKEN = re.compile(
    rf'(?P<quoted>{_QUOTED})|<(?P<angle>[^<>]*)>|<(?P<open>[^<>,;]*)|(?P<end>[,;:])|\[[^\[\]<>,"]*\]|[^"<,;:\[\\]+|\\.|.',
    re.DOTALL,
)
_PREFIX = re.compile(rf'\A(?:(?:{_QUOTED}|[^":\[])*+:)+')
"""A route, a group name, or ``mailto``."""
_MAILTO = re.compile(r"\[mailto:([^\[\]<>]*)\]", re.IGNORECASE)
_AROUND_SIGNS = re.compile(r"\s*([@.])\s*")


def addresses_of(value: str) -> list[str]:
    """Return the addresses of a header's value in order, bare and in lower case; the value is one line.

    A single word without ``@`` counts as an address, as for local mailboxes, unless the next item shows that it begins
    a name (``Smith, John <john@x.org>``).
    """
    found: list[str] = []
    words: list[str] = []  # items of one word since the last address
    for bare, angles in _items(_MAILTO.sub(r"<\1>", _without_comments(value))):
        inside = [address for angle in angles for address in _specs(angle)]
        complete = [address for address in inside if "@" in address] or inside[-1:]
        if complete:
            words.clear()
        elif angles:
            continue
        else:
            tokens = _AROUND_SIGNS.sub(r"\1", bare.lower()).split()
            complete = [token for token in tokens if "@" in token.strip("@")]
            if not complete:
                words += tokens if len(tokens) == 1 and "@" not in tokens[0] else []
                continue
            if len(tokens) > len(complete):  # the preceding words also begin a name
                words.clear()
        found += words + [_bare(address) for address in complete]
        words.clear()
    return found + words


def _bare(address: str) -> str:
    """An address without enclosing single quotes and without a final dot."""
    bare = address.rstrip(".")
    if bare[0:1] == "'" == bare[-1:]:
        bare = bare[1:-1]
    return bare if "@" in bare.strip("@") else address


def _items(value: str) -> Iterator[tuple[str, list[str]]]:
    """The items between commas and semicolons: the text outside angle brackets, and the content of each pair."""
    text: list[str] = []
    angles: list[str] = []
    quoted = ""
    for token in _TOKEN.finditer(value):
        kind = token.lastgroup
        if kind == "end":
            if token[0] != ":":  # else a group's name ends, or ``mailto``
                yield "".join(text).strip() or quoted, angles
            text, angles, quoted = [], [], ""
        elif kind in ("angle", "open"):
            angles.append(token[kind])
        elif kind != "quoted":
            text.append(token[0])
        elif value[token.end() : token.end() + 1] == "@":
            text.append("".join(token[0].split()))
        elif "@" in token[0]:
            quoted = token[0][1:-1]
    yield "".join(text).strip() or quoted, angles


def _specs(angle: str) -> Iterator[str]:
    """The addresses between angle brackets: normally one, but some programs put several there."""
    for spec in re.split("[,;]", angle.lower()):
        address = "".join(_PREFIX.sub("", spec, count=1).split())
        if address and address[0] != "@":
            yield address


def _without_comments(value: str) -> str:
    """The value without parenthesized comments; unmatched parentheses stay."""
    if "(" not in value:
        return value
    opened: list[int] = []
    comments: list[tuple[int, int]] = []
    for token in _AROUND_COMMENTS.finditer(value):
        if token[0] == "(":
            opened.append(token.start())
        elif token[0] == ")" and opened:
            start = opened.pop()
            while comments and comments[-1][0] > start:
                comments.pop()
            comments.append((start, token.end()))
    kept, at = [], 0
    for start, end in comments:
        kept.append(value[at:start])
        at = end
    return "".join(kept) + value[at:]
