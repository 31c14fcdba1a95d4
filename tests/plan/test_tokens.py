"""Tokens and steps of a run, its questions, and what another run says of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plan.planned import plan_for, write_metrics
from questions.questions import scenario
from tiny import make_metadata
from typer.testing import CliRunner

from emailrl import checkpoints
from emailrl.base.errors import UsageError
from emailrl.cli.app import app
from emailrl.plan import Known, measure_run
from emailrl.questions.load import write_scenarios


def test_tokens_and_steps() -> None:
    values = {"per_device_train_batch_size": 8, "num_generations": 6, "max_turns": 4, "max_tokens": 1000}
    tokens = plan_for(**values, max_steps=50, eval_steps=10).tokens
    assert (tokens.trajectories, tokens.per_step, tokens.steps, tokens.evaluations) == (48, 48 * 3800, 50, 6)
    assert tokens.most_per_trajectory == 900 + 4 * 1000 + 3 * 1700
    assert plan_for(eval_dataset_size=20, eval_samples=3, eval_temperature=1).tokens.eval_trajectories == 60
    rollout = plan_for(**values, mode="rollout", train_dataset_size=80, num_train_epochs=2).tokens
    assert rollout.steps == 20
    with pytest.raises(UsageError, match="longer than the model's context of 40960"):
        plan_for(tokens=50_000)


def test_a_run_says_what_its_tokens_and_seconds_were(tmp_path: Path) -> None:
    write_metrics(tmp_path / "run")
    measured = measure_run(tmp_path / "run")
    assert measured.per_trajectory == round(9000 / (9 + 12))  # a quarter of the first step's groups was dropped
    assert measured.trainable_share == 0.2
    assert measured.seconds == {"evaluation": 1.0, "rollout": 5.0, "total": 10.0, "update": 2.0}
    made = plan_for(max_steps=30, known=Known(measured=measured), price=1.0, here=True)
    assert made.tokens.per_trajectory == 429 and made.run_seconds == 300 and made.cost == pytest.approx(300 / 3600)
    # An evaluation took 2 s: 30 steps of 9 s, four evaluations and best_model on other questions.
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"total": 12.0}', '"total": 12.0}, "eval_accuracy": 0.5'))
    evaluated = measure_run(tmp_path / "run")
    again = plan_for(max_steps=30, known=Known(measured=evaluated), here=True)
    assert again.run_seconds == 30 * 9 + 5 * 2
    with pytest.raises(UsageError, match=r"has no metrics\.jsonl"):
        measure_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"total_tokens": 5, "seconds": {"total": 1.0}, "groups_kept": 1}\n')
    with pytest.raises(UsageError, match="has no step with an update"):
        measure_run(tmp_path)


def write_checkpoint(run: Path, base_model: str) -> None:
    """A checkpoint that names its base model, and holds nothing else."""
    metadata = make_metadata(kind="final", step=3, base_model=base_model)
    checkpoints.write_checkpoint(run / "final", metadata, lambda folder: None)


def test_a_run_is_planned_as_the_model_it_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(*arguments: str, **environment: str) -> dict[str, Any]:
        done = CliRunner().invoke(app, ["plan", "--run", "run", "--json", *arguments], env=environment)
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))  # no GPU
    write_metrics(tmp_path / "run")
    bare = said("--max-steps", "30")
    assert bare["model"]["name"] == "OpenPipe/Qwen3-14B-Instruct"
    assert bare["notes"][0] == "no checkpoint of the run names its model: assuming " + bare["model"]["name"]
    write_checkpoint(tmp_path / "run", "nano")
    own = said("--max-steps", "30")
    assert own["model"]["name"] == "nano" and own["run_seconds"] == 300
    assert not any("the run used" in note for note in own["notes"])
    for other in (said("--model", "Qwen/Qwen3-0.6B"), said(MODEL_NAME="Qwen/Qwen3-0.6B")):
        assert other["model"]["name"] == "Qwen/Qwen3-0.6B" and other["tokens"]["per_trajectory"] == 429
        assert other["measured"] is None  # they were nano's
        assert other["notes"][0] == ("the run used nano, not Qwen/Qwen3-0.6B: its token counts apply, its times do not")


def test_questions_are_counted_in_the_file_next_to_the_database(tmp_path: Path) -> None:
    inboxes = [("ann@corvane.test", "train")] * 10 + [("bob@corvane.test", "val")] * 4
    asked = [scenario(number, *inbox) for number, inbox in enumerate(inboxes)]
    unanswered = [replace(scenario(number, "bob@corvane.test", "val"), answer="") for number in (14, 15)]
    write_scenarios(tmp_path / "mail_questions.jsonl", asked)
    values = {"db": tmp_path / "mail.db", "mode": "rollout", "per_device_train_batch_size": 4}
    made = plan_for(**values, num_train_epochs=2, max_steps=100)
    tokens = made.tokens
    assert (tokens.questions, tokens.steps, tokens.epochs, tokens.eval_trajectories) == (10, 6, 2.0, 4)  # 4 + 4 + 2
    assert not any("question file" in note for note in made.notes)
    fewer = plan_for(**values, num_train_epochs=2, max_steps=100, train_dataset_size=8, eval_dataset_size=3)
    assert (fewer.tokens.questions, fewer.tokens.steps, fewer.tokens.eval_trajectories) == (8, 4, 3)
    # The fourth, and no other, measures the best model again.
    assert fewer.tokens.confirmed == pytest.approx(1 / 3) and tokens.confirmed == 0
    assert plan_for(**values, eval_dataset_size=1).tokens.confirmed == 1
    # Evaluations take those with answers.
    write_scenarios(tmp_path / "mail_questions.jsonl", [*asked, *unanswered])
    with_judge = plan_for(**values, reward="ruler", judge_base_url="http://127.0.0.1:1/v1", eval_dataset_size=6)
    assert (with_judge.tokens.questions, with_judge.tokens.eval_trajectories) == (10, 4)


def test_without_questions_the_assumed_number_is_named(tmp_path: Path) -> None:
    file = tmp_path / "elsewhere.jsonl"
    made = plan_for(questions=file, train_dataset_size=1200)
    assert made.tokens.questions == 1200
    assert f"no question file at {file}: assuming 1,200 training questions" in made.notes


def test_questions_that_training_refuses_cannot_be_planned(tmp_path: Path) -> None:
    file = tmp_path / "mail_questions.jsonl"
    write_scenarios(file, [scenario(1, "ann@corvane.test", "train"), scenario(2, "ann@corvane.test", "test")])
    with pytest.raises(UsageError, match=r"inbox ann@corvane\.test is in the splits train and test"):
        plan_for(db=tmp_path / "mail.db")
