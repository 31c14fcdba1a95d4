"""A run's questions: for training, for selecting the best model, and for checking that selection."""

from __future__ import annotations

from dataclasses import dataclass, field

from emailrl.errors import UsageError
from emailrl.questions import fingerprint, missing_ids, read_questions
from emailrl.settings import Settings
from emailrl.store import database_fingerprint
from emailrl.training.run.sources import Digests, digests_of
from emailrl.trajectory import Scenario


@dataclass
class RunData:
    """A run's questions and their fingerprint."""

    train: list[Scenario]
    val: list[Scenario]
    source: str
    """The file, folder or hub name of the questions."""
    notes: list[str]
    database_fingerprint: str
    questions_fingerprint: str
    confirm: list[Scenario] = field(default_factory=list)
    """Other validation questions, unused for selection: they measure the best model without selection bias."""
    sources: Digests = field(default_factory=dict)
    """Of what else the run learns from."""


def load_data(settings: Settings) -> RunData:
    """The training and validation questions, and fingerprints of them and the database.

    Raises UsageError for bad files, and if the database holds no question's source emails.
    """
    data, seed = settings.data, settings.training.seed
    database = database_fingerprint(settings.store.db)
    questions, num_val = read_questions(None, data), data.eval_dataset_size
    train = questions.of("train", limit=data.train_dataset_size, seed=seed)
    val = questions.of("val", limit=2 * num_val, seed=seed)
    chosen, confirm = val.scenarios[:num_val], val.scenarios[num_val:]
    coverage = missing_ids(train.scenarios, settings.store.db)
    if not coverage.num_answerable:
        raise UsageError(
            f"{settings.store.db} contains none of the source emails of the questions in {train.source}.",
            "Use the database they were made from (--db) or other questions (--questions).",
        )
    notes = list(dict.fromkeys((*train.notes, *val.notes)))
    if coverage.answerable < 1:
        share = f"{coverage.num_answerable} of {coverage.num_questions}"
        notes.append(f"the database can answer only {share} training questions; the others' source emails are missing")
    return RunData(
        train=train.scenarios,
        val=chosen,
        source=questions.source,
        notes=notes,
        database_fingerprint=database,
        questions_fingerprint=fingerprint([*train.scenarios, *chosen]),
        confirm=confirm,
        sources=digests_of(settings),
    )
