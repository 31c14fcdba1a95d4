"""From flags to ``emailrl.toml``: what was given, the objective in full, and in comments what has no line of its own.

A default that is not part of the objective is OpenRLHF's own in a comment (`defaults`): 1024 questions a step are no
choice to make for someone in silence.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from emailrl.errors import UsageError
from emailrl.openrlhf.defaults import Offers, offers
from emailrl.openrlhf.parse import Given, parse
from emailrl.openrlhf.special import Conversion
from emailrl.openrlhf.take import take_all
from emailrl.settings import Settings, without_credentials
from emailrl.settings.names import by_name, leaves
from emailrl.training.algorithms import Algorithm
from emailrl.training.mix import resolve


def to_toml(text: str) -> str:
    """The ``emailrl.toml`` that stands for a command line of OpenRLHF.

    Raises UsageError for a line that cannot be read, an unknown flag, a value no setting takes, or a mix that no
    training here can have. A token in it is never written.
    """
    given = parse(text)
    plan = take_all(given)
    settings, algorithm = _check(plan)
    _add_notes(given, plan)
    _mask(plan)
    return _write(plan, offers(given, plan, settings, algorithm))


def _add_notes(given: Given, plan: Conversion) -> None:
    """What cannot be told beside a setting, for there is no value of OpenRLHF's that one could take."""
    if "lora_rank" not in given:
        plan.notes.append("--lora_rank not given: OpenRLHF trains all weights; here it is an adapter (lora_rank)")
    if "max_steps" not in given:
        plan.notes.append("--max_steps not given: computed there from --num_episodes; here max_steps ends a run")


def _mask(plan: Conversion) -> None:
    """Take credentials out of addresses, and say so where there were any."""
    for key, value in plan.values.items():
        if isinstance(value, str) and "://" in value and (shown := without_credentials(value)) != value:
            plan.values[key] = shown
            plan.flags[key] += (
                f"; its credentials are left out: give the whole address as {by_name()[key].env_names[0]}"
            )


def _check(plan: Conversion) -> tuple[Settings, Algorithm]:
    """The settings and the algorithm that a plan comes to.

    Raises UsageError for a value that its setting does not take, or a mix that cannot be trained.
    """
    tree: dict[str, dict[str, Any]] = {}
    for key, value in plan.values.items():
        leaf = by_name()[key]
        tree.setdefault(leaf.section, {})[leaf.field] = value
    try:
        settings = Settings.model_validate(tree)
    except ValidationError as error:
        section, name = error.errors()[0]["loc"][:2]
        [leaf] = [leaf for leaf in leaves() if (leaf.section, leaf.field) == (section, name)]
        reason = error.errors()[0]["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        raise UsageError(f"{plan.flags[leaf.key]}: {leaf.key} should be {reason}.", "See docs/settings.md.") from None
    return settings, resolve(settings)


def _write(plan: Conversion, offered: Offers) -> str:
    lines = [
        "# The equivalent of a command line of OpenRLHF, made by emailrl train --from-openrlhf.",
        "# What it does not name has emailrl's default; docs/openrlhf.md says where OpenRLHF's differ.",
    ]
    lines += [f"# {_comment(note)}" for note in plan.notes]
    section = ""
    for leaf in leaves():
        if leaf.key not in plan.values and leaf.key not in offered:
            continue
        if leaf.section != section:
            section = leaf.section
            lines += ["", f"[{section}]"]
        if leaf.key in plan.values:
            lines.append(f"{leaf.key} = {_toml(plan.values[leaf.key])}  # {_comment(plan.flags[leaf.key])}")
        else:
            value, said = offered[leaf.key]
            lines.append(f"# {leaf.key} = {_toml(value)}  # {_comment(said)}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    # A JSON string is a TOML one, but for DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f") if isinstance(value, str) else repr(value)


def _comment(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)
