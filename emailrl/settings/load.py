"""The loader: sources in falling precedence, one validated tree, errors that name the key and its origin."""

from __future__ import annotations

import os
from collections import ChainMap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from emailrl.errors import UsageError
from emailrl.settings.names import Leaf, leaves, nearest
from emailrl.settings.recorded import from_record
from emailrl.settings.sources import Given, from_dotenv, from_environment, from_flags, from_preset, from_toml
from emailrl.settings.tree import Settings


def load_settings(
    overrides: Mapping[str, Any] | None = None,
    preset: str | None = None,
    *,
    cwd: Path | None = None,
    environ: Mapping[str, str] | None = None,
    recorded: Mapping[str, Mapping[str, Any]] | None = None,
) -> Settings:
    """The settings in force: flag > environment > ``.env`` > ``emailrl.toml`` > preset > default.

    ``overrides`` holds flags by setting name (``max_steps``, ``model_name``); None values are ignored. ``cwd`` is where
    ``.env`` and ``emailrl.toml`` are looked for. ``recorded`` is what a run to go on with was begun with: it stands
    below flags and environment, above the rest (`recorded`). Raises ``UsageError`` for an unknown key, an unreadable
    value or two names of one setting that differ within one source.
    """
    here = Path.cwd() if cwd is None else Path(cwd).absolute()
    stated = ChainMap(from_flags(overrides or {}), from_environment(os.environ if environ is None else environ))
    others = ChainMap(from_dotenv(here / ".env"), from_toml(here / "emailrl.toml"), from_preset(preset))
    record = from_record(recorded, stated, others) if recorded is not None else {}
    given = ChainMap(*stated.maps, record, *others.maps)
    tree: dict[str, dict[str, Any]] = {}
    for leaf, item in given.items():
        tree.setdefault(leaf.section, {})[leaf.field] = item.value
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        # The input and its context stay out of the chained traceback: they may hold a secret.
        raise _usage_error(error, given) from None


def _usage_error(error: ValidationError, given: Mapping[Leaf, Given]) -> UsageError:
    """The first problem in words; the hint names the nearest valid value of a choice, and counts the other problems."""
    problems = error.errors(include_url=False)
    section, field = (str(part) for part in problems[0]["loc"][:2])
    leaf = next(leaf for leaf in leaves() if (leaf.section, leaf.field) == (section, field))
    item = given[leaf]
    value = "" if leaf.secret else f"={str(item.value)!r}"
    reason = problems[0]["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    near = nearest(str(item.value), leaf.choices) if leaf.choices else None
    hints = [f"Did you mean {near}?" if near else "", f"{len(problems) - 1} more to mend." if len(problems) > 1 else ""]
    return UsageError(f"{item.name}{value} ({item.origin}): should be {reason}.", " ".join(filter(None, hints)))
