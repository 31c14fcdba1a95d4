"""Loads the settings from all their sources, those recorded in a run's checkpoints included.

A run's folder may come from a stranger, so it never decides what code runs, which server gets emails and keys, or where
files are written: code and addresses must be given again, paths are the current ones, and secrets are not recorded.
"""

from __future__ import annotations

import os
from collections import ChainMap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from emailrl.base.credentials import without_credentials
from emailrl.base.errors import UsageError
from emailrl.base.plain import tell
from emailrl.settings.fields import PLAIN_WORD
from emailrl.settings.names import Leaf, first_problem, leaves, nearest, tree_of
from emailrl.settings.sources import Given, Source, from_dotenv, from_environment, from_flags, from_preset, from_toml
from emailrl.settings.tree import Settings, StoreSettings
from emailrl.settings.trust import Risk, check, remember, risks_of, wandb_risks


def from_record(
    record: Mapping[str, Mapping[str, Any]], stated: Mapping[Leaf, Given], others: Mapping[Leaf, Given]
) -> Source:
    """The recorded values, without those that the record may not decide.

    ``stated`` holds flags and environment, which override the record; ``others`` holds the folder's files and the
    preset, which the record overrides. Raises UsageError for code or an address that none of them names.
    """
    defaults = Settings().public()
    source: Source = {}
    for leaf in leaves():
        placed = leaf.written is not None and not leaf.written.read_mostly
        if leaf.secret or placed or leaf in stated or leaf.field not in record.get(leaf.section, {}):
            continue
        value, default = record[leaf.section][leaf.field], defaults[leaf.section][leaf.field]
        own = others[leaf].value if leaf in others else default
        if (leaf.address or leaf.code) and value != default and not PLAIN_WORD.fullmatch(str(value)):
            if without_credentials(str(own)) != value:
                raise UsageError(
                    f"The run was trained with {leaf.env_names[0]}={value}, which a run's folder may not set.",
                    f"Set it again ({leaf.env_names[0]}=… emailrl train …), or choose another value.",
                )
        elif value != default or leaf in others:
            source[leaf] = Given(value, leaf.env_names[0], "recorded by the run")
    known = {(leaf.section, leaf.field) for leaf in leaves()}
    unknown = [name for section, values in record.items() for name in values if (section, name) not in known]
    if unknown:
        tell(f"warning: the run recorded unknown settings: {', '.join(unknown[:5])[:200]}")
    return source


def load_settings(
    overrides: Mapping[str, Any] | None = None,
    preset: str | None = None,
    *,
    cwd: Path | None = None,
    environ: Mapping[str, str] | None = None,
    dotenv: bool = True,
    recorded: Mapping[str, Mapping[str, Any]] | None = None,
    trust: bool = False,
    builds_db: bool = False,
    looks_only: bool = False,
) -> Settings:
    """The settings in force: flag > environment > ``.env`` > ``emailrl.toml`` > preset > default.

    ``overrides`` holds flags by setting name (``max_steps``, ``model_name``); None values are ignored. ``cwd`` is the
    folder of ``emailrl.toml`` and, unless ``dotenv`` is off, ``.env``. ``recorded`` holds the original settings of a
    resumed run; they override everything but flags and environment (`recorded`). ``trust`` permanently trusts the
    current values in the folder's files; ``builds_db`` is for commands that write the database. ``looks_only`` is for
    commands that send nothing, run none of the folder's code and write nothing: they also work in an untrusted folder,
    ignoring addresses, keys and code set by its files. Raises ``UsageError`` for an unknown key, an invalid value, or
    conflicting names of one setting within a source, and ``Untrusted`` for a value that a file may not set (`trust`).
    """
    here = Path.cwd() if cwd is None else Path(cwd).absolute()
    stated = ChainMap(from_flags(overrides or {}), from_environment(os.environ if environ is None else environ))
    files = _of_folder(here) if dotenv else (from_toml(here / "emailrl.toml"),)
    others = ChainMap(*files, from_preset(preset))
    record = from_record(recorded, stated, others) if recorded is not None else {}
    given = ChainMap(*stated.maps, record, *others.maps)
    risks = risks_of(given, here, builds_db=builds_db)
    left_out = {leaf for leaf in risks if leaf.written is None} if looks_only else set()
    try:
        tree = tree_of({leaf: item.value for leaf, item in given.items() if leaf not in left_out})
        settings = Settings.model_validate(tree)
    except ValidationError as error:
        # Keep the input and its context out of the chained traceback: they may contain a secret.
        leaf, reason = first_problem(error)
        item, more, near = given[leaf], error.error_count() - 1, nearest(str(given[leaf].value), leaf.choices)
        value = "" if leaf.secret else f"={str(item.value)!r}"
        hints = [f"Did you mean {near}?" if near else "", f"{more} more to fix." if more else ""]
        problem = f"{item.name}{value} ({item.origin}): should be {reason}."
        raise UsageError(problem, " ".join(filter(None, hints)), "invalid-setting") from None
    if trust:
        for risk in trust_folder(here):
            tell(f"trusted from now on: {risk}")
    elif not looks_only:
        check(list(risks.values()), here)
    store, default = settings.store, here / settings.store.db
    if "db" in store.model_fields_set or default.exists() or len(found := list(default.parent.glob("*.db"))) != 1:
        return settings
    # None is named, and the default is missing: the only one beside it.
    values = dict(store) | {"db": store.db.with_name(found[0].name)}
    return settings.model_copy(update={"store": StoreSettings.model_construct(store.model_fields_set, **values)})


def folder_risks(folder: Path) -> list[Risk]:
    """All values in the folder's files that require trust, regardless of flags and environment."""
    return [*risks_of(ChainMap(*_of_folder(folder)), folder, builds_db=True).values(), *wandb_risks(folder)]


def trust_folder(folder: Path) -> list[Risk]:
    """Trust the current values in the folder's files, replacing earlier trust."""
    found = folder_risks(folder)
    remember(folder, [risk.digest for risk in found])
    return found


def _of_folder(folder: Path) -> tuple[Source, Source]:
    return from_dotenv(folder / ".env"), from_toml(folder / "emailrl.toml")
