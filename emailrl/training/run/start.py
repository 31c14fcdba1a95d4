"""Initial weights of a new run: a new adapter, or one trained by another run or any program.

Only the weights are taken from the adapter's folder, no optimizer or counters. The run adopts its rank, alpha, dropout
and target modules.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from emailrl.base.errors import UsageError
from emailrl.checkpoints import METADATA, Checkpoint, read_checkpoint, sha256_of
from emailrl.model.adapter import WEIGHTS, find_adapter
from emailrl.settings import Settings


@dataclass(frozen=True, slots=True)
class Start:
    """What a run starts or resumes from."""

    settings: Settings
    """With the base model of the adapter or checkpoint, if none was named."""
    adapter: Path | None = None
    """None is a new adapter."""
    parent: str | None = None
    """``run_id:step`` of the weights' checkpoint; for any other folder, its path and sha256."""
    notes: list[str] = field(default_factory=list)


def find_start(settings: Settings, checkpoint: Checkpoint | None = None) -> Start:
    """Start from ``checkpoint``, else from ``settings.training.adapter``, after checking its recorded hashes.

    The settings returned name the reference policy: a checkpoint's own if it is ``auto``. Raises UsageError if it is
    not an adapter, EmailRLError if it is damaged.
    """
    settings = _with_reference(settings, checkpoint)
    if checkpoint is not None:
        metadata = checkpoint.metadata
        settings, notes = _with_base(settings, metadata.base_model, "as in the checkpoint")
        return Start(settings, checkpoint.path, metadata.parent, notes)
    wanted = settings.training.adapter
    if wanted is None:
        return Start(settings, parent=_recorded(Path(settings.model.name)))
    found = find_adapter(wanted, settings.output.output_dir)
    parent = _recorded(found.path) or f"{found.path.resolve()} sha256:{sha256_of(found.path / WEIGHTS)}"
    settings, notes = _with_base(settings, found.base_model, "the adapter's base")
    return Start(settings, found.path, parent, [f"starting from the weights of {parent}", *notes])


def _with_reference(settings: Settings, checkpoint: Checkpoint | None) -> Settings:
    """The settings with ``reference`` resolved, if it is ``auto``; without a KL nothing is kept to measure it to."""
    wanted = settings.algorithm
    if wanted.reference != "auto":
        return settings
    own = "start" if settings.training.adapter is not None and wanted.beta else "base"
    named = own if checkpoint is None else checkpoint.metadata.settings.get("algorithm", {}).get("reference", own)
    return settings.model_copy(update={"algorithm": wanted.model_copy(update={"reference": named})})


def _with_base(settings: Settings, name: str, why: str) -> tuple[Settings, list[str]]:
    """The settings with this base model if none was named, and a note about it."""
    if "name" in settings.model.model_fields_set:
        return settings, []
    return settings.with_model(name), [f"no model given: using {name}, {why}"]


def with_lora(settings: Settings, lora: dict[str, Any]) -> Settings:
    """The settings with the rank, alpha, dropout and target modules of a loaded adapter (``Policy.lora``)."""
    own = {
        "lora_rank": lora["rank"],
        "lora_alpha": lora["alpha"],
        "lora_dropout": lora["dropout"],
        "target_modules": ",".join(lora["target_modules"]),
    }
    return settings.model_copy(update={"lora": settings.lora.model_copy(update=own)})


def check_resumed(settings: Settings, recorded: dict[str, dict[str, Any]]) -> None:
    """Raise UsageError if a resumed run is given a different adapter from the one it started from."""
    before, now = recorded.get("training", {}).get("adapter"), settings.training.adapter
    if now is not None and str(now) != before:
        raise UsageError(
            f"A resumed run has its own weights and was not started from {now}.",
            "Drop --adapter, or start a new run without --resume.",
        )


def _recorded(folder: Path) -> str | None:
    """``run_id:step`` of the checkpoint or export in a folder; None for any other."""
    if not (folder / METADATA).is_file():
        return None
    return read_checkpoint(folder).reference
