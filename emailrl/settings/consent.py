"""The folders the user trusts, recorded in the user's own configuration, outside any folder that could modify it.

``trusted.json`` maps each folder's real path to digests of its trusted values. A value without a digest is new or
changed, and must be trusted again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from emailrl.base.disk import replace_bytes
from emailrl.base.errors import EmailRLError


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


def was_trusted(folder: Path) -> bool:
    """Whether the folder has any record of trust."""
    return os.path.realpath(folder) in folders()


def is_trusted(folder: Path, digests: Sequence[str]) -> bool:
    """Whether all of these digests are trusted for the folder."""
    return set(digests) <= set(folders().get(os.path.realpath(folder), ()))


def remember(folder: Path, digests: Sequence[str]) -> None:
    """Trust exactly these digests for the folder, replacing earlier ones."""
    _write(folders() | {os.path.realpath(folder): sorted(digests)})


def forget(folder: Path) -> bool:
    """Revoke trust in the folder; False if it was not trusted."""
    known = folders()
    was = known.pop(os.path.realpath(folder), None)
    if was is not None:
        _write(known)
    return was is not None


def _write(known: dict[str, list[str]]) -> None:
    path = record_file()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    replace_bytes(path, json.dumps(known, indent=1, sort_keys=True).encode() + b"\n", mode=0o600)
