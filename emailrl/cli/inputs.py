"""A command's input files: chosen if not named, and checked before anything slow is loaded; and the next command."""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

from emailrl.base.errors import UsageError
from emailrl.base.plain import cut
from emailrl.cli.output import print_next, say, warn

if TYPE_CHECKING:
    from pydantic import SecretStr

    from emailrl.measure.benchmark import Subject
    from emailrl.settings import PlayingSettings, Settings

TASK: Final = {
    "--environment": ("agent", "environment"), "--reward": ("rewards", "reward"),
    "--thinking": ("model", "thinking"), "--chat-template-kwargs": ("model", "chat_template_kwargs"),
}  # fmt: skip
"""The settings that decide what a policy is trained to do, and how it is told to, by option."""
SHARED: Final = "--allow-shared-inbox"
LONGEST_NAME: Final = 200  # in characters, of a name from a checkpoint's metadata, which may be a stranger's
MAX_FOLDERS: Final = 20_000  # to search for trajectories: over 1,000 runs with their checkpoints; walked in seconds


def check_searchable(place: Path | None) -> None:
    """Raise UsageError for a folder too large to search, such as a home folder."""
    if place and sum(1 for _ in islice(os.walk(place), MAX_FOLDERS + 1)) > MAX_FOLDERS:
        problem = f"{place} contains more than {MAX_FOLDERS:,} folders, too many to search for a run."
        raise UsageError(problem, "Name a run's folder, such as outputs/grpo_masked.")


def note_runs_without_best(output_dir: Path, mode: str | None = None) -> None:
    """Print a note if ``best`` passes over newer runs."""
    from emailrl.checkpoints import runs_without_best

    if runs := runs_without_best(output_dir, mode):
        say(f"Note: runs without a complete best_model are skipped: {', '.join(map(str, runs))}")


def choose_subjects(checkpoints: Sequence[str], models: Sequence[str], settings: Settings) -> list[Subject]:
    """The policies to measure, with notes printed: those named, models first, as they were before training; else the
    newest best checkpoint, else the model. Each checkpoint, or exported adapter, is verified by its hashes and loaded
    on the base model it was trained on."""
    from emailrl.checkpoints import find_runs
    from emailrl.measure.benchmark import Subject
    from emailrl.model.resolve import find_adapter

    output_dir = settings.output.output_dir
    if settings.is_chat and checkpoints:
        raise UsageError("The openai engine cannot run a checkpoint.", "Name the server's model with --model.")
    takes_best = not (checkpoints or models or settings.is_chat)
    if takes_best and find_runs(output_dir, which="best"):
        checkpoints = ["best"]
    elif not checkpoints and not models:
        models = [settings.model.name]
    found = [find_adapter(which, output_dir) for which in checkpoints]
    subjects = [Subject(name, name) for name in models]
    subjects += [Subject(str(each.path.absolute()), each.base_model, each) for each in found]
    if takes_best or "best" in checkpoints:
        note_runs_without_best(output_dir)
    note_policies([*(each.path for each in found), *models], settings)
    return list({subject.label: subject for subject in subjects}.values())


def note_policies(places: Iterable[str | Path], settings: Settings, *, asks: bool = False) -> None:
    """Print a note on each checkpoint or model that is untrained, trained in another environment or on another reward,
    or played with other settings than given (``PLAYED_WITH``); ``asks``: they answer in the mail environment,
    unrewarded."""
    from emailrl.checkpoints import METADATA, SFT, read_checkpoint
    from emailrl.model.resolve import untrained_note, with_own_settings
    from emailrl.settings.tree import PLAYED_WITH

    now = settings.public()
    for place in places:
        if others := with_own_settings(settings, place)[1]:
            say(f"Note: {place} is played with its own {'; '.join(others)}.")
        if not ((path := Path(place)) / METADATA).is_file():
            continue
        if note := untrained_note(path, settings.output.output_dir):
            warn(note)
        metadata = read_checkpoint(path).metadata
        then: dict[str, str] = {}
        for option, (section, name) in TASK.items():
            if name in PLAYED_WITH or (option == "--reward" and (asks or metadata.mode == SFT)):
                continue
            new = "mail" if asks and name == "environment" else str(now[section][name])
            old = cut(str(metadata.settings.get(section, {}).get(name, new)), LONGEST_NAME)
            if old != new:
                then[f"{option} {shlex.quote(old)}"] = f"{option} {shlex.quote(new)}"
        if then:
            here = " ".join(then.values())
            here = here.replace("--environment mail", "the mail environment") if asks else here
            say(f"Note: {path} was trained with {' '.join(then)}; this command uses {here}.")


def check_inputs(settings: Settings) -> None:
    """Raise EmailRLError for a missing database, UsageError for a missing question file."""
    from emailrl.mail.database import no_database
    from emailrl.questions.load import check_exists

    if not settings.store.db.is_file():
        raise no_database(settings.store.db)
    check_exists(settings.data.questions)


def with_inputs(settings: Settings) -> Settings:
    """Choose the questions and print the choice (``with_questions``); raises like ``check_inputs`` too."""
    from emailrl.questions.load import with_questions

    check_inputs(settings)
    data, chosen = with_questions(settings.data, settings.store.db)
    if chosen is not None:
        say(chosen)
    return settings.model_copy(update={"data": data})


def server_token(host: str, wanted: SecretStr | None) -> str | None:
    """The bearer token for a server on ``host``: that of the settings, else one that is made and printed if other
    machines can reach the server, else none."""
    from emailrl.base.http import is_this_machine

    if wanted is not None:
        return wanted.get_secret_value()
    if is_this_machine(host):
        return None
    token = secrets.token_urlsafe(24)
    say(f"Clients must send this token as their API key: {token}")
    return token


def suggest_benchmark(settings: PlayingSettings, questions: Path) -> None:
    """Print the benchmark of these questions: of the settings' model, else of nano on demo mail and smol on other."""
    from emailrl.questions.load import has_only_demo_email, questions_file

    db, model = settings.store.db, []
    if "name" not in settings.model.model_fields_set:
        model = ["--model", "nano"] if has_only_demo_email(db) else ["--model", "smol", "--limit", "40"]
    named = [] if questions == questions_file(db) else ["--questions", str(questions)]
    print_next(["benchmark", *model, "--db", str(db), *named])


def suggest(command: Sequence[str], settings: Settings, bare: Settings) -> None:
    """Print a command with options for data, environment and reward where the settings differ from ``bare`` ones."""
    from emailrl.questions.load import questions_file

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
