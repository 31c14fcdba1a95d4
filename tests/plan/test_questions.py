"""The questions of a plan: those that training would find."""

from __future__ import annotations

from pathlib import Path

import pytest
from plan.planned import H200, plan_for, settings_with
from questions.questions import scenario

from emailrl.base.errors import UsageError
from emailrl.plan import make_plan
from emailrl.questions import write_scenarios


def write_questions(file: Path) -> None:
    """Ten questions for training on one mailbox, four for validation on another."""
    inboxes = [("ann@corvane.test", "train")] * 10 + [("bob@corvane.test", "val")] * 4
    write_scenarios(file, [scenario(number, *inbox) for number, inbox in enumerate(inboxes)])


def test_questions_are_counted_in_the_file_next_to_the_database(tmp_path: Path) -> None:
    write_questions(tmp_path / "mail_questions.jsonl")
    values = {"db": tmp_path / "mail.db", "mode": "rollout", "per_device_train_batch_size": 4}
    made = plan_for(tmp_path, **values, num_train_epochs=2, max_steps=100)
    tokens = made.tokens
    assert (tokens.questions, tokens.steps, tokens.epochs, tokens.eval_trajectories) == (10, 6, 2.0, 4)  # 4 + 4 + 2
    assert not any("question file" in note for note in made.notes)
    fewer = plan_for(tmp_path, **values, num_train_epochs=2, max_steps=100, train_dataset_size=8, eval_dataset_size=3)
    assert (fewer.tokens.questions, fewer.tokens.steps, fewer.tokens.eval_trajectories) == (8, 4, 3)
    # The fourth, and no other, measures the best model again.
    assert fewer.tokens.confirmed == pytest.approx(1 / 3) and tokens.confirmed == 0
    assert plan_for(tmp_path, **values, eval_dataset_size=1).tokens.confirmed == 1


def test_without_questions_the_assumed_number_is_named(tmp_path: Path) -> None:
    file = tmp_path / "elsewhere.jsonl"
    made = plan_for(tmp_path, questions=file, train_dataset_size=1200)
    assert made.tokens.questions == 1200
    assert f"no question file at {file}: assuming 1,200 training questions" in made.notes


def test_questions_that_training_refuses_cannot_be_planned(tmp_path: Path) -> None:
    file = tmp_path / "mail_questions.jsonl"
    write_scenarios(file, [scenario(1, "ann@corvane.test", "train"), scenario(2, "ann@corvane.test", "test")])
    with pytest.raises(UsageError, match=r"inbox ann@corvane\.test is in the splits train and test"):
        make_plan(settings_with(tmp_path, db=tmp_path / "mail.db"), H200)
