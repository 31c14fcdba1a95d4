"""What a resumed run must have in common with its checkpoint, and what has changed since."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from emailrl.base.errors import UsageError
from emailrl.checkpoints import SFT, Checkpoint, Metadata
from emailrl.mail.connection import HOW_DATABASES_CHANGE
from emailrl.model.resolve import same_base
from emailrl.questions import fingerprint, read_questions
from emailrl.records import read_trajectories
from emailrl.records.trajectory import Scenario
from emailrl.settings import Settings
from emailrl.training.run.data import RunData, changed_sources
from emailrl.training.run.start import check_resumed

Changes = dict[tuple[str, str], tuple[Any, Any]]
"""Recorded and current value by section and name."""

_OR_NEW_RUN: Final = "or start a new run without --resume."
_IRRELEVANT: Final = ("resume", "output_dir")
_NOT_OF_TRAINING: Final = ("output_field", "test_set_size")
"""Settings of questions that do not affect which ones a run trains and validates on."""


def check_agrees(checkpoint: Checkpoint, settings: Settings, data: RunData) -> list[str]:
    """Differences from the checkpoint's settings and from the content that they named, for the log.

    Raises UsageError, naming the cause, if the run cannot continue: another base model, mode, LoRA shape, database or
    set of questions.
    """
    before, path = checkpoint.metadata, checkpoint.path
    if not same_base(before.base_model, settings.model.name):
        raise UsageError(
            f"{path} was trained from {before.base_model}, not from {settings.model.name}.",
            f"Resume with --model {before.base_model}.",
        )
    if before.mode == SFT:
        raise UsageError(f"{path} is from an sft run.", f"Start a run from it: --adapter {path}, without --resume.")
    check_resumed(settings, before.settings)
    if before.mode != settings.training.mode:
        raise UsageError(f"{path} is from mode {before.mode}.", f"Resume with --mode {before.mode}.")
    changes = changed_settings(before, settings)
    if before.database_fingerprint != data.database_fingerprint:
        raise _other_database(checkpoint, settings, changes)
    if before.questions_fingerprint != data.questions_fingerprint:
        raise _other_questions(checkpoint, settings, data, changes)
    for (section, name), (old, new) in changes.items():
        if section == "lora":
            raise UsageError(f"{path} has {name} {old}, not {new}.", f"Resume with {name.upper()}={old}.")
    notes = [f"{name} {old} -> {new}" for (_, name), (old, new) in changes.items()]
    if sources := changed_sources(path, data.sources):
        notes.append(f"the content of {', '.join(sources)}")
    return notes


def changed_settings(before: Metadata, settings: Settings) -> Changes:
    """Settings that differ from the recorded ones; the checkpoint's adapter has its own LoRA settings."""
    return {
        (section, name): (old, new)
        for section, values in settings.public().items()
        for name, new in values.items()
        if (old := before.settings.get(section, {}).get(name, new)) != new
        and name not in _IRRELEVANT
        and (section != "lora" or name in settings.lora.model_fields_set)
    }


def _other_database(checkpoint: Checkpoint, settings: Settings, changes: Changes) -> UsageError:
    path, db = checkpoint.path, settings.store.db
    if ("store", "db") in changes:
        old, _ = changes["store", "db"]
        return UsageError(
            f"{path} was trained on the database {old}, not on {db}.", f"Resume with --db {old}, {_OR_NEW_RUN}"
        )
    return UsageError(
        f"The database {db} has changed since {path} was trained on it.",
        f"{HOW_DATABASES_CHANGE} Resume with that, {_OR_NEW_RUN}",
    )


def _other_questions(checkpoint: Checkpoint, settings: Settings, data: RunData, changes: Changes) -> UsageError:
    """The cause: changed settings, another sample of the same questions, or changed questions."""
    path, metadata = checkpoint.path, checkpoint.metadata
    if changed := choosing_questions(changes):
        return UsageError(
            f"{path} was trained on other questions: {'; '.join(changed)}.",
            f"Resume with the old values, {_OR_NEW_RUN}",
        )
    validated = _first_validated(path.parent)
    was_trained = fingerprint([*data.train, *validated]) == metadata.questions_fingerprint
    if was_trained and not _are_missing(validated, settings):
        return UsageError(
            f"{path} was validated on another sample of the questions in {data.source}: "
            "this version of emailrl draws different ones.",
            f"Resume with the version that wrote it ({_version(metadata)}), or start a new run from its weights: "
            f"--adapter {path}, without --resume.",
        )
    which = "validation questions" if was_trained else "questions"
    return UsageError(
        f"The {which} in {data.source} have changed since {path} was trained on them.",
        f"Resume with the old file, {_OR_NEW_RUN}",
    )


def choosing_questions(changes: Changes) -> list[str]:
    """The changed settings that determine which questions a run trains and validates on, in words."""
    return [
        f"{name.upper()} was {old}, now {new}"
        for (section, name), (old, new) in changes.items()
        if name == "seed" or (section == "data" and name not in _NOT_OF_TRAINING)
    ]


def _version(metadata: Metadata) -> str:
    version = f"emailrl {metadata.versions.get('emailrl')}"
    return version if metadata.git_commit is None else f"{version}, commit {metadata.git_commit[:12]}"


def _first_validated(run: Path) -> list[Scenario]:
    """The questions of a run's first recorded evaluation; none if it recorded none."""
    files = sorted((run / "trajectories").glob("eval-*.jsonl"))
    asked = (trajectory.scenario for trajectory in read_trajectories(files[0])) if files else ()
    return list({(scenario.id, scenario.inbox_address): scenario for scenario in asked}.values())


def _are_missing(validated: list[Scenario], settings: Settings) -> bool:
    """Whether the current question file lacks any of these validation questions."""
    found = read_questions(None, settings.data).of("val", limit=None, seed=settings.training.seed).scenarios
    return any(scenario not in found for scenario in validated)
