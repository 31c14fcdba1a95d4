"""Run a command as a user does, in a directory of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from two_turns import tokenizer_folder, trajectory

__all__ = ["Run", "emailrl", "tokenizer_folder", "trajectory"]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def emailrl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Call ``main`` in ``tmp_path`` with arguments; returns (exit code, stdout, stderr)."""
    from emailrl.cli.app import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["emailrl", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        assert isinstance(caught.value.code, int)
        return caught.value.code, *capsys.readouterr()

    return run
