"""Resolves a model's name: a packaged policy, a folder, or the hub."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Any

from emailrl.base.errors import EmailRLError, UsageError
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
        if (folder / "adapter_config.json").exists():
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
    if name in PACKAGED:
        return name
    folder = Path(os.path.expanduser(name))
    return str(folder.resolve()) if folder.is_dir() else name


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
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"The chat template {path} cannot be read: {reason}.", "Fix CHAT_TEMPLATE.") from error
