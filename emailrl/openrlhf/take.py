"""Flags and their values taken into settings, one by one and then those that mean something only together."""

from __future__ import annotations

import math
from typing import Any

from emailrl.errors import UsageError
from emailrl.openrlhf.flags import FLAGS, Flag
from emailrl.openrlhf.joint import JOINT, take_batches, take_objective
from emailrl.openrlhf.parse import Given
from emailrl.openrlhf.special import SPECIAL, Conversion
from emailrl.settings.names import Leaf, by_name


def take_all(given: Given) -> Conversion:
    """The settings that flags come to; raises UsageError for a value of the wrong kind."""
    plan = Conversion()
    for flag in FLAGS:
        if flag.name in given:
            _take(flag, given[flag.name], given, plan)
    take_batches(given, plan)
    take_objective(given, plan)
    return plan


def _take(flag: Flag, values: list[str], given: Given, plan: Conversion) -> None:
    """One flag that was given: its settings, or a note of why it has none."""
    why = f"--{flag.name}"
    if not flag.is_built:
        plan.notes.append(f"{why}: not built yet ({flag.note})")
    elif not flag.settings:
        plan.notes.append(f"{why}: {flag.note}")
    elif flag.name in SPECIAL:
        try:
            SPECIAL[flag.name](values, given, plan)
        except ValueError:
            raise UsageError(f"{why} takes a whole number; this is none.", _hint(flag)) from None
    elif flag.name not in JOINT:
        for key, value in zip(flag.settings, values or ["true"], strict=True):
            plan.set(key, _value(by_name()[key], value, flag), why)


def _value(leaf: Leaf, text: str, flag: Flag) -> Any:
    """A value as its setting has it; what is wrong with a number or a choice, validation says."""
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
        raise UsageError(f"--{flag.name} takes {kind}; this is none.", _hint(flag))
    return int(number) if int in leaf.kinds and number.is_integer() else number


def _hint(flag: Flag) -> str:
    """Where to look, with what the flag is by default: an example of what it takes."""
    example = flag.default.strip("`")
    shown = f"OpenRLHF's default is {example}. " if example[:1].isdigit() or example[:1] == "-" else ""
    return f"{shown}See docs/openrlhf.md."
