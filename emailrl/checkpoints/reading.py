"""Reads checkpoints from disk: their ``metadata.json``, and what is missing or damaged."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from emailrl.base.errors import EmailRLError, UsageError

SCHEMA_VERSION = 1
METADATA = "metadata.json"
MOST_METADATA_BYTES = 16 << 20
_KIND_ORDER = {"best": 0, "sft": 0, "checkpoint": 1, "final": 2}
_REMEDY = "Use another checkpoint: emailrl checkpoints list."
_CHECKPOINT_NAME = re.compile(r"best_model|final|checkpoint-\d+")


@dataclass(frozen=True, slots=True)
class Metadata:
    """The content of ``metadata.json``: a checkpoint's origin and the hash of each of its files."""

    run_id: str
    kind: str
    """``checkpoint``, ``best``, ``final``, or ``sft`` for the result of supervised fine-tuning."""
    step: int
    mode: str
    algorithm: str
    base_model: str
    lora: dict[str, Any]
    metrics: dict[str, Any]
    """``accuracy``, ``reward`` and other metrics last measured."""
    settings: dict[str, dict[str, Any]]
    """The settings tree without its secrets."""
    parent: str | None
    """Origin of the run's weights: ``run_id:step`` of a checkpoint, or path and sha256 of another adapter.

    None for a run started from the base model. Resuming a run does not change it.
    """
    seed: int
    versions: dict[str, str]
    database_fingerprint: str
    questions_fingerprint: str
    git_commit: str | None
    resumed_from: str | None = None
    """The checkpoint from which the run was last resumed, as ``run_id:step``; None if it never was."""
    created_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="microseconds"))
    files: dict[str, str] = field(default_factory=dict)
    """SHA-256 by relative name."""
    schema_version: int = SCHEMA_VERSION

    @property
    def untrained(self) -> str | None:
        """What the weights of step 0 are, as the end of a sentence about the checkpoint; None for later steps."""
        if self.step:
            return None
        return f"has the weights of {self.parent or self.base_model}, unchanged (step 0)"


_METADATA: Final = TypeAdapter(Metadata)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    metadata: Metadata

    @property
    def reference(self) -> str:
        """``run_id:step``, as in another run's ``parent`` and ``resumed_from``."""
        return f"{self.metadata.run_id}:{self.metadata.step}"

    @property
    def created(self) -> datetime:
        """Time of writing, by the writer's clock or later (``created_after``)."""
        return datetime.fromisoformat(self.metadata.created_at)


def read_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint in ``path``; its files are present but not hashed (``verify`` does that).

    Raises UsageError if the path is not a checkpoint, EmailRLError if it is a damaged one.
    """
    if not path.is_dir():
        raise UsageError(f"No checkpoint at {path}.", "See: emailrl checkpoints list", "no-checkpoint")
    if not (path / METADATA).is_file():
        inside = ", ".join(checkpoint.path.name for checkpoint in list_checkpoints(path))
        hint = (
            f"It is a run; name one of its checkpoints: {inside}."
            if inside
            else f"The checkpoint is incomplete. {_REMEDY}"
        )
        raise UsageError(f"{path} has no {METADATA}.", hint)
    metadata = _read_metadata(path / METADATA)
    missing = [name for name in metadata.files if not (path / name).is_file()]
    if missing:
        raise EmailRLError(f"{path} is missing {', '.join(missing)}.", _REMEDY)
    return Checkpoint(path, metadata)


def _read_metadata(file: Path) -> Metadata:
    """The file's metadata with all types checked."""
    try:
        with file.open("rb") as stream:
            content = stream.read(MOST_METADATA_BYTES + 1)
        if len(content) > MOST_METADATA_BYTES:
            raise ValueError("it is too large")
        metadata = _METADATA.validate_json(content, strict=True)
        absent = [item.name for item in fields(Metadata) if item.name not in json.loads(content)]
        _check_values(metadata)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        if first["type"] != "missing":
            reason = f"{where}: {first['msg']}" if where else first["msg"]
            raise EmailRLError(f"{file} cannot be read ({reason}).", _REMEDY) from None
        absent = [where]
    except (OSError, ValueError, RecursionError) as error:
        raise EmailRLError(f"{file} cannot be read ({error}).", _REMEDY) from None
    if absent:
        raise EmailRLError(f"{file} is missing {absent[0]!r}.", _REMEDY)
    if metadata.schema_version != SCHEMA_VERSION:
        raise EmailRLError(
            f"{file.parent} has schema version {metadata.schema_version}; this emailrl reads {SCHEMA_VERSION}.",
            "Use the version of emailrl that wrote it.",
        )
    return metadata


def _check_values(metadata: Metadata) -> None:
    """Raise ValueError for values of the right type that are invalid."""
    created = datetime.fromisoformat(metadata.created_at)
    if created.tzinfo is None or created.year == datetime.max.year:
        raise ValueError(f"created_at is {metadata.created_at}")
    for name in ("accuracy", "reward", "evaluated_step"):
        if not isinstance(metadata.metrics.get(name), int | float | None):
            raise ValueError(f"metrics.{name} is not a number")
    if not re.fullmatch(r"[\w-]+", metadata.run_id):  # it names a folder of TENSORBOARD_DIR
        raise ValueError(f"run_id is {metadata.run_id:.40}")
    for name in metadata.files:
        if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
            raise ValueError(f"the file {name} is outside the checkpoint")


def verify(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint if all its files have the hashes in ``metadata.json``; EmailRLError otherwise."""
    for name, expected in checkpoint.metadata.files.items():
        if (found := sha256_of(checkpoint.path / name)) != expected:
            raise EmailRLError(
                f"{checkpoint.path / name} is damaged (sha256 {found[:12]}…, {METADATA} says {expected[:12]}…).",
                _REMEDY,
            )
    return checkpoint


def damage_of(path: Path) -> str | None:
    """What is wrong with the checkpoint in a folder, by its files and their hashes; None if it is whole or missing."""
    if not path.exists():
        return None
    try:
        verify(read_checkpoint(path))
    except EmailRLError as error:
        return error.message
    return None


def sha256_of(path: Path) -> str:
    """Return the file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def list_checkpoints(run_dir: Path) -> list[Checkpoint]:
    """Return a run's complete checkpoints by step; within a step ``best_model``, ``checkpoint-N``, ``final``."""
    found = []
    for name in sorted(_checkpoint_names(run_dir)):
        try:
            found.append(read_checkpoint(standing_of(run_dir / name)))
        except EmailRLError:
            continue  # not whole: incomplete_checkpoints names it
    return sorted(found, key=lambda item: (item.metadata.step, _KIND_ORDER.get(item.metadata.kind, 1)))


def incomplete_checkpoints(run_dir: Path) -> dict[Path, str]:
    """Return directories that look like checkpoints but are incomplete, each with the reason."""
    reasons = {}
    for name in sorted(_checkpoint_names(run_dir)):
        path = standing_of(run_dir / name)
        try:
            read_checkpoint(path)
        except EmailRLError as error:
            reasons[path] = error.message
    return reasons


def _checkpoint_names(run_dir: Path) -> set[str]:
    if not run_dir.is_dir():
        return set()
    names = (re.sub(r"^\.(.+)\.(incoming|outgoing)$", r"\1", entry.name) for entry in run_dir.iterdir())
    return {name for name in names if _CHECKPOINT_NAME.fullmatch(name)}


def standing_of(path: Path) -> Path:
    """Return the current place of a checkpoint by its name, even while it is being replaced."""
    for candidate in (path, incoming_of(path), outgoing_of(path)):
        if (candidate / METADATA).is_file():
            return candidate
    return path


def incoming_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.incoming")


def outgoing_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.outgoing")
