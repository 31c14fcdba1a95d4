"""The mail-search task for TRL's trainers (``environment_factory``), without importing TRL::

    trainer = GRPOTrainer(model, train_dataset=rows("train"), environment_factory=MailSearch, args=...)

The settings are those of the folder and the environment. TRL answers a call with an unknown name or argument itself,
and goes on."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from emailrl.integrations.mail_search import MailSearch, prompt, scenarios
from emailrl.questions.load import Split

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["MailSearch", "rows"]


def rows(split: Split | None = "train", limit: int | None = None) -> Dataset:
    """The questions of a split as a dataset: a prompt, and what ``MailSearch.reset`` takes."""
    from datasets import Dataset

    return Dataset.from_list([{"prompt": prompt(one)} | asdict(one) for one in scenarios(split, limit)])
