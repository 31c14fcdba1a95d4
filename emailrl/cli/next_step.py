"""The command to suggest once a database has questions: a benchmark of a model that can answer them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from emailrl.cli.output import print_next

if TYPE_CHECKING:
    from emailrl.settings import Settings

ON_A_GPU = "Qwen/Qwen3-0.6B"
"""The smallest model that the documents use on a GPU."""


def suggest_benchmark(settings: Settings, options: Sequence[str] = ()) -> None:
    """Print the benchmark of the settings' database with ``options``.

    The model is that of the settings, if they name one; otherwise nano for demo email and smol for any other.
    """
    from emailrl.policy.resolve import NANO
    from emailrl.policy.smol_base import SMOL
    from emailrl.scenarios.demo import has_only_demo_email

    model, comment = [], ""
    if "name" not in settings.model.model_fields_set:
        is_demo = has_only_demo_email(settings.store.db)
        model = ["--model", NANO if is_demo else SMOL]
        comment = "" if is_demo else f"on a GPU: --model {ON_A_GPU}"
    print_next(["benchmark", *model, "--db", str(settings.store.db), *options], comment)
