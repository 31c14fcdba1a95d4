"""The next command to suggest: one line each, with the options for data and task that the folder does not set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from emailrl.cli.inputs import TASK
from emailrl.cli.output import print_next

if TYPE_CHECKING:
    from emailrl.settings import PlayingSettings, Settings

SHARED = "--allow-shared-inbox"


def suggest_benchmark(settings: PlayingSettings, questions: Path) -> None:
    """Print the benchmark of these questions: of the settings' model, else of nano on demo mail and smol on other."""
    from emailrl.questions.beside import has_only_demo_email, questions_file

    db, model = settings.store.db, []
    if "name" not in settings.model.model_fields_set:
        model = ["--model", "nano"] if has_only_demo_email(db) else ["--model", "smol", "--limit", "40"]
    named = [] if questions == questions_file(db) else ["--questions", str(questions)]
    print_next(["benchmark", *model, "--db", str(db), *named])


def suggest(command: Sequence[str], settings: Settings, bare: Settings) -> None:
    """Print a command with options for data, environment and reward where the settings differ from ``bare`` ones."""
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
    print_next([*command, *options])
