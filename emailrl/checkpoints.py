"""The checkpoint registry: the directories themselves, and a scan of them is the index.

A run directory (``outputs/grpo_masked``, ``outputs/grpo_masked-2``, …) holds ``best_model/``, ``final/`` and
``checkpoint-N/``. Each is filled under a hidden name beside its own, gets ``metadata.json`` last, and is then renamed;
so whatever carries its name is whole. Replacing one takes two renames, and both copies are whole in between:

    .best_model.incoming  filled, metadata.json written
    best_model            → .best_model.outgoing
    .best_model.incoming  → best_model
    .best_model.outgoing  removed

``recover`` finishes or undoes what a crash left; readers need not wait for it, they look under all three names.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from emailrl.disk import replace_bytes, sync
from emailrl.errors import EmailRLError, UsageError
from emailrl.recording import finite
from emailrl.settings import run_root

SCHEMA_VERSION = 1
METADATA = "metadata.json"
MODES = ("masked", "rollout", "simple")
_KIND_ORDER = {"best": 0, "checkpoint": 1, "final": 2}
_REMEDY = "Use another checkpoint: emailrl checkpoints list."
_CHECKPOINT_NAME = re.compile(r"best_model|final|checkpoint-\d+")


@dataclass(frozen=True, slots=True)
class Metadata:
    """What ``metadata.json`` holds: where a checkpoint comes from and the hash of each of its files."""

    run_id: str
    kind: str
    """``checkpoint``, ``best`` or ``final``."""
    step: int
    mode: str
    algorithm: str
    base_model: str
    lora: dict[str, Any]
    metrics: dict[str, Any]
    """``accuracy``, ``reward`` and whatever else was last measured."""
    settings: dict[str, Any]
    """The settings tree without its secrets."""
    parent: str | None
    """The checkpoint this run was resumed from, as ``run_id:step``; None for a run begun from the base model."""
    seed: int
    versions: dict[str, str]
    database_fingerprint: str
    questions_fingerprint: str
    git_commit: str | None
    created_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="microseconds"))
    files: dict[str, str] = field(default_factory=dict)
    """Relative name → sha256."""
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    path: Path
    metadata: Metadata


# -- reading --------------------------------------------------------------------------------------------------------


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in ``path``, its files present but not yet hashed (``verify`` does that).

    Raises UsageError where the path is no checkpoint at all, EmailRLError where it is a damaged one.
    """
    if not path.is_dir():
        raise UsageError(f"No checkpoint at {path}.", "See: emailrl checkpoints list")
    if not (path / METADATA).is_file():
        inside = ", ".join(checkpoint.path.name for checkpoint in list_checkpoints(path))
        hint = (
            f"It is a run; name one of its checkpoints: {inside}."
            if inside
            else f"It is not a whole checkpoint. {_REMEDY}"
        )
        raise UsageError(f"{path} has no {METADATA}.", hint)
    try:
        record = json.loads((path / METADATA).read_text("utf-8"))
        metadata = Metadata(**{item.name: record[item.name] for item in fields(Metadata)})
    except KeyError as error:
        raise EmailRLError(f"{path / METADATA} lacks {error.args[0]!r}.", _REMEDY) from None
    except (ValueError, TypeError, RecursionError) as error:
        raise EmailRLError(f"{path / METADATA} cannot be read ({error}).", _REMEDY) from None
    if metadata.schema_version != SCHEMA_VERSION:
        raise EmailRLError(
            f"{path} has schema version {metadata.schema_version}; this emailrl reads {SCHEMA_VERSION}.",
            "Use the emailrl that wrote it.",
        )
    missing = [name for name in metadata.files if not (path / name).is_file()]
    if missing:
        raise EmailRLError(f"{path} lacks {', '.join(missing)}.", _REMEDY)
    return Checkpoint(path, metadata)


def verify(checkpoint: Checkpoint) -> Checkpoint:
    """The same checkpoint, once each of its files has the hash that ``metadata.json`` says; EmailRLError otherwise."""
    for name, expected in checkpoint.metadata.files.items():
        if (found := sha256_of(checkpoint.path / name)) != expected:
            raise EmailRLError(
                f"{checkpoint.path / name} is damaged (sha256 {found[:12]}…, {METADATA} says {expected[:12]}…).",
                _REMEDY,
            )
    return checkpoint


def sha256_of(path: Path) -> str:
    """The file's sha256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def list_checkpoints(run_dir: Path) -> list[Checkpoint]:
    """The whole checkpoints of a run by step; of one step, ``best_model`` before ``checkpoint-N`` before ``final``."""
    found = []
    for name in sorted(_checkpoint_names(run_dir)):
        try:
            found.append(read_checkpoint(_standing(run_dir / name)))
        except EmailRLError:
            continue  # not whole: incomplete_checkpoints names it
    return sorted(found, key=lambda item: (item.metadata.step, _KIND_ORDER.get(item.metadata.kind, 1)))


def incomplete_checkpoints(run_dir: Path) -> dict[Path, str]:
    """Directories that look like checkpoints but are not whole, each with the reason."""
    reasons = {}
    for name in sorted(_checkpoint_names(run_dir)):
        path = _standing(run_dir / name)
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


def _standing(path: Path) -> Path:
    """Where the checkpoint of this name stands, also in the middle of being replaced."""
    for candidate in (path, _incoming(path), _outgoing(path)):
        if (candidate / METADATA).is_file():
            return candidate
    return path


# -- finding --------------------------------------------------------------------------------------------------------


def find_runs(output_dir: Path, mode: str | None = None) -> list[Path]:
    """The runs under OUTPUT_DIR that hold a checkpoint, of one mode or of all; the one last written to comes last."""
    roots = {run_root(output_dir, each) for each in ([mode] if mode else MODES)} | {output_dir}
    written = {}
    for root in roots:
        numbered = re.compile(re.escape(root.name) + r"(-\d+)?")
        for entry in root.parent.iterdir() if root.name and root.parent.is_dir() else ():
            if numbered.fullmatch(entry.name) and (checkpoints := list_checkpoints(entry)):
                written[entry] = max(checkpoint.metadata.created_at for checkpoint in checkpoints)
    return sorted(written, key=lambda run: (written[run], run.name))


def find_checkpoint(which: str | Path, output_dir: Path, mode: str | None = None) -> Checkpoint:
    """``best`` or ``latest`` of the newest run under OUTPUT_DIR, or the checkpoint at a path; its hashes are checked.

    ``best`` is the run's ``best_model``, ``latest`` its checkpoint with the highest step, of whatever kind.
    """
    if which not in ("best", "latest"):
        return verify(read_checkpoint(Path(which)))
    runs = find_runs(output_dir, mode)
    if not runs:
        where = run_root(output_dir, mode) if mode else output_dir
        hint = "Train first (emailrl train), or name one by its path."
        raise EmailRLError(f"No checkpoint under {where}* yet.", hint)
    checkpoints = list_checkpoints(runs[-1])
    if which == "best":
        checkpoints = [checkpoint for checkpoint in checkpoints if checkpoint.metadata.kind == "best"]
        if not checkpoints:
            raise UsageError(f"{runs[-1]} holds no best_model.", "Use latest, or a checkpoint's path.")
    return verify(checkpoints[-1])


# -- writing --------------------------------------------------------------------------------------------------------


def write_checkpoint(path: Path, metadata: Metadata, fill: Callable[[Path], None]) -> Checkpoint:
    """Make or replace the checkpoint at ``path`` with what ``fill`` puts into the directory it is given.

    ``metadata.files`` is filled in here. A crash at any moment leaves the old checkpoint or the new one, whole.
    """
    _settle(path)
    incoming, outgoing = _incoming(path), _outgoing(path)
    incoming.mkdir(parents=True)
    fill(incoming)
    names = sorted(file.relative_to(incoming).as_posix() for file in incoming.rglob("*") if file.is_file())
    for name in names:
        sync(incoming / name)
    metadata = replace(metadata, files={name: sha256_of(incoming / name) for name in names})
    text = json.dumps(finite(asdict(metadata)), indent=2, allow_nan=False)
    replace_bytes(incoming / METADATA, text.encode() + b"\n")
    sync(incoming)
    if path.exists():
        path.rename(outgoing)
    incoming.rename(path)
    sync(path.parent)
    _delete(outgoing)
    return Checkpoint(path, metadata)


def recover(run_dir: Path) -> None:
    """Finish or undo what a crash left between: the run's own process calls it before it writes."""
    for name in sorted({hidden.name[1:].rsplit(".", 1)[0] for hidden in run_dir.glob(".*.*ing")}):
        _settle(run_dir / name)
    for leftover in run_dir.glob(".*.trash"):
        shutil.rmtree(leftover)


def _settle(path: Path) -> None:
    if not path.exists() and (standing := _standing(path)) != path:
        standing.rename(path)
    _delete(_incoming(path))
    _delete(_outgoing(path))


def prune(run_dir: Path, keep: int) -> list[Path]:
    """Remove all but the last ``keep`` of the run's ``checkpoint-N``; ``best_model`` and ``final`` always stay."""
    removed = prunable(run_dir, keep)
    remove_checkpoints(removed)
    return removed


def prunable(run_dir: Path, keep: int) -> list[Path]:
    """What ``prune`` would remove, the oldest first."""
    numbered = [item.path for item in list_checkpoints(run_dir) if item.metadata.kind == "checkpoint"]
    return numbered[: max(len(numbered) - keep, 0)]


def remove_checkpoints(paths: Iterable[Path]) -> None:
    """Remove checkpoints; each vanishes in one step, so that none is ever seen half-removed."""
    for path in paths:
        trash = path.with_name(f".{path.name}.trash")
        _delete(trash)
        path.rename(trash)
        _delete(trash)


def _incoming(path: Path) -> Path:
    return path.with_name(f".{path.name}.incoming")


def _outgoing(path: Path) -> Path:
    return path.with_name(f".{path.name}.outgoing")


def _delete(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)
