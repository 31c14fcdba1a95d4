"""Locates an adapter: a run's checkpoint, an exported adapter, or any PEFT folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from emailrl import checkpoints
from emailrl.base.errors import EmailRLError, UsageError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MOST_CONFIG_BYTES: Final = 1 << 20
_DAMAGED: Final = "It is damaged; choose another."


@dataclass(frozen=True, slots=True)
class Adapter:
    """A folder with a LoRA adapter, the base model it was trained on and the run it comes from."""

    path: Path
    base_model: str
    run_id: str = ""  # empty if unknown

    @classmethod
    def of(cls, checkpoint: checkpoints.Checkpoint) -> Adapter:
        """The adapter in a checkpoint."""
        return cls(checkpoint.path, checkpoint.metadata.base_model, checkpoint.metadata.run_id)


def find_adapter(which: str | Path, output_dir: Path) -> Adapter:
    """Return ``best`` or ``latest`` of the newest run, or the adapter in a folder, with its file hashes checked. The
    folder of an ``sft`` run means its ``best_model``. Files needed only to resume a run (trainer state, even
    ``metadata.json``) are optional. Raises UsageError if there is no adapter, EmailRLError if it is damaged."""
    if which in ("best", "latest"):
        path = checkpoints.find_checkpoint(which, output_dir).path
    else:
        path = Path(which)
        modes = [] if (path / CONFIG).is_file() else [one.metadata.mode for one in checkpoints.list_checkpoints(path)]
        if checkpoints.SFT in modes:
            path = checkpoints.checkpoint_of(path, "best").path
    if (path / "config.json").is_file() and not (path / CONFIG).is_file():
        raise UsageError(f"{path} is a model, not an adapter.", f"Use --model {path}.")
    if (path / CONFIG).is_file() and not (path / checkpoints.METADATA).is_file():
        return Adapter(path, read_base(path))
    found = checkpoints.find_checkpoint(path, output_dir)
    read_base(found.path)
    return Adapter.of(found)


def read_base(folder: Path) -> str:
    """Return the base model that an adapter names; UsageError if the folder has no adapter."""
    if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
        hint = "See: emailrl checkpoints list"
        raise UsageError(f"{folder} is not an adapter: {CONFIG} or {WEIGHTS} is missing.", hint)
    base = read_adapter_config(folder).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise EmailRLError(f"{folder / CONFIG} names no base model.", _DAMAGED)
    return base


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return an adapter's ``adapter_config.json``; EmailRLError if it is not a JSON object of reasonable size."""
    path = folder / CONFIG
    try:
        with path.open("rb") as file:
            content = file.read(MOST_CONFIG_BYTES + 1)
        config = json.loads(content) if len(content) <= MOST_CONFIG_BYTES else None
    except OSError as error:
        raise EmailRLError(f"{folder} is not an adapter: {CONFIG}: {error.strerror}.", _DAMAGED) from None
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise EmailRLError(f"{path} is not readable as JSON.", _DAMAGED)
    return config


def untrained_note(path: Path, output_dir: Path) -> str | None:
    """Return a note if the checkpoint in ``path`` is a run's step 0, with a more accurate ``best_model`` if any."""
    used = checkpoints.read_checkpoint(path).metadata if (path / checkpoints.METADATA).is_file() else None
    if used is None or not (said := used.untrained):
        return None
    everyone = [one for run in checkpoints.find_runs(output_dir) for one in checkpoints.list_checkpoints(run)]
    bests = [one for one in everyone if one.metadata.kind == "best" and one.metadata.step]
    reached, most = max(((one.metadata.metrics.get("accuracy") or 0.0, one.path) for one in bests), default=(0.0, path))
    if reached <= (used.metrics.get("accuracy") or 0.0):
        return f"{path} {said}."
    return f"{path} {said}; {most.parent.name} reached {reached:.1%}: --checkpoint {most}"
