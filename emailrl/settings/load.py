"""Where settings come from: each source read into ``{leaf: Given}`` with the origin of every value, and the loader. A
run's folder may come from a stranger, so what its checkpoints record never decides what code runs, which server gets
emails and keys, or where files are written: code and addresses must be given again, paths are the current ones, and
secrets are not recorded."""

from __future__ import annotations

import io
import json
import os
import tomllib
from collections import ChainMap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from dotenv.parser import parse_stream
from pydantic import ValidationError

from emailrl.base.credentials import without_credentials
from emailrl.base.errors import UsageError
from emailrl.base.plain import tell
from emailrl.settings.fields import PLAIN_WORD
from emailrl.settings.names import PREFIX, Given, Leaf, by_env_name, by_name, first_problem, leaves, nearest, tree_of
from emailrl.settings.tree import Settings, StoreSettings
from emailrl.settings.trust import Risk, check, remember, risks_of, wandb_risks

NEAR_MISS: Final = 0.85  # above this similarity an unknown name in ``.env`` is a typo; WANDB_API_KEY must stay below
MAX_BYTES: Final = 2**20  # Maximum size of a settings file.

PRESETS: Final[dict[str, dict[str, Any]]] = tomllib.loads(
    Path(__file__).with_name("presets.toml").read_text(encoding="utf-8")
)
"""Preset name → settings by their unique names, written as a user would in ``emailrl.toml``."""
GIVES_WAY: Final = {"clip_high": "algorithm", "filter_on": "dynamic_filtering"}
"""A preset's value of the first does not count where the second is set to something else than with the preset."""

Source = dict[Leaf, Given]
_SEE: Final = "See docs/reference/settings.md."


def from_flags(overrides: Mapping[str, Any]) -> Source:
    """Values from the command line, by setting name; None means not given."""
    for name in overrides:
        if name not in by_name():
            raise _unknown(f"unknown setting {name!r} (command line)", name, by_name())
    given = ((by_name()[name], name, value) for name, value in overrides.items() if value is not None)
    return _gather((leaf, Given(_home(leaf, value), name, "command line")) for leaf, name, value in given)


def from_environment(environ: Mapping[str, str]) -> Source:
    """Values of the variables that name a setting, if not empty; warns of a missing or extra prefix."""
    known = by_env_name()
    # Nothing else is guessed at: most of an environment belongs to other programs.
    for name in filter(environ.get, environ):
        if (prefixed := PREFIX + name) in known and not environ.get(prefixed):
            tell(f"warning: {name} in the environment is not read; the setting is {prefixed}.")
        elif name.startswith(PREFIX) and name not in known:
            bare = name.removeprefix(PREFIX)
            near = bare if bare in known else nearest(name, known)
            guess = f"; did you mean {near}?" if near else f". {_SEE}"
            tell(f"warning: {name} in the environment is not a setting{guess}")
    present = ((leaf, name, environ.get(name)) for name, leaf in known.items())
    return _gather((leaf, Given(_decode(leaf, text), name, "environment")) for leaf, name, text in present if text)


def from_dotenv(path: Path) -> Source:
    """Values of a ``.env`` file (absent: none); a name that nearly matches a setting causes a warning on stderr."""
    last: dict[str, tuple[Leaf, Given]] = {}
    known = by_env_name()
    own = {leaf.field.upper(): leaf.env_names[0] for leaf in leaves()} | {name: name for name in known}
    for binding in parse_stream(io.StringIO(_read(path))):
        # A binding's text includes the blank lines before it.
        text = binding.original.string
        blank = text[: len(text) - len(text.lstrip())].count("\n")
        origin = f".env line {binding.original.line + blank}"
        if binding.error:
            raise UsageError(f"{origin} cannot be read.", "Write one NAME=value per line.")
        if leaf := known.get(name := binding.key or ""):
            # As in a shell, a later line replaces an earlier one of the same name; an empty one unsets it.
            last.pop(name, None)
            if binding.value:
                last[name] = leaf, Given(_decode(leaf, binding.value), name, origin, path)
        elif name and (near := nearest(name, own, 0.0 if name.startswith(PREFIX) else NEAR_MISS)):
            tell(f"warning: {origin}: {name} is not a setting; did you mean {own[near]}?")
    return _gather(last.values())


def from_toml(path: Path) -> Source:
    """Values of ``emailrl.toml`` (absent: none), under their section or at the top level; unknown keys are errors."""
    try:
        tree = tomllib.loads(_read(path))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path.name} cannot be read: {error}.", "Fix that line.") from error
    except RecursionError as error:
        raise UsageError(f"{path.name} cannot be read: it is nested too deeply.", f"Fix or remove {path}.") from error
    pairs, sections = [], {leaf.section for leaf in leaves()}
    for key, value in tree.items():
        section = key if isinstance(value, dict) else None
        for name, item in value.items() if isinstance(value, dict) else [(key, value)]:
            if section is not None and section not in sections:
                raise _unknown(f"unknown section [{section}] in {path.name}", section, sections)
            valid = {alias: leaf for leaf in leaves() if leaf.section == section for alias in leaf.names} or by_name()
            if name not in valid:
                written = f"{section}.{name}" if section else name
                raise _unknown(f"unknown key {written!r} in {path.name}", name, valid)
            leaf = valid[name]
            # Types that pydantic would coerce are rejected; a relative path is one from the file's directory.
            switch = bool in leaf.kinds or "on" in leaf.choices
            if (isinstance(item, bool) and not switch) or (leaf.is_path and item == ""):
                raise UsageError(f"{name} = {json.dumps(item)} in {path.name} is not a valid value.", _SEE)
            own = _home(leaf, item)
            pairs.append((leaf, Given(path.parent / own if isinstance(own, Path) else own, name, path.name, path)))
    return _gather(pairs)


def from_record(
    record: Mapping[str, Mapping[str, Any]], stated: Mapping[Leaf, Given], others: Mapping[Leaf, Given]
) -> Source:
    """The recorded values, without those that the record may not decide. ``stated`` (flags and environment) override
    the record, which overrides ``others`` (the folder's files and the preset). Raises UsageError for code or an address
    that none of them names."""
    defaults = Settings().public()
    source: Source = {}
    for leaf in leaves():
        placed = leaf.written is not None and not leaf.written.read_mostly
        if leaf.secret or placed or leaf in stated or leaf.field not in record.get(leaf.section, {}):
            continue
        value, default = record[leaf.section][leaf.field], defaults[leaf.section][leaf.field]
        own = others[leaf].value if leaf in others else default
        if (leaf.names_server(value) or leaf.code) and value != default and not PLAIN_WORD.fullmatch(str(value)):
            if without_credentials(str(own)) != value:
                problem = f"The run was trained with {leaf.env_names[0]}={value}, which a run's folder may not set."
                raise UsageError(problem, f"Set it again ({leaf.env_names[0]}=…), or choose another value.")
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
    ``overrides`` are flags by setting name (None: not given). ``cwd`` is the folder of ``emailrl.toml`` and, with
    ``dotenv``, of ``.env``. ``recorded`` settings of a resumed run override all but flags and environment. ``trust``
    trusts the values in the folder's files from now on; ``builds_db`` is for commands that write the database,
    ``looks_only`` for those that send and write nothing: they ignore addresses, keys and code of an untrusted folder.
    Raises ``UsageError`` for a wrong key or value, ``Untrusted`` for a value that a file may not set."""
    here = Path.cwd() if cwd is None else Path(cwd).absolute()
    stated = ChainMap(from_flags(overrides or {}), from_environment(os.environ if environ is None else environ))
    dotenv_source = from_dotenv(here / ".env") if dotenv else {}
    if preset is not None and preset not in PRESETS:
        guess = f"Did you mean {near}? " if (near := nearest(preset, PRESETS)) else ""
        raise UsageError(f"Unknown preset {preset!r}.", f"{guess}Presets: {', '.join(PRESETS)}.")
    sized = {by_name()[key]: Given(value, key, f"preset {preset}") for key, value in PRESETS[preset or "full"].items()}
    others = ChainMap(dotenv_source, from_toml(here / "emailrl.toml"), sized)
    for name, decides in GIVES_WAY.items():
        leaf = by_name()[decides]
        usual = PRESETS[preset or "full"].get(decides, leaf.default)
        if any(str(one[leaf].value).lower() != str(usual).lower() for one in (stated, others) if leaf in one):
            sized.pop(by_name()[name], None)
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
        item, near = given[leaf], nearest(str(given[leaf].value), leaf.choices)
        more = len({problem["loc"][:2] for problem in error.errors(include_input=False)}) - 1
        value = "" if leaf.secret else f"={str(item.value)!r}"
        hints = [f"Did you mean {near}?" if near else "", f"{more} more to fix." if more else ""]
        problem = f"{item.name}{value} ({item.origin}): should be {reason}."
        raise UsageError(problem, " ".join(filter(None, hints)), "invalid-setting") from None
    if trust:
        for risk in trust_folder(here):
            tell(f"trusted from now on: {risk}")
    elif not looks_only:
        check(list(risks.values()), here)
    if preset is not None and recorded is None:
        as_preset, written = Settings.model_validate(tree_of({leaf: item.value for leaf, item in sized.items()})), []
        for leaf in sized:
            now, before = map(leaf.of, (settings, as_preset))
            if given[leaf].origin != "command line" and now != before:
                written.append(f"{given[leaf].name}={now} ({given[leaf].origin})")
        if written:
            tell(f"Note: --preset {preset} gives way to {', '.join(written)}")
    store, default = settings.store, here / settings.store.db
    if "db" in store.model_fields_set or default.exists() or len(found := list(default.parent.glob("*.db"))) != 1:
        return settings
    # None is named, and the default is missing: the only one beside it.
    values = dict(store) | {"db": store.db.with_name(found[0].name)}
    return settings.model_copy(update={"store": StoreSettings.model_construct(store.model_fields_set, **values)})


def beyond_defaults(settings: Settings) -> str:
    """What ``--preset recommended`` would set of what is not set, as NAME=value."""
    wanted = {by_name()[key]: str(value).lower() for key, value in PRESETS["recommended"].items()}
    given = {(section, field) for section, values in settings for field in values.model_fields_set}
    return ", ".join(
        f"{leaf.env_names[0]}={value}" for leaf, value in wanted.items() if (leaf.section, leaf.field) not in given
    )


def folder_risks(folder: Path) -> list[Risk]:
    """All values in the folder's files that require trust, regardless of flags and environment."""
    given = ChainMap(from_dotenv(folder / ".env"), from_toml(folder / "emailrl.toml"))
    return [*risks_of(given, folder, builds_db=True).values(), *wandb_risks(folder)]


def trust_folder(folder: Path) -> list[Risk]:
    """Trust the current values in the folder's files, replacing earlier trust."""
    found = folder_risks(folder)
    remember(folder, [risk.digest for risk in found])
    return found


def _gather(pairs: Iterable[tuple[Leaf, Given]]) -> Source:
    """One value per setting; two names of one setting with different values are an error."""
    source: Source = {}
    for leaf, given in pairs:
        before = source.setdefault(leaf, given)
        if before.value != given.value:
            problem = f"{before.name} and {given.name} ({given.origin}) are the same setting with different values."
            raise UsageError(problem, f"Keep one of them; the main name is {leaf.env_names[0]}.")
    return source


def _read(path: Path) -> str:
    """The text of a settings file, or an empty string if there is none."""
    try:
        # A stranger's folder may link to a pipe or device, which would block or never end.
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise UsageError(f"{path.name} is not a file.", f"Remove {path}.")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise UsageError(f"{path.name} is larger than 1 MiB.", f"Fix or remove {path}.")
        return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig").read()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"{path.name} cannot be read: {reason}.", f"Fix or remove {path}.") from error


def _decode(leaf: Leaf, text: str) -> Any:
    """The text of a variable as a value: ``none`` for optional settings, JSON or commas for lists, else itself."""
    text = text.strip()
    if None in leaf.kinds and text.lower() in ("none", "null"):
        return None
    if leaf.kinds & {list, tuple, set, frozenset}:
        return json.loads(text) if text.startswith("[") else [part.strip() for part in text.split(",")]
    return _home(leaf, text)


def _home(leaf: Leaf, value: Any) -> Any:
    """A path with its ``~`` expanded; anything else unchanged."""
    if not leaf.is_path or not isinstance(value, str | Path):
        return value
    try:
        return Path(value).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{value}: no such user.", "Write the full path.") from error


def _unknown(problem: str, name: str, valid: Iterable[str]) -> UsageError:
    if name in by_name():
        hint = f"{name} belongs in [{by_name()[name].section}]."
    else:
        near = nearest(name, valid)
        hint = f"Did you mean {near}?" if near else _SEE
    return UsageError(f"{problem}.", hint, "unknown-setting")
