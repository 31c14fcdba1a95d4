"""The questions of a plan: those that training would find."""

from __future__ import annotations

from pathlib import Path

import pytest
from plan.planned import H200, plan_for, settings_with
from scenarios.questions import scenario

from emailrl.errors import EmailRLError, UsageError
from emailrl.plan import make_plan
from emailrl.scenarios import write_scenarios
from emailrl.store.build import build_database
from emailrl.store.sources import RawEmail


def write_questions(file: Path) -> None:
    """Ten questions for training on one mailbox, four for validation on another."""
    inboxes = [("ann@corvane.test", "train")] * 10 + [("bob@corvane.test", "val")] * 4
    write_scenarios(file, [scenario(number, *inbox) for number, inbox in enumerate(inboxes)])


@pytest.fixture
def db(tmp_path: Path) -> Path:
    email = RawEmail("<1@x>", "gas", "ann@corvane.test", ["bob@corvane.test"], [], [], None, "body", "1.")
    return build_database([email], tmp_path / "mail.db").db


def test_questions_are_counted_in_the_file_next_to_the_database(tmp_path: Path, db: Path) -> None:
    write_questions(tmp_path / "mail_questions.jsonl")
    values = {"db": db, "mode": "rollout", "per_device_train_batch_size": 4}
    made = plan_for(tmp_path, **values, num_train_epochs=2, max_steps=100)
    tokens = made.tokens
    assert (tokens.questions, tokens.steps, tokens.epochs, tokens.eval_trajectories) == (10, 6, 2.0, 4)  # 4 + 4 + 2
    assert not any("question file" in note for note in made.notes)
    fewer = plan_for(tmp_path, **values, num_train_epochs=2, max_steps=100, train_dataset_size=8, eval_dataset_size=3)
    assert (fewer.tokens.questions, fewer.tokens.steps, fewer.tokens.eval_trajectories) == (8, 4, 3)


def test_without_questions_the_assumed_number_is_named(tmp_path: Path, db: Path) -> None:
    made = plan_for(tmp_path, db=db, train_dataset_size=1200)
    assert made.tokens.questions == 1200
    assert f"no question file at {tmp_path / 'mail_questions.jsonl'}: assuming 1,200 training questions" in made.notes


def test_a_default_database_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert any("no question file at data/enron_emails_questions.jsonl" in note for note in plan_for(tmp_path).notes)


@pytest.mark.parametrize(
    ("key", "content", "error", "message"),
    [
        ("questions", None, UsageError, "No such question file: "),
        ("db", None, EmailRLError, "No such mail database: "),
        ("db", "no database", UsageError, "cannot be read as a mail database: file is not a database"),
    ],
)
def test_a_named_file_that_cannot_be_read_is_an_error(
    tmp_path: Path, key: str, content: str | None, error: type[EmailRLError], message: str
) -> None:
    file = tmp_path / "named"
    if content is not None:
        file.write_text(content)
    with pytest.raises(error, match=message):
        plan_for(tmp_path, **{key: file})


def test_questions_that_training_refuses_cannot_be_planned(tmp_path: Path, db: Path) -> None:
    file = tmp_path / "mail_questions.jsonl"
    write_scenarios(file, [scenario(1, "ann@corvane.test", "train"), scenario(2, "ann@corvane.test", "test")])
    with pytest.raises(UsageError, match=r"inbox ann@corvane\.test is in the splits train and test"):
        make_plan(settings_with(tmp_path, db=db), H200)
