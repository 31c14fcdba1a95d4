"""What a resumed run must have in common with its checkpoint, and the cause named in the error if it does not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from runs.run_files import write

from emailrl.base.errors import UsageError
from emailrl.checkpoints import read_checkpoint
from emailrl.questions import fingerprint
from emailrl.records.trajectory import Scenario
from emailrl.runs.start import check_agrees
from emailrl.settings import load_settings


def scenario(number: int, split: str) -> Scenario:
    return Scenario(f"q{number}", f"Q{number}?", "A", [f"<{number}@x>"], f"{split}@x.org", "2001-05-04", 1.0, split)


TRAIN = [scenario(number, "train") for number in range(4)]
VAL = [scenario(number, "val") for number in range(4, 8)]


@dataclass
class Run:
    """A run on all training and the first two validation questions."""

    folder: Path

    def __post_init__(self) -> None:
        write(self.folder / "run" / "checkpoint-1")

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
        return check_agrees(
            replace(written, metadata=recorded), now, now.training.mode,
            database=database, questions=questions, source=str(self.file),
        )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_harmless_changes_are_listed(run: Run) -> None:
    assert run.resume() == []
    assert sorted(run.resume(learning_rate=1e-4, test_set_size=3)) == [
        "changed since the checkpoint: learning_rate 1e-05 -> 0.0001",
        "changed since the checkpoint: test_set_size 100 -> 3",
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_name": "Qwen/Qwen3-0.6B"}, "Resume with --model nano"),
        ({"mode": "simple"}, "Resume with --mode masked"),
        ({"adapter": "elsewhere"}, "was not started from elsewhere"),
        ({"lora_rank": 4}, "Resume with LORA_RANK=16"),
    ],
)
def test_what_a_resumed_run_keeps_is_named(run: Run, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run.resume(**changes)


def test_another_database_is_told_from_a_changed_one(run: Run) -> None:
    with pytest.raises(UsageError, match=r"The database .* has changed since .*gen-db --append and --overwrite"):
        run.resume(database="other")
    with pytest.raises(UsageError, match=r"on the database .*mail\.db, not on .*new\.db\. Resume with --db .*mail\.db"):
        run.resume(database="other", db=run.folder / "new.db")


def test_settings_that_choose_other_questions_are_named(run: Run) -> None:
    changes = {"train_dataset_size": 3, "seed": 7, "learning_rate": 1e-4, "test_set_size": 3}
    with pytest.raises(UsageError) as refused:
        run.resume(train=TRAIN[:3], **changes)
    named = refused.value.message.partition("was trained on other questions: ")[2].removesuffix(".").split("; ")
    assert sorted(named) == ["SEED was 42, now 7", "TRAIN_DATASET_SIZE was 3000, now 3"]
    with pytest.raises(UsageError, match=r"QUESTIONS was .*questions\.jsonl, now .*b\.jsonl"):
        run.resume(train=TRAIN[:3], questions=run.folder / "b.jsonl")


def test_changed_questions_are_named_with_the_version_that_drew_them(run: Run) -> None:
    for changed in ({"train": [replace(TRAIN[0], answer="B"), *TRAIN[1:]]}, {"val": VAL[2:]}):
        with pytest.raises(UsageError, match=r"trained on other questions than .* now gives") as refused:
            run.resume(**changed)
        assert "emailrl 0.1.0, commit 0123456789ab" in refused.value.hint
