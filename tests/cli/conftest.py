"""Run a command as a user does, in a directory of its own."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import make_database, make_model, make_questions
from two_turns import tokenizer_folder, trajectory

from emailrl.questions.load import write_scenarios

__all__ = ["Run", "Terminal", "emailrl", "here", "tokenizer_folder", "trajectory"]

Run = Callable[..., tuple[int, str, str]]


class Terminal(io.StringIO):
    """Somebody at a terminal."""

    def isatty(self) -> bool:
        return True


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


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A directory with settings, database, questions and model."""
    make_model(tmp_path / "model")
    make_database(tmp_path / "mail.db")
    write_scenarios(tmp_path / "questions.jsonl", make_questions(4))
    (tmp_path / "emailrl.toml").write_text(
        'model_name = "model"\nemailrl_db = "mail.db"\nemailrl_questions = "questions.jsonl"\n'
        "max_tokens = 6\nmax_turns = 2\n"
    )
    return tmp_path
