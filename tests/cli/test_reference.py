"""The reference pages in docs/ are those the code makes."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
from generate import cli_reference, settings_reference

ROOT = Path(__file__).resolve().parents[2]


def test_settings_page_is_current() -> None:
    assert (ROOT / "docs/reference/settings.md").read_text(encoding="utf-8") == settings_reference(), "run `make docs`"


def test_cli_page_is_current() -> None:
    pinned = f"typer=={version('typer')}" in (ROOT / "constraints.txt").read_text().splitlines()
    if not pinned:
        pytest.skip("another typer than the pinned one lays its help out differently")
    assert (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8") == cli_reference(), "run `make docs`"
