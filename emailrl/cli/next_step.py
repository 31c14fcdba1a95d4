"""The next command to suggest, complete enough to run as printed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.cli.inputs import TASK
from emailrl.cli.output import print_next

if TYPE_CHECKING:
    from emailrl.records.trajectory import Scenario
    from emailrl.settings import Settings

ON_A_GPU = "Qwen/Qwen3-0.6B"
"""The smallest model that the documents use on a GPU."""
SHARED = "--allow-shared-inbox"
FEW = 40
"""Questions of a suggested benchmark on a CPU, which take smol about ten minutes."""


def suggest_benchmark(settings: Settings, questions: Path, scenarios: Sequence[Scenario]) -> None:
    """Print the benchmark of the settings' database, unless none of its questions is for testing.

    ``scenarios`` are those of the file ``questions``. The model is that of the settings, if they name one; otherwise
    nano for demo email and smol for any other.
    """
    from emailrl.model.resolve import NANO
    from emailrl.model.smol_base import SMOL
    from emailrl.questions.beside import has_only_demo_email, questions_file
    from emailrl.questions.splits import shared_inboxes

    if not any(scenario.split in (None, "test") for scenario in scenarios):
        return
    model, comment = [], ""
    if "name" not in settings.model.model_fields_set:
        is_demo = has_only_demo_email(settings.store.db)
        model = ["--model", NANO if is_demo else SMOL]
        comment = "" if is_demo else f"{_missing(settings)}on a GPU: --model {ON_A_GPU}"
    named = [] if questions == questions_file(settings.store.db) else ["--questions", str(questions)]
    shared = [SHARED] if shared_inboxes(scenarios) and not all(each.shares_inbox for each in scenarios) else []
    if SMOL in model and sum(scenario.split in (None, "test") for scenario in scenarios) > FEW:
        model += ["--limit", str(FEW)]
    print_next(["benchmark", *model, "--db", str(settings.store.db), *named, *shared], comment)


def suggest_train(start: Sequence[str], settings: Settings, bare: Settings) -> None:
    """Print the training that begins with ``start``, with options where its data or task differ from ``bare``."""
    print_next(["train", *start, *_options(settings, bare)])


def suggest_measuring(run: Path, settings: Settings, bare: Settings) -> None:
    """Print the benchmark of a finished run's best model, or of its last one if no evaluation selected one.

    If the best model is the untrained start, the last one is measured too.

    Options are added where the run's data, environment or reward differ from the ``bare`` settings. Nothing is printed
    if the questions have none for testing.
    """
    from emailrl.questions import load_scenario_set

    try:
        load_scenario_set(None, "test", limit=1, seed=settings.training.seed, data=settings.data)
    except UsageError:
        return
    named = [word for path in _to_measure(run) for word in ("--checkpoint", str(path))]
    print_next(["benchmark", *named, *_options(settings, bare)])


def _to_measure(run: Path) -> list[Path]:
    from emailrl.checkpoints import list_checkpoints

    root = run.absolute()
    run = root.relative_to(Path.cwd()) if root.is_relative_to(Path.cwd()) else run
    if not (run / "best_model").is_dir():
        return [run / "final"]
    steps = {item.metadata.kind: item.metadata.step for item in list_checkpoints(run)}
    best = [run / "best_model"]
    return [*best, run / "final"] if steps.get("best") == 0 < steps.get("final", 0) else best


def suggest_asking(options: Sequence[str], settings: Settings) -> None:
    """Print ``ask`` with the model of ``options``, if the settings' database has a single mailbox to ask."""
    from emailrl.questions.inbox.owners import find_inbox

    if not settings.store.db.is_file():
        return
    with suppress(EmailRLError):
        find_inbox(settings.store.db, None)
        print_next(["ask", *options])


def _missing(settings: Settings) -> str:
    """How to install ``smol``, if it is not on this machine."""
    from emailrl.model.smol_base import INSTALL, SMOL, is_at_hand

    with suppress(UsageError):  # a wrong SMOL_BASE, which the suggested command explains
        return "" if is_at_hand(SMOL, settings.model.smol_base) else f"without the hub, first: {INSTALL}; "
    return ""


def _options(settings: Settings, bare: Settings) -> list[str]:
    """The options that give data, environment and reward of the settings where they differ from the ``bare`` ones."""
    from emailrl.questions.beside import questions_file

    db, questions = settings.store.db, settings.data.questions
    options = [] if db == bare.store.db else ["--db", str(db)]
    if questions not in (None, bare.data.questions, questions_file(db)):
        options += ["--questions", str(questions)]
    if settings.data.allow_shared_inbox and not bare.data.allow_shared_inbox:
        options.append(SHARED)
    now, before = settings.public(), bare.public()  # a reward server's password is not printed
    for option, (section, name) in TASK.items():
        if now[section][name] != before[section][name]:
            options += [option, str(now[section][name])]
    return options
