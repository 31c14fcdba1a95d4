"""What a run starts from, and what a resumed one must have in common with its checkpoint.

Only the weights are taken from an adapter's folder, no optimizer or counters. The run adopts its rank, alpha, dropout
and target modules.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from emailrl.base.errors import UsageError
from emailrl.checkpoints import METADATA, SFT, Checkpoint, read_checkpoint, sha256_of
from emailrl.mail.connection import HOW_DATABASES_CHANGE
from emailrl.model.resolve import WEIGHTS, find_adapter, same_base
from emailrl.settings import PolicySettings, Settings
from emailrl.settings.names import changed

_Group = TypeVar("_Group", bound=PolicySettings)
Changes = dict[tuple[str, str], tuple[Any, Any]]  # Recorded and current value by section and name.

_OR_NEW_RUN: Final = "or start a new run without --resume."
_IRRELEVANT: Final = ("resume", "output_dir")
_NOT_OF_TRAINING: Final = ("output_field", "test_set_size")
"""Settings of questions that do not affect which ones a run trains and validates on."""


@dataclass(frozen=True, slots=True)
class Start:
    """What a run starts or resumes from."""

    settings: Settings  # With the base model of the adapter or checkpoint, if none was named.
    adapter: Path | None = None  # None is a new adapter.
    parent: str | None = None  # `run_id:step` of the weights' checkpoint; for any other folder, its path and sha256.
    notes: list[str] = field(default_factory=list)


def find_start(settings: Settings, checkpoint: Checkpoint | None = None) -> Start:
    """Start from ``checkpoint``, else from ``settings.training.adapter``, after checking its recorded hashes.

    The settings returned name the reference policy: a checkpoint's own if it is ``auto``. Raises UsageError if it is
    not an adapter, EmailRLError if it is damaged.
    """
    wanted, adapter, notes = settings.algorithm, settings.training.adapter, []
    if wanted.reference == "auto":  # without a KL nothing is kept to measure it to
        own = "start" if adapter is not None and wanted.beta else "base"
        named = own if checkpoint is None else checkpoint.metadata.settings.get("algorithm", {}).get("reference", own)
        settings = changed(settings, reference=named)
    if checkpoint is not None:
        path, parent = checkpoint.path, checkpoint.metadata.parent
        base, why = checkpoint.metadata.base_model, "as in the checkpoint"
    elif adapter is not None:
        found = find_adapter(adapter, settings.output.output_dir)
        path, base, why = found.path, found.base_model, "the adapter's base"
        parent = _recorded(path) or f"{path.resolve()} sha256:{sha256_of(path / WEIGHTS)}"
        notes.append(f"starting from the weights of {parent}")
    else:
        return Start(settings, parent=_recorded(Path(settings.model.name)))
    if "name" not in settings.model.model_fields_set:
        settings = settings.with_model(base)
        notes.append(f"no model given: using {base}, {why}")
    return Start(settings, path, parent, notes)


def _recorded(folder: Path) -> str | None:
    """``run_id:step`` of the checkpoint or export in a folder; None for any other."""
    return read_checkpoint(folder).reference if (folder / METADATA).is_file() else None


def with_lora(settings: _Group, lora: dict[str, Any]) -> _Group:
    """The settings with the rank, alpha, dropout and target modules of a loaded adapter (``Policy.lora``)."""
    own = {f"lora_{name}": lora[name] for name in ("rank", "alpha", "dropout")}
    return changed(settings, **own, target_modules=",".join(lora["target_modules"]))


def check_agrees(
    checkpoint: Checkpoint, settings: Settings, mode: str, *,
    database: str, questions: str, source: str, fixed: Collection[str] = (),
) -> list[str]:  # fmt: skip
    """Differences from the checkpoint's settings, for the log.

    ``database`` and ``questions`` are fingerprints, ``source`` names the questions. Raises UsageError, naming the
    cause, if the run cannot continue: another base model, mode, adapter, LoRA shape, database or set of questions, or
    another value of a ``fixed`` setting.
    """
    before, path = checkpoint.metadata, checkpoint.path
    if before.base_model and not same_base(before.base_model, settings.model.name):
        raise UsageError(
            f"{path} was trained from {before.base_model}, not from {settings.model.name}.",
            f"Resume with --model {before.base_model}.",
        )
    if before.mode != mode:
        hint = f"Resume with --mode {before.mode}."
        if before.mode == SFT:
            hint = f"Continue it with emailrl sft, or start a run from it: --adapter {path}, without --resume."
        raise UsageError(f"{path} is from mode {before.mode}.", hint)
    adapter, recorded = settings.training.adapter, before.settings.get("training", {}).get("adapter")
    if adapter is not None and str(adapter) != recorded:
        raise UsageError(
            f"A resumed run has its own weights and was not started from {adapter}.",
            "Drop --adapter, or start a new run without --resume.",
        )
    changes: Changes = {  # the checkpoint's adapter has its own LoRA settings
        (section, name): (old, new)
        for section, values in settings.public().items()
        for name, new in values.items()
        if (old := before.settings.get(section, {}).get(name, new)) != new
        and name not in _IRRELEVANT
        and (section != "lora" or name in settings.lora.model_fields_set)
    }
    if before.database_fingerprint != database:
        now, (old, _) = settings.store.db, changes.get(("store", "db"), (None, None))
        if old is not None:
            problem = f"{path} was trained on the database {old}, not on {now}."
            raise UsageError(problem, f"Resume with --db {old}, {_OR_NEW_RUN}")
        problem = f"The database {now} has changed since {path} was trained on it."
        raise UsageError(problem, f"{HOW_DATABASES_CHANGE} Resume with that, {_OR_NEW_RUN}")
    for (section, name), (old, new) in changes.items():
        if section == "lora" or name in fixed:
            raise UsageError(f"{path} has {name} {old}, not {new}.", f"Resume with {name.upper()}={old}.")
    if before.questions_fingerprint != questions:  # by settings, the file, or a version of emailrl that draws others
        others = [
            f"{name.upper()} was {old}, now {new}"
            for (section, name), (old, new) in changes.items()
            if name == "seed" or (section == "data" and name not in _NOT_OF_TRAINING)
        ]
        if others:
            problem = f"{path} was trained on other questions: {'; '.join(others)}."
            raise UsageError(problem, f"Resume with the old values, {_OR_NEW_RUN}")
        commit = "" if before.git_commit is None else f", commit {before.git_commit[:12]}"
        version = f"emailrl {before.versions.get('emailrl')}{commit}"
        problem = f"{path} was trained on other questions than {source} now gives."
        raise UsageError(problem, f"Resume with the old file and the version that wrote it ({version}), {_OR_NEW_RUN}")
    return [f"changed since the checkpoint: {name} {old} -> {new}" for (_, name), (old, new) in changes.items()]
