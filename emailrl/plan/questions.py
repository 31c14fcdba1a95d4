"""The questions a planned run would find in its question file."""

from __future__ import annotations

from emailrl.scenarios import Split, load_scenario_set
from emailrl.scenarios.beside import questions_file
from emailrl.scenarios.load import check_exists
from emailrl.settings import Settings
from emailrl.store import database_fingerprint


def limit_to_questions(settings: Settings) -> tuple[Settings, list[str]]:
    """Lower the numbers of training and validation questions to those in the question file.

    If neither a file nor a database is named and there are no questions by default, the settings stay as they are, and
    the second value is a note that says so. Raises UsageError or EmailRLError for a named file or database that is
    missing, and for questions or a database that training would refuse.
    """
    data = settings.data
    check_exists(data.questions)
    if "db" in settings.store.model_fields_set:
        database_fingerprint(settings.store.db)
    file = data.questions or questions_file(settings.store.db)
    if not file.exists():
        return settings, [f"no question file at {file}: assuming {data.train_dataset_size:,} training questions"]
    limits: dict[Split, int] = {"train": data.train_dataset_size, "val": data.eval_dataset_size}
    found = {
        split: len(load_scenario_set(file, split, limit=limit, seed=settings.training.seed, data=data).scenarios)
        for split, limit in limits.items()
    }
    sizes = {"train_dataset_size": found["train"], "eval_dataset_size": found["val"]}
    return settings.model_copy(update={"data": data.model_copy(update=sizes)}), []
