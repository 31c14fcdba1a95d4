"""A run's questions, and digests of what else it learns from, so that a resumed run says what has changed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from emailrl.base.custom import CustomPart, imported_files, is_path, load_part
from emailrl.base.errors import UsageError
from emailrl.mail import database_fingerprint
from emailrl.model.resolve import resolve_model
from emailrl.questions import fingerprint, missing_ids, read_questions
from emailrl.records.trajectory import Scenario
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


@dataclass
class RunData:
    """A run's questions and their fingerprint."""

    train: list[Scenario]
    val: list[Scenario]
    source: str
    """The file, folder or hub name of the questions."""
    notes: list[str]
    database_fingerprint: str
    questions_fingerprint: str
    confirm: list[Scenario] = field(default_factory=list)
    """Other validation questions, unused for selection: they measure the best model without selection bias."""
    sources: Digests = field(default_factory=dict)
    """Of what else the run learns from."""


def load_data(settings: Settings) -> RunData:
    """The training and validation questions, and fingerprints of them and the database.

    Raises UsageError for bad files, and if the database holds no question's source emails.
    """
    data, seed = settings.data, settings.training.seed
    database = database_fingerprint(settings.store.db)
    questions, num_val = read_questions(None, data), data.eval_dataset_size
    train = questions.of("train", limit=data.train_dataset_size, seed=seed)
    val = questions.of("val", limit=2 * num_val, seed=seed)
    chosen, confirm = val.scenarios[:num_val], val.scenarios[num_val:]
    coverage = missing_ids(train.scenarios, settings.store.db)
    if not coverage.num_answerable:
        raise UsageError(
            f"{settings.store.db} contains none of the source emails of the questions in {train.source}.",
            "Use the database they were made from (--db) or other questions (--questions).",
        )
    notes = list(dict.fromkeys((*train.notes, *val.notes)))
    if coverage.answerable < 1:
        share = f"{coverage.num_answerable} of {coverage.num_questions}"
        notes.append(f"the database can answer only {share} training questions; the others' source emails are missing")
    return RunData(
        train=train.scenarios,
        val=chosen,
        source=questions.source,
        notes=notes,
        database_fingerprint=database,
        questions_fingerprint=fingerprint([*train.scenarios, *chosen]),
        confirm=confirm,
        sources=digests_of(settings),
    )
