"""A command line of OpenRLHF, read as a shell and argparse would read it."""

from __future__ import annotations

import re
import shlex

from emailrl.errors import UsageError
from emailrl.openrlhf.flags import Flag, find_flag

_COMMAND = re.compile(r"openrlhf[./]cli[./]\w+(\.py)?$")
_COUNTS = {"nothing": (0, 0), "one": (1, 1), "two": (2, 2), "some": (1, None)}

Given = dict[str, list[str]]
"""Flag (by its old name) → its values as written; of a flag that comes twice, the last."""


def parse(text: str) -> Given:
    """Read flags with shell quoting, ``--flag value`` or ``--flag=value``, over several lines ended by a backslash.

    What stands before the flags is passed over where it starts OpenRLHF (``python3 -m openrlhf.cli.train_ppo_ray``).
    Raises UsageError for an unknown flag, with the nearest known one, and for too few or too many values. No value is
    ever quoted in an error: it may be a token.
    """
    try:
        words = shlex.split(re.sub(r"\\\r?\n", " ", text), comments=True)
    except ValueError as error:
        raise UsageError(f"The flags cannot be read: {error}.", "Quote them as for a shell.") from None
    started = [place for place, word in enumerate(words) if _COMMAND.search(word)]
    words = words[started[-1] + 1 :] if started else words
    # A backslash before the end of a line that a Markdown block or a Windows file left spaces behind.
    words = [word for word in words if word.strip()]
    if words and not words[0].startswith("--"):
        raise UsageError(
            "The flags do not begin with a flag.", 'Give them as one text: --from-openrlhf "--pretrain …".'
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
        _check_values(flag, name, values)
        given[flag.name] = values
    return given


def _check_values(flag: Flag, name: str, values: list[str]) -> None:
    least, most = _COUNTS[flag.takes]
    if len(values) > least == 0:
        raise UsageError(f"{name} takes no value, not {len(values)}.", "Leave the flag out where it is to be off.")
    if len(values) < least or (most is not None and len(values) > most):
        wanted = {"one": "one value", "two": "two values", "some": "one value or more"}[flag.takes]
        hint = "An empty one does not count." if len(values) < least else "Quote a value that holds spaces."
        raise UsageError(f"{name} takes {wanted}, not {len(values)}.", hint)
    if not all(value.strip() for value in values) and flag.name != "use_wandb":  # there an empty one means off
        raise UsageError(f"{name}: the value is empty.", "Fill it in, or leave the flag out.")
