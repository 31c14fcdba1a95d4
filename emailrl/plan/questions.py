"""The questions a planned run would find in its question file."""

from __future__ import annotations

from emailrl.scenarios import Split, load_scenario_set
from emailrl.scenarios.beside import questions_file
from emailrl.settings import Settings


def limit_to_questions(settings: Settings) -> tuple[Settings, list[str]]:
    """Lower the numbers of training and validation questions to those in the question file.

    Without a local file the settings stay as they are, and the second value is a note that says so. Raises UsageError
    for a file that training would refuse.
    """
    data = settings.data
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
