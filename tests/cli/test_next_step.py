"""Suggested commands have the options that they need to run as printed."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from scenarios.questions import scenario

from emailrl.cli.next_step import suggest_benchmark, suggest_train
from emailrl.settings import Settings, load_settings


def settings_with(folder: Path, **values: Any) -> Settings:
    return load_settings(values, environ={}, cwd=folder)


def suggested(capsys: pytest.CaptureFixture[str]) -> str:
    """The printed command without its program; empty if none was."""
    out, error = capsys.readouterr()
    assert out == ""
    return shlex.join(shlex.split(error)[2:])


def test_a_benchmark_names_its_questions_and_accepts_a_shared_mailbox(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings_with(tmp_path, model_name="m", db=Path("mine.db"))
    test, train = scenario(1, "me@x", "test"), scenario(2, "me@x", "train")
    for questions, options in ((Path("mine_questions.jsonl"), ""), (Path("other.jsonl"), " --questions other.jsonl")):
        suggest_benchmark(settings, questions, [test])
        assert suggested(capsys) == f"benchmark --db mine.db{options}"
    suggest_benchmark(settings, Path("mine_questions.jsonl"), [test, train])
    assert suggested(capsys) == "benchmark --db mine.db --allow-shared-inbox"
    suggest_benchmark(settings, Path("mine_questions.jsonl"), [train])
    assert suggested(capsys) == ""
    suggest_benchmark(settings)  # with the hub's questions
    assert suggested(capsys) == "benchmark --db mine.db"


def test_training_after_sft_keeps_the_data_options_that_the_folder_does_not_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"db": Path("mine.db"), "questions": Path("mine_questions.jsonl"), "allow_shared_inbox": True}
    bare, given = settings_with(tmp_path), settings_with(tmp_path, **data)
    start = ["--adapter", "outputs/grpo_sft/best_model"]
    suggest_train(start, bare, bare)
    assert suggested(capsys) == "train --adapter outputs/grpo_sft/best_model"
    suggest_train(start, given, bare)
    assert suggested(capsys) == "train --adapter outputs/grpo_sft/best_model --db mine.db --allow-shared-inbox"
    suggest_train(start, settings_with(tmp_path, **data | {"questions": Path("b.jsonl")}), given)
    assert suggested(capsys) == "train --adapter outputs/grpo_sft/best_model --questions b.jsonl"
