"""Suggested commands have the options that they need to run as printed."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from tiny import make_database

from emailrl.cli.inputs import suggest, suggest_benchmark
from emailrl.settings import Settings, load_settings


def settings_with(folder: Path, **values: Any) -> Settings:
    return load_settings(values, environ={}, cwd=folder)


def suggested(capsys: pytest.CaptureFixture[str]) -> str:
    """The printed command without its program."""
    out, error = capsys.readouterr()
    assert out == ""
    return shlex.join(shlex.split(error)[2:])


def test_a_benchmark_names_its_model_and_questions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = settings_with(tmp_path, model_name="m", db=Path("mine.db"))
    for questions, options in ((Path("mine_questions.jsonl"), ""), (Path("other.jsonl"), " --questions other.jsonl")):
        suggest_benchmark(settings, questions)
        assert suggested(capsys) == f"benchmark --db mine.db{options}"
    db = make_database(tmp_path / "mail.db")
    suggest_benchmark(settings_with(tmp_path, db=db), tmp_path / "mail_questions.jsonl")
    assert suggested(capsys) == f"benchmark --model smol --limit 40 --db {db}"


def test_a_command_keeps_the_data_and_the_task_that_the_folder_does_not_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"db": Path("mine.db"), "questions": Path("mine_questions.jsonl"), "allow_shared_inbox": True}
    bare, given = settings_with(tmp_path), settings_with(tmp_path, **data)
    task = {"environment": "my.py:Env", "reward": "http://me:pw@host/r"}
    for settings, before, options in (
        (bare, bare, ""),
        (given, bare, " --db mine.db --allow-shared-inbox"),
        (settings_with(tmp_path, **data | {"questions": Path("b.jsonl")}), given, " --questions b.jsonl"),
        (settings_with(tmp_path, **task), bare, " --environment my.py:Env --reward http://host/r"),
    ):
        suggest(["train", "--adapter", "a"], settings, before)
        assert suggested(capsys) == f"train --adapter a{options}"
