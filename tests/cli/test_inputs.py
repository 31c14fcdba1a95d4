"""Commands look for what they read before they load anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Emailrl = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("command", ["train", "benchmark", "rollout"])
def test_a_missing_database_or_question_file_is_the_only_line(emailrl: Emailrl, tmp_path: Path, command: str) -> None:
    code, _, said = emailrl(command, "--db", "none.db")
    assert code == 1 and said.startswith("error: No such mail database: none.db.") and said.count("\n") == 1
    (tmp_path / "mail.db").touch()
    code, _, said = emailrl(command, "--db", "mail.db", "--questions", "none.jsonl")
    assert code == 2 and said.startswith("error: No such question file: none.jsonl. Choose another with --questions")
    assert said.count("\n") == 1


def test_an_unknown_model_is_told_before_it_is_loaded(emailrl: Emailrl, tmp_path: Path) -> None:
    (tmp_path / "mail.db").touch()
    (tmp_path / "q.jsonl").touch()
    code, _, said = emailrl("train", "--db", "mail.db", "--questions", "q.jsonl", "--model", "nanoo")
    assert code == 2 and said.startswith("error: Unknown model 'nanoo'.") and said.count("\n") == 1


def test_settings_that_cannot_train_are_refused_before_ranks_start(
    emailrl: Emailrl, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launched(*_: object) -> int:
        raise AssertionError("a rank was started")

    monkeypatch.setattr("emailrl.cli.ranks.launch", launched)
    monkeypatch.setenv("MAX_STALENESS", "1")
    code, _, said = emailrl("train", "--nproc", "2")
    assert code == 2 and said.startswith("error: MAX_STALENESS=1 needs samplers of their own") and said.count("\n") == 1


def test_sft_says_that_the_folder_exists_and_nothing_else(emailrl: Emailrl, tmp_path: Path) -> None:
    (tmp_path / "there" / "something").mkdir(parents=True)
    code, _, said = emailrl("sft", "--out", "there")
    told = "error: there already exists. Choose another folder with --out, or continue it with --resume latest.\n"
    assert code == 2 and said == told
