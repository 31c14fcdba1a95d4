"""OpenRLHF's flags by name, and a parser for its command lines that follows shell and argparse rules."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from emailrl.base.errors import UsageError
from emailrl.openrlhf.table import ROWS
from emailrl.settings.names import Leaf, by_name, nearest

Takes = Literal["nothing", "one", "two", "some"]
Given = dict[str, list[str]]  # Flag (by its old name) → its values as written; the last wins if repeated.


@dataclass(frozen=True, slots=True)
class Flag:
    name: str
    dotted: str
    takes: Takes
    group: str
    settings: tuple[str, ...]  # The settings that it sets here; empty if none.
    default: str  # OpenRLHF's default.
    note: str  # What differs, or why there is no setting.

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        return tuple(by_name()[key] for key in self.settings)


_TAKES: Final[Mapping[str, Takes]] = {"": "nothing", "X": "one", "L H": "two", "X …": "some"}
FLAGS: Final = tuple(
    Flag(name, dotted, _TAKES[value], group, tuple(settings.split()), default, note)
    for group, rows in ROWS.items()
    for written, dotted, settings, default, note in rows
    for name, _, value in [written.partition(" ")]
)
"""All known flags, in the order of the page."""
NAMES: Final[Mapping[str, Flag]] = {alias: flag for flag in FLAGS for alias in (flag.name, flag.dotted) if alias}

_COMMAND = re.compile(r"openrlhf[./]cli[./]\w+(\.py)?$")
_COUNTS = {"nothing": (0, 0), "one": (1, 1), "two": (2, 2), "some": (1, math.inf)}


def find_flag(name: str) -> Flag:
    """Find a flag by old or dotted name, with or without ``--``; UsageError suggests the nearest if unknown."""
    bare = re.sub("^-+", "", name).replace("-", "_")
    if bare in NAMES:
        return NAMES[bare]
    near = nearest(bare, NAMES)
    hint = f"Did you mean --{near}?" if near else "See docs/reference/openrlhf.md for all flags."
    raise UsageError(f"Unknown flag of OpenRLHF: {name}.", hint)


def parse(text: str) -> Given:
    """Parse flags with shell quoting, ``--flag value`` or ``--flag=value``, and backslash line continuations.

    A leading command that starts OpenRLHF (``python3 -m openrlhf.cli.train_ppo_ray``) is skipped. Raises UsageError for
    an unknown flag, suggesting the nearest, and for too few or too many values. Errors never quote a value: it may be a
    token.
    """
    try:
        words = shlex.split(re.sub(r"\\\r?\n", " ", text), comments=True)
    except ValueError as error:
        raise UsageError(f"The flags cannot be read: {error}.", "Quote them as in a shell.") from None
    started = [place for place, word in enumerate(words) if _COMMAND.search(word)]
    words = words[started[-1] + 1 :] if started else words
    # Trailing spaces after a backslash at a line end, as from Markdown or Windows files.
    words = [word for word in words if word.strip()]
    if words and not words[0].startswith("--"):
        raise UsageError(
            "Expected a flag first.", 'Pass all flags as one quoted string: --from-openrlhf "--pretrain …".'
        )
    given: Given = {}
    place = 0
    while place < len(words):
        name, equals, value = words[place].partition("=")
        flag = find_flag(name)
        place += 1
        values = [value] if equals else []
        while not equals and place < len(words) and not words[place].startswith("--"):
            values.append(words[place])
            place += 1
        least, most = _COUNTS[flag.takes]
        if len(values) > most == 0:
            raise UsageError(f"{name} takes no value, not {len(values)}.", "Omit the flag to turn it off.")
        if not least <= len(values) <= most:
            wanted = {"one": "one value", "two": "two values", "some": "one value or more"}[flag.takes]
            hint = "An empty value does not count." if len(values) < least else "Quote values that contain spaces."
            raise UsageError(f"{name} takes {wanted}, not {len(values)}.", hint)
        if not all(value.strip() for value in values) and flag.name != "use_wandb":  # empty means off
            raise UsageError(f"{name}: the value is empty.", "Fill it in, or omit the flag.")
        given[flag.name] = values
    return given


def read_value(flag: Flag, leaf: Leaf, text: str) -> Any:
    """Convert a value to its setting's type; UsageError if it is not a number. Choices are checked later."""
    if bool in leaf.kinds:
        return text == "true"
    if not leaf.kinds & {int, float}:
        return text
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        kind = "a whole number" if int in leaf.kinds else "numbers" if flag.takes == "two" else "a number"
        raise UsageError(f"--{flag.name} takes {kind}.", hint_of(flag))
    return int(number) if int in leaf.kinds and number.is_integer() else number


def hint_of(flag: Flag) -> str:
    """A hint with the flag's default as an example of a valid value."""
    example = flag.default.strip("`")
    shown = f"OpenRLHF's default is {example}. " if example[:1].isdigit() or example[:1] == "-" else ""
    return f"{shown}See docs/reference/openrlhf.md."
