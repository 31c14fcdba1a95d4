"""The questions a planned run would find in its question file."""

from __future__ import annotations

from emailrl.questions import read_questions
from emailrl.questions.beside import questions_file
from emailrl.settings import Settings


def limit_to_questions(settings: Settings) -> tuple[Settings, float, list[str]]:
    """Lower the numbers of training and validation questions to those in the question file.

    The second value is the number of other validation questions, on which the best model is measured again, relative to
    those of an evaluation. Without a local file there are enough of all, and the third value is a note that says so.
    Raises UsageError for a file that training would refuse.
    """
    data = settings.data
    file = data.questions or questions_file(settings.store.db)
    if not file.exists():
        return settings, 1.0, [f"no question file at {file}: assuming {data.train_dataset_size:,} training questions"]
    found, seed = read_questions(file, data), settings.training.seed
    num_train, num_val = (len(found.of(split, limit=None, seed=seed).scenarios) for split in ("train", "val"))
    sizes = {
        "train_dataset_size": min(num_train, data.train_dataset_size),
        "eval_dataset_size": min(num_val, data.eval_dataset_size),
    }
    confirmed = min(num_val / max(sizes["eval_dataset_size"], 1) - 1, 1.0)
    return settings.model_copy(update={"data": data.model_copy(update=sizes)}), confirmed, []
