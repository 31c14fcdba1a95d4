"""Digests of what a run learns from, in ``sources.json`` of each checkpoint: a resumed run says what has changed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from emailrl.custom import CustomPart, imported_files, is_path, load_part
from emailrl.policy.resolve import resolve_model
from emailrl.settings import Settings

FILE: Final = "sources.json"
PIECES, PIECE = 64, 1 << 16
"""Pieces of a large file that are read, evenly spaced, and their size in bytes."""
_OF_MODEL: Final = {".safetensors", ".bin", ".json", ".jinja", ".model", ".txt", ".py"}

Digests = dict[str, str]
"""By the name of the setting that names the source; files that a custom part imports by their path from it."""

_DIGESTS: Final = TypeAdapter(Digests)


def digests_of(settings: Settings) -> Digests:
    """Digests of the content of everything that the settings name and that a run learns from, except its questions.

    They do not depend on paths and times, so copies have the same. Of files above 4 MiB only evenly spaced pieces are
    read: a change to a few tensors or emails may go unnoticed.
    """
    reward, environment = _part(settings.rewards.reward, "reward"), _part(settings.agent.environment, "environment")
    parts = [part for part in (reward, environment) if part is not None]
    imported = {name: file for part in parts for name, file in imported_files(part).items()}
    files = [part.file for part in parts]
    found = {name: _file(file) for name, file in sorted(imported.items()) if str(file) not in files} | {
        "MODEL_NAME": _model(settings),
        "CHAT_TEMPLATE": _file(settings.model.chat_template),
        "EMAILRL_DB": _file(settings.store.db),
        "REWARD": _file_of(reward),
        "ENVIRONMENT": _file_of(environment),
    }
    return {name: digest for name, digest in found.items() if digest is not None}


def save_digests(folder: Path, digests: Digests) -> None:
    """Write them into a checkpoint's folder."""
    (folder / FILE).write_text(json.dumps(digests, indent=2) + "\n")


def changed_sources(checkpoint: Path, now: Digests) -> list[str]:
    """The names of the sources whose content differs from what the checkpoint's run learned from."""
    try:
        before = _DIGESTS.validate_json((checkpoint / FILE).read_bytes())
    except (OSError, ValidationError):  # nothing to compare with
        return []
    return [name for name, digest in now.items() if before.get(name, digest) != digest]


def _model(settings: Settings) -> str | None:
    """Of a folder its files, of a hub name its commit; None if the hub's cache does not have it."""
    model = resolve_model(settings.model.name, settings.model.smol_base)
    if isinstance(model, Path):
        return _digest(sorted(path for path in model.iterdir() if path.suffix in _OF_MODEL and path.is_file()))
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(model, "config.json")
    return Path(config).parent.name if isinstance(config, str) else None


def _part(name: str, use: str) -> CustomPart | None:
    return load_part(name, use) if is_path(name) else None


def _file_of(part: CustomPart | None) -> str | None:
    return _file(Path(part.file)) if part is not None and part.file is not None else None


def _file(path: Path | None) -> str | None:
    return None if path is None else _digest([path])


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{path.suffix} {size}\n".encode())
            if size <= PIECES * PIECE:
                digest.update(file.read())
                continue
            for piece in range(PIECES):
                file.seek((size - PIECE) * piece // (PIECES - 1))
                digest.update(file.read(PIECE))
    return digest.hexdigest()
