"""The checkpoint registry: plain directories, found by scanning them.

A run directory (``outputs/grpo_masked``, ``outputs/grpo_masked-2``, …) holds ``best_model/``, ``final/`` and
``checkpoint-N/``. Each is filled under a hidden name next to its own, gets ``metadata.json`` last, and is then renamed,
so a directory with its final name is complete. Replacing one takes two renames, with both copies complete in between:

    .best_model.incoming  filled, metadata.json written
    best_model            → .best_model.outgoing
    .best_model.incoming  → best_model
    .best_model.outgoing  removed

``recover`` completes or undoes what a crash left; readers need not wait for it, since they check all three names.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePath
from typing import Annotated, Any, Final

from pydantic import StringConstraints, TypeAdapter, ValidationError, with_config

from emailrl.base.disk import naming, replace_bytes, sync
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.records import finite

SCHEMA_VERSION = 1
METADATA = "metadata.json"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # PEFT's files of an adapter
MOST_CONFIG_BYTES = 1 << 20
DAMAGED = "It is damaged; choose another."
STATUS = "status.json"  # In a run: how far it is, and how it ended (``runs/log.py``)
CONFIRMED = "confirmed.json"  # In a run: its best model's accuracy on validation questions that did not select it
MODES = ("masked", "rollout", "simple")
SFT = "sft"  # Takes the place of the mode in the name of a supervised fine-tuning run
MOST_METADATA_BYTES = 16 << 20
_KIND_ORDER = {"best": 0, "sft": 0, "checkpoint": 1, "final": 2}
_REMEDY = "Use another checkpoint: emailrl checkpoints list."
_BEST = ("best", SFT)
_CHECKPOINT_NAME = re.compile(r"best_model|final|checkpoint-\d+")


@with_config(defer_build=True)
@dataclass(frozen=True, slots=True)
class Metadata:
    """The content of ``metadata.json``: a checkpoint's origin and the hash of each of its files."""

    run_id: Annotated[str, StringConstraints(pattern=r"^[\w-]+$")]  # It names a folder of TENSORBOARD_DIR
    kind: str  # ``checkpoint``, ``best``, ``final``, or ``sft`` for the result of supervised fine-tuning
    step: int
    mode: str
    algorithm: str
    base_model: str
    lora: dict[str, Any]
    metrics: dict[str, Any]  # ``accuracy``, ``reward`` and other metrics last measured
    settings: dict[str, dict[str, Any]]  # Without its secrets
    parent: str | None
    """Where the run's weights began: ``run_id:step``, another adapter's path and sha256, or None for the base model."""
    seed: int
    versions: dict[str, str]
    database_fingerprint: str
    questions_fingerprint: str
    git_commit: str | None
    resumed_from: str | None = None  # The checkpoint last resumed from, as ``run_id:step``; None if it never was
    created_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="microseconds"))
    files: dict[str, str] = field(default_factory=dict)  # SHA-256 by relative name
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
    """The checkpoint in ``path``; its files are present but not hashed (``verify`` does that). Raises UsageError if the
    path is not a checkpoint, EmailRLError if it is a damaged one."""
    if not path.is_dir():
        raise UsageError(f"No checkpoint at {path}.", "Name a folder of: emailrl checkpoints list", "no-checkpoint")
    if not (path / METADATA).is_file():
        inside = ", ".join(checkpoint.path.name for checkpoint in list_checkpoints(path))
        hint = f"It is a run; name one of its checkpoints: {inside}." if inside else ""
        raise UsageError(f"{path} has no {METADATA}.", hint or f"The checkpoint is incomplete. {_REMEDY}")
    file = path / METADATA
    try:
        with file.open("rb") as stream:
            content = stream.read(MOST_METADATA_BYTES + 1)
        if len(content) > MOST_METADATA_BYTES:
            raise ValueError("it is too large")
        metadata = _METADATA.validate_json(content, strict=True)
        if absent := [item.name for item in fields(Metadata) if item.name not in json.loads(content)]:
            raise ValueError(f"{absent[0]} is missing")
        created = datetime.fromisoformat(metadata.created_at)
        if created.tzinfo is None or created.year == datetime.max.year:
            raise ValueError(f"created_at is {metadata.created_at}")
        for name in ("accuracy", "reward", "evaluated_step"):
            if not isinstance(metadata.metrics.get(name), int | float | None):
                raise ValueError(f"metrics.{name} is not a number")
        for name in metadata.files:
            if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
                raise ValueError(f"the file {name} is outside the checkpoint")
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error)
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False)[0]
            reason = ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
        raise EmailRLError(f"{file} cannot be read ({reason}).", _REMEDY) from None
    if metadata.schema_version != SCHEMA_VERSION:
        said = f"{path} has schema version {metadata.schema_version}; this emailrl reads {SCHEMA_VERSION}."
        raise EmailRLError(said, "Use the version of emailrl that wrote it.")
    if missing := [name for name in metadata.files if not (path / name).is_file()]:
        raise EmailRLError(f"{path} is missing {', '.join(missing)}.", _REMEDY)
    return Checkpoint(path, metadata)


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return an adapter's ``adapter_config.json``; EmailRLError if it is not a JSON object of reasonable size."""
    path = folder / CONFIG
    try:
        with path.open("rb") as file:
            content = file.read(MOST_CONFIG_BYTES + 1)
        config = json.loads(content) if len(content) <= MOST_CONFIG_BYTES else None
    except OSError as error:
        raise EmailRLError(f"{folder} is not an adapter: {CONFIG}: {error.strerror}.", DAMAGED) from None
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise EmailRLError(f"{path} is not readable as JSON.", DAMAGED)
    return config


def verify(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint if all its files have the hashes in ``metadata.json``; EmailRLError otherwise."""
    for name, expected in checkpoint.metadata.files.items():
        if (found := sha256_of(checkpoint.path / name)) != expected:
            what = f"is damaged (sha256 {found[:12]}…, {METADATA} says {expected[:12]}…)."
            raise EmailRLError(f"{checkpoint.path / name} {what}", _REMEDY)
    return checkpoint


def damage_of(path: Path) -> str | None:
    """What is wrong with the checkpoint in a folder, by its files and their hashes; None if it is whole or missing."""
    try:
        if path.exists():
            verify(read_checkpoint(path))
    except EmailRLError as error:
        return error.message
    return None


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def list_checkpoints(run_dir: Path) -> list[Checkpoint]:
    """A run's complete checkpoints by step; within a step ``best_model``, ``checkpoint-N``, ``final``."""
    return sorted(_read_all(run_dir)[0], key=lambda item: (item.metadata.step, _KIND_ORDER.get(item.metadata.kind, 1)))


def incomplete_checkpoints(run_dir: Path) -> dict[Path, str]:
    """Directories that look like checkpoints but are incomplete, each with the reason."""
    return _read_all(run_dir)[1]


def _read_all(run_dir: Path) -> tuple[list[Checkpoint], dict[Path, str]]:
    """Whatever has a checkpoint's name, also the hidden one of a checkpoint that is being replaced."""
    entries = run_dir.iterdir() if run_dir.is_dir() else ()
    names = {re.sub(r"^\.(.+)\.(incoming|outgoing)$", r"\1", entry.name) for entry in entries}
    complete, damaged = list[Checkpoint](), dict[Path, str]()
    for path in (_standing(run_dir / name) for name in sorted(filter(_CHECKPOINT_NAME.fullmatch, names))):
        try:
            complete.append(read_checkpoint(path))
        except EmailRLError as error:
            damaged[path] = error.message
    return complete, damaged


def _hidden(path: Path) -> tuple[Path, Path]:
    """A checkpoint's names while it is written, and while it is replaced."""
    return path.with_name(f".{path.name}.incoming"), path.with_name(f".{path.name}.outgoing")


def _standing(path: Path) -> Path:
    return next((each for each in (path, *_hidden(path)) if (each / METADATA).is_file()), path)


def run_root(output_dir: Path, mode: str) -> Path:
    """The directory of a mode's runs: ``output_dir`` with ``_<mode>`` appended unless it ends in the mode."""
    if output_dir.name in ("", ".."):
        return output_dir / mode
    if re.search(rf"(^|[_-]){mode}$", output_dir.name):
        return output_dir
    return output_dir.with_name(f"{output_dir.name}_{mode}")


def run_folders(output_dir: Path, mode: str | None = None) -> list[Path]:
    """The run folders of OUTPUT_DIR by number, of one mode or all; some may have no checkpoint."""
    roots = {run_root(output_dir, each) for each in ([mode] if mode else (*MODES, SFT))} | {output_dir}
    found = {
        (int(numbered[1] or 1), entry.name, entry)
        for root in roots
        if root.name and root.parent.is_dir()
        for entry in root.parent.iterdir()
        if (numbered := re.fullmatch(re.escape(root.name) + r"(?:-(\d+))?", entry.name)) and entry.is_dir()
    }
    return [entry for _, _, entry in sorted(found)]


def find_runs(
    output_dir: Path, mode: str | None = None, *, but: str | None = None, which: str = "latest"
) -> list[Path]:
    """The runs of OUTPUT_DIR with a checkpoint (``best``: with a ``best_model``), the last written last."""
    written = {
        run: max(checkpoint.created for checkpoint in checkpoints)
        for run in run_folders(output_dir, mode)
        if (checkpoints := list_checkpoints(run)) and checkpoints[-1].metadata.mode != but
        if which != "best" or any(each.metadata.kind in _BEST for each in checkpoints)
    }
    return sorted(written, key=written.__getitem__)  # those of one time stay in the order they were begun


def created_after(runs: Iterable[Path]) -> str:
    """The time for a new checkpoint, in ISO form: now, or just after the latest of ``runs`` on a late clock."""
    before = [checkpoint.created + timedelta(microseconds=1) for run in runs for checkpoint in list_checkpoints(run)]
    return max([datetime.now(UTC), *before]).astimezone(UTC).isoformat(timespec="microseconds")


def find_checkpoint(which: str | Path, output_dir: Path, mode: str | None = None) -> Checkpoint:
    """The checkpoint at a path, or of OUTPUT_DIR ``best``, the ``best_model`` of the newest run that has one, or
    ``latest``, the checkpoint of any kind with the highest step in the newest run; with hashes checked."""
    if which not in ("best", "latest"):
        return verify(read_checkpoint(Path(which)))
    return verify(checkpoint_of(newest_run(output_dir, mode, which=str(which)), str(which)))


def newest_run(output_dir: Path, mode: str | None = None, *, but: str | None = None, which: str = "latest") -> Path:
    """The last of ``find_runs``; UsageError if there is none."""
    if runs := find_runs(output_dir, mode, but=but, which=which):
        return runs[-1]
    what, hint = "checkpoint", "Train first (emailrl train), or pass a checkpoint's path."
    if find_runs(output_dir, mode, but=but):
        what, hint = "best_model", "Use latest, or a checkpoint's path."
    raise UsageError(f"No {f'{mode} run' if mode else 'run'} has a {what} (output folder: {output_dir}).", hint)


def runs_without_best(output_dir: Path, mode: str | None = None) -> list[Path]:
    """The runs that ``best`` passes over: those with a checkpoint that are newer than the newest best."""
    runs, bests = find_runs(output_dir, mode), find_runs(output_dir, mode, which="best")
    return runs[runs.index(bests[-1]) + 1 :] if bests else runs


def checkpoint_of(run: Path, which: str) -> Checkpoint:
    """A run's ``best`` or ``latest`` checkpoint with hashes unchecked; UsageError if it has none."""
    checkpoints = [each for each in list_checkpoints(run) if which != "best" or each.metadata.kind in _BEST]
    if not checkpoints:
        name = "best_model" if which == "best" else "checkpoint"
        raise UsageError(f"{run} has no {name}.", "Use latest, or a checkpoint's path.")
    return checkpoints[-1]


def write_checkpoint(path: Path, metadata: Metadata, fill: Callable[[Path], None]) -> Checkpoint:
    """Write or replace the checkpoint at ``path`` with the files that ``fill`` writes into the given directory; a crash
    at any moment leaves a complete one, old or new."""
    _settle(path)
    incoming, outgoing = _hidden(path)
    incoming.mkdir(parents=True)
    with naming(path):
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
    """Complete or undo a replacement that a crash interrupted; called by the run's own process before it writes."""
    for name in sorted({hidden.name[1:].rsplit(".", 1)[0] for hidden in run_dir.glob(".*.*ing")}):
        _settle(run_dir / name)
    for leftover in run_dir.glob(".*.trash"):
        _delete(leftover)


def _settle(path: Path) -> None:
    if not path.exists() and (standing := _standing(path)) != path:
        standing.rename(path)
    for hidden in _hidden(path):
        _delete(hidden)


def prunable(run_dir: Path, keep: int) -> list[Path]:
    """All but the last ``keep`` of a run's ``checkpoint-N``, the oldest first."""
    numbered = [item.path for item in list_checkpoints(run_dir) if item.metadata.kind == "checkpoint"]
    return numbered[: max(len(numbered) - keep, 0)]


def remove_checkpoints(paths: Iterable[Path]) -> None:
    """Remove checkpoints, each atomically, so that none is ever seen partly removed."""
    for path in paths:
        trash = path.with_name(f".{path.name}.trash")
        _delete(trash)
        path.rename(trash)
        _delete(trash)


def _delete(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The part of ``confirmed.json`` that describes the accuracy, with its 95% interval."""

    step: int
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    num_questions: int


def confirmed_of(checkpoint: Checkpoint) -> Confirmed | None:
    """The measurement that the checkpoint's run made of its weights, if any; EmailRLError for a damaged file."""
    file = checkpoint.path.absolute().parent / CONFIRMED
    if not file.is_file():
        return None
    try:
        found = TypeAdapter(Confirmed).validate_json(file.read_bytes())
    except (ValidationError, OSError):
        raise EmailRLError(f"{file} is damaged.", "Restore it, or remove it.") from None
    return found if found.step == checkpoint.metadata.step else None
