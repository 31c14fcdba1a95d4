"""What a resumed run must have in common with its checkpoint, and the cause named in the error if it does not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from training.run_files import write

from emailrl.base.errors import UsageError
from emailrl.checkpoints import read_checkpoint
from emailrl.questions import fingerprint, read_jsonl, write_scenarios
from emailrl.records import write_trajectories
from emailrl.records.trajectory import Scenario, Trajectory
from emailrl.settings import load_settings
from emailrl.training.run.agreement import check_agrees
from emailrl.training.run.data import RunData


def scenario(number: int, split: str) -> Scenario:
    return Scenario(f"q{number}", f"Q{number}?", "A", [f"<{number}@x>"], f"{split}@x.org", "2001-05-04", 1.0, split)


TRAIN = [scenario(number, "train") for number in range(4)]
VAL = [scenario(number, "val") for number in range(4, 8)]


@dataclass
class Run:
    """A run on all training and the first two validation questions, with its recorded evaluation."""

    folder: Path

    def __post_init__(self) -> None:
        write_scenarios(self.file, [*TRAIN, *VAL])
        write(self.folder / "run" / "checkpoint-1")
        asked = [Trajectory(id=s.id, group_id=s.id, run_id="r", step=0, mode="masked", scenario=s) for s in VAL[:2]]
        evaluations = self.folder / "run" / "trajectories"
        evaluations.mkdir()
        write_trajectories(evaluations / "eval-000000.jsonl", asked)

    @property
    def file(self) -> Path:
        return self.folder / "questions.jsonl"

    def resume(
        self, train: list[Scenario] = TRAIN, val: list[Scenario] = VAL[:2], database: str = "d", **changes: Any
    ) -> list[str]:
        """Resume with these questions and changed settings."""
        given = {"model_name": "nano", "questions": self.file, "db": self.folder / "mail.db"}
        before, now = (load_settings(given | more, environ={}, cwd=self.folder) for more in ({}, changes))
        written = read_checkpoint(self.folder / "run" / "checkpoint-1")
        recorded = replace(
            written.metadata, settings=before.public(), questions_fingerprint=fingerprint([*TRAIN, *VAL[:2]]),
            versions={"emailrl": "0.1.0"}, git_commit="0123456789abcdef",
        )  # fmt: skip
        questions = fingerprint([*train, *val])
        data = RunData(train, val, str(self.file), [], database, questions)
        return check_agrees(replace(written, metadata=recorded), now, data)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_harmless_changes_are_listed(run: Run) -> None:
    assert run.resume() == []
    assert sorted(run.resume(learning_rate=1e-4, test_set_size=3)) == [
        "learning_rate 1e-05 -> 0.0001",
        "test_set_size 100 -> 3",
    ]


def test_another_model_is_named(run: Run) -> None:
    with pytest.raises(UsageError, match="Resume with --model nano"):
        run.resume(model_name="Qwen/Qwen3-0.6B")


def test_another_database_is_told_from_a_changed_one(run: Run) -> None:
    with pytest.raises(
        UsageError, match=r"The database .*mail\.db has changed since .*gen-db --append and --overwrite"
    ):
        run.resume(database="other")
    with pytest.raises(UsageError, match=r"on the database .*mail\.db, not on .*new\.db\. Resume with --db .*mail\.db"):
        run.resume(database="other", db=run.folder / "new.db")


def test_settings_that_choose_other_questions_are_named(run: Run) -> None:
    changes = {"train_dataset_size": 3, "seed": 7, "learning_rate": 1e-4, "test_set_size": 3}
    with pytest.raises(UsageError) as refused:
        run.resume(train=TRAIN[:3], **changes)
    assert refused.value.message.endswith(
        "was trained on other questions: TRAIN_DATASET_SIZE was 3000, now 3; SEED was 42, now 7."
    )
    with pytest.raises(UsageError, match=r"QUESTIONS was .*questions\.jsonl, now .*b\.jsonl"):
        run.resume(train=TRAIN[:3], questions=run.folder / "b.jsonl")


def test_another_sample_of_the_same_validation_questions_is_named(run: Run) -> None:
    with pytest.raises(UsageError) as refused:
        run.resume(val=VAL[2:])
    assert "was validated on another sample of the questions in " in refused.value.message
    assert "(emailrl 0.1.0, commit 0123456789ab), or start a new run from its weights" in refused.value.hint


def test_changed_questions_are_named(run: Run) -> None:
    changed = [replace(VAL[0], answer="B"), *VAL[1:]]
    write_scenarios(run.file, [*TRAIN, *changed])
    assert list(read_jsonl(run.file)) == [*TRAIN, *changed]
    with pytest.raises(UsageError, match=r"The validation questions in .*questions\.jsonl have changed since"):
        run.resume(val=changed[:2])
    with pytest.raises(UsageError, match=r"The questions in .*questions\.jsonl have changed since"):
        run.resume(train=[replace(TRAIN[0], answer="B"), *TRAIN[1:]])
