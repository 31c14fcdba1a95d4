"""The emailrl.toml of a command line of OpenRLHF, as a test reads it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from emailrl.openrlhf import to_toml
from emailrl.settings import Settings, load_settings


def settings_of(text: str, folder: Path) -> Settings:
    (folder / "emailrl.toml").write_text(to_toml(text), encoding="utf-8")
    return load_settings(cwd=folder, environ={}, trust=True)


def values_of(text: str) -> dict[str, Any]:
    """Setting → value of the active lines."""
    return {key: value for table in tomllib.loads(to_toml(text)).values() for key, value in table.items()}


def comments_of(text: str) -> str:
    return "\n".join(line for line in to_toml(text).splitlines() if line.startswith("#"))
