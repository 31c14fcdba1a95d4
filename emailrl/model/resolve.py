"""Finds what a name means: a packaged policy, a model's folder or the hub; an adapter in a run, an export or any PEFT
folder."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emailrl import checkpoints
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.checkpoints import CONFIG, DAMAGED, WEIGHTS, read_adapter_config
from emailrl.model.smol_base import SMOL, SMOL_BASE, smol_folder
from emailrl.settings import AgentSettings

NANO = "nano"
NANO_DIR = Path(__file__).parent / "nano"
PACKAGED = (NANO, SMOL, SMOL_BASE)  # names of models that are the same in every installation
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HINT = "Use nano, smol or smol-base, a model folder, or a hub name such as Qwen/Qwen3-0.6B."


def resolve_model(name: str, smol_base: Path | None = None) -> str | Path:
    """Find the model: packaged names and folders give a Path, a hub name is returned as is. Only ``smol`` and
    ``smol-base`` take time: their base (the setting ``smol_base``, or as ``smol_folder`` finds it) is converted, once.
    Raises UsageError for a name that cannot be a model, with the nearest that can."""
    if name == NANO:
        if not (NANO_DIR / "config.json").is_file():
            raise EmailRLError("The packaged policy nano is missing.", "Reinstall emailrl, or use another --model.")
        return NANO_DIR
    if name in (SMOL, SMOL_BASE):
        return smol_folder(name, smol_base)
    folder = Path(os.path.expanduser(name))
    if name and folder.is_dir():
        # transformers would put an adapter beside a config.json on the model by itself, unchecked.
        if (folder / CONFIG).exists():
            hint = "Name its base model with --model, and the adapter with --checkpoint or --adapter."
            raise UsageError(f"The folder {folder} is an adapter, not a model.", hint)
        if not (folder / "config.json").is_file():
            raise UsageError(f"The folder {folder} has no config.json.", _HINT)
        return folder.resolve()
    if not _HUB_NAME.fullmatch(name):
        raise UsageError(f"No such model: {name} is neither a folder nor a hub name.", _HINT)
    if "/" not in name and (close := difflib.get_close_matches(name.lower(), PACKAGED, n=1, cutoff=0.7)):
        raise UsageError(f"Unknown model '{name}'.", f"Did you mean {close[0]}? {_HINT}")
    return name


def base_name(name: str) -> str:
    """Return a portable name of a base model: packaged and hub names as they are, a folder's absolute path."""
    folder = Path(os.path.expanduser(name))
    return str(folder.resolve()) if name not in PACKAGED and folder.is_dir() else name


def same_base(left: str, right: str) -> bool:
    """Whether two names mean the same base model; the packaged folder's own path counts as ``nano``."""
    packaged = {str(NANO_DIR.resolve()): NANO}
    first, second = (packaged.get(full, full) for full in (base_name(left), base_name(right)))
    return first == second


def with_token_limit(agent: AgentSettings, model: Any) -> AgentSettings:
    """Return the settings for sampling ``model``: MAX_TOKENS, unless set, is limited to its ``max_new_tokens``.
    Otherwise a small model that does not stop would write until its context is full, delaying all others."""
    own = getattr(getattr(model, "generation_config", None), "max_new_tokens", None)
    if "max_tokens" in agent.model_fields_set or own is None or own >= agent.max_tokens:
        return agent
    return agent.model_copy(update={"max_tokens": own})


def read_chat_template(path: Path) -> str:
    """The text of a chat template file; raises UsageError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The chat template {path} cannot be read: {error}.", "Fix CHAT_TEMPLATE.") from error


@dataclass(frozen=True, slots=True)
class Adapter:
    """A folder with a LoRA adapter, the base model it was trained on and the run it comes from."""

    path: Path
    base_model: str
    run_id: str = ""  # empty if unknown

    @classmethod
    def of(cls, checkpoint: checkpoints.Checkpoint) -> Adapter:
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
        raise EmailRLError(f"{folder / CONFIG} names no base model.", DAMAGED)
    return base


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
