"""Values that a folder's files may not set until the user trusts the folder: servers that get keys and emails, code to
run, and output paths outside the folder. Flags and environment belong to the user; `.env`, `emailrl.toml` and W&B's
`wandb/settings` may come from a stranger. Dangerous settings are marked in their declarations (`Address`, `Code`,
`Written`, every secret); numbers, model names, question files and a database to read are harmless."""

from __future__ import annotations

import configparser
import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from emailrl.base.credentials import secret_argument, without_credentials
from emailrl.base.disk import replace_bytes
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.plain import counted
from emailrl.settings.fields import PLAIN_WORD
from emailrl.settings.names import Given, Leaf, by_name, leaves

_PROVIDER: Final = re.compile(
    r"https://(api\.openai\.com|([a-z0-9-]+\.)*openrouter\.ai)(:443)?(/[a-z0-9._/-]*)?", re.ASCII | re.IGNORECASE
)
"""Addresses that a file may name without trust if the default is one of them. No user, password, escape or query, so
that no two URL parsers can disagree about the host."""
_RUN_NAMES: Final = ("auto", "latest", "best")
_WANDB_OWN: Final = "https://api.wandb.ai"
_WANDB_HARMLESS: Final = frozenset({"mode", "disabled", "entity", "project", "silent", "quiet"})


class Untrusted(UsageError):
    """A folder's file sets a value that requires trust."""

    code = "untrusted"


@dataclass(frozen=True, slots=True)
class Risk:
    file: str
    setting: str  # The name used in the file.
    value: str  # In ASCII; secrets are hidden.
    effect: str
    digest: str  # Of the value and of any code file it names.

    def __str__(self) -> str:
        return f"{self.file} sets {self.setting} = {self.value}, which {self.effect}"


def risks_of(given: Mapping[Leaf, Given], folder: Path, *, builds_db: bool) -> dict[Leaf, Risk]:
    """The effective values that require trust; ``builds_db`` if the command also writes the database."""
    found = {}
    for leaf in leaves():
        item = given.get(leaf)
        if not (item and item.file and (effect := _effect(leaf, item.value, folder, builds_db=builds_db))):
            continue
        text = str(item.value)
        is_hidden = leaf.secret or (leaf.code and not leaf.address and secret_argument(text))
        shown = "(hidden)" if is_hidden else ascii(without_credentials(text))
        parts = [text]
        if leaf.written:
            parts.append(str(None) if "\0" in text else os.path.realpath(folder / text))
        if leaf.code:
            parts += [hashlib.sha256(file.read_bytes()).hexdigest() for file in _code_files(text, folder)]
        found[leaf] = Risk(item.file.name, item.name, shown, effect, _digest(item.file.name, leaf.key, *parts))
    return found


def wandb_risks(folder: Path) -> list[Risk]:
    """Risky values in W&B's own settings file in the folder, which W&B reads before its environment."""
    if os.environ.get("WANDB_DIR"):  # then W&B looks for it there
        return []
    found = []
    for name in ("wandb/settings", ".wandb/settings"):
        parser = configparser.ConfigParser(interpolation=None)
        values: list[tuple[str, str]] = []
        with suppress(OSError, UnicodeDecodeError, configparser.Error):  # W&B reads none of an unreadable file
            if (folder / name).is_file():  # reading a pipe would block
                parser.read(folder / name)
                values = parser.items("default")
        for key, value in values:
            if key in _WANDB_HARMLESS or (key == "base_url" and value.rstrip("/") == _WANDB_OWN):
                continue
            shown = "(hidden)" if "key" in key else ascii(without_credentials(value))
            digest = _digest(name, key, value)
            found.append(Risk(name, key, shown, "controls where W&B sends the run and its key", digest))
    return found


def check(found: Sequence[Risk], folder: Path) -> None:
    """Raise Untrusted if any of the values found is not trusted."""
    trusted = folders().get(os.path.realpath(folder)) if found else ()
    new = [risk for risk in found if risk.digest not in (trusted or ())]
    if not new:
        return
    first = replace(new[0], value=new[0].value if len(new[0].value) <= 100 else f"{new[0].value[:100]}…")
    others = f" (and {counted(len(new) - 1, 'more setting')})" if len(new) > 1 else ""
    state = "is not trusted" if trusted is None else "has changed since it was trusted"
    place = shlex.quote(min(os.path.relpath(folder), str(folder), key=len))
    raise Untrusted(f"{first}{others}: this folder {state}.", f"Read its settings, then: emailrl trust {place}")


def _effect(leaf: Leaf, value: Any, folder: Path, *, builds_db: bool) -> str | None:
    """The effect that makes a value in a folder's file require trust; None if it is harmless."""
    if value is None or value == "":
        return None
    text = str(value)
    if leaf.secret:
        return "belongs to someone who may read what is sent with it"
    if leaf.address and leaf.names_server(text):
        key = by_name()[leaf.address.key].env_names[0]
        is_provider = _PROVIDER.fullmatch(str(leaf.default)) and _PROVIDER.fullmatch(text)
        return None if is_provider else f"gets {leaf.address.gets} and your {key}"
    if leaf.code and not PLAIN_WORD.fullmatch(text):
        return "runs that code"
    if leaf.written and (builds_db or not leaf.written.read_mostly) and text not in _RUN_NAMES:
        # By its name; links are refused on writing (``disk.check_place``).
        inside = "\0" not in text and Path(os.path.abspath(folder)) in Path(os.path.abspath(folder / text)).parents
        return None if inside else "is outside the folder and would be written to"
    return None


def _code_files(name: str, folder: Path) -> Iterator[Path]:
    """The files in a folder that a Python import path may load."""
    place = name.rpartition(":")[0]
    if not place or "\0" in place:
        return
    if place.endswith(".py"):
        files = [folder / os.path.expanduser(place)]
    else:
        *packages, module = place.split(".")
        files = [folder.joinpath(*packages, f"{module}.py"), folder.joinpath(*packages, module, "__init__.py")]
        files += [folder.joinpath(*packages[:depth], "__init__.py") for depth in range(1, len(packages) + 1)]
    yield from (file for file in files if file.is_file())


def _digest(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def record_file() -> Path:
    """``$XDG_CONFIG_HOME/emailrl/trusted.json``, by default below ``~/.config``."""
    named = os.environ.get("XDG_CONFIG_HOME", "")
    try:
        root = Path(named) if os.path.isabs(named) else Path.home() / ".config"
    except RuntimeError as error:
        raise EmailRLError("There is no home directory to store trusted folders in.", "Set XDG_CONFIG_HOME.") from error
    return root / "emailrl" / "trusted.json"


def folders() -> dict[str, list[str]]:
    """Every trusted folder by real path, with the digests of its trusted values."""
    path = record_file()
    try:
        found = json.loads(path.read_bytes())
        return {str(folder): [str(digest) for digest in digests] for folder, digests in found.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise EmailRLError(f"{path} cannot be read: {error}.", "Remove it, then trust your folders again.") from error


def remember(folder: Path, digests: Sequence[str] | None) -> bool:
    """Trust exactly these digests for the folder, or revoke its trust (None); returns whether it was trusted."""
    path, known, place = record_file(), folders(), os.path.realpath(folder)
    before = known.pop(place, None)
    if digests is not None:
        known[place] = sorted(digests)
    if digests is not None or before is not None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_bytes(path, json.dumps(known, indent=1, sort_keys=True).encode() + b"\n", mode=0o600)
    return before is not None
