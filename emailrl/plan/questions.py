"""The questions a planned run would find in its question file."""

from __future__ import annotations

from emailrl.scenarios import read_questions
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
    found, seed = read_questions(file, data), settings.training.seed
    num_train, num_val = (len(found.of(split, limit=None, seed=seed).scenarios) for split in ("train", "val"))
    sizes = {
        "train_dataset_size": min(num_train, data.train_dataset_size),
        "eval_dataset_size": min(num_val, data.eval_dataset_size),
    }
    return settings.model_copy(update={"data": data.model_copy(update=sizes)}), []
