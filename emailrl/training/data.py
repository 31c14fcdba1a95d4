"""A run's questions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from emailrl.base.errors import UsageError
from emailrl.mail import database_fingerprint
from emailrl.questions import fingerprint, missing_ids, read_questions
from emailrl.records.trajectory import Scenario
from emailrl.settings import DataSettings


@dataclass(frozen=True, slots=True)
class RunData:
    """A run's questions and their fingerprint."""

    train: list[Scenario]
    val: list[Scenario]
    confirm: list[Scenario]
    """Other validation questions, unused for selection: they measure the best model without selection bias."""
    source: str
    """The file, folder or hub name of the questions."""
    notes: list[str]
    database_fingerprint: str
    questions_fingerprint: str


def load_data(data: DataSettings, db: Path, seed: int) -> RunData:
    """The training and validation questions, and fingerprints of them and the database.

    Raises UsageError for bad files, and if the database holds no question's source emails.
    """
    database = database_fingerprint(db)
    questions, num_val = read_questions(None, data), data.eval_dataset_size
    train = questions.of("train", limit=data.train_dataset_size, seed=seed)
    val = questions.of("val", limit=2 * num_val, seed=seed)
    chosen, confirm = val.scenarios[:num_val], val.scenarios[num_val:]
    coverage = missing_ids(train.scenarios, db)
    if not coverage.num_answerable:
        raise UsageError(
            f"{db} contains none of the source emails of the questions in {train.source}.",
            "Use the database they were made from (--db) or other questions (--questions).",
        )
    notes = list(dict.fromkeys((*train.notes, *val.notes)))
    if coverage.answerable < 1:
        share = f"{coverage.num_answerable} of {coverage.num_questions}"
        notes.append(f"the database can answer only {share} training questions; the others' source emails are missing")
    prints = database, fingerprint([*train.scenarios, *chosen])
    return RunData(train.scenarios, chosen, confirm, questions.source, notes, *prints)
