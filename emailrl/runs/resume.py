"""What a run starts from: which run and checkpoint ``--resume`` means, what going back to it removes, and what the two
must have in common. Of an adapter's folder only weights, rank, alpha, dropout and target modules are taken."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from emailrl import checkpoints
from emailrl.base.disk import LOCK
from emailrl.base.errors import UsageError
from emailrl.base.plain import counted
from emailrl.checkpoints import METADATA, SFT, WEIGHTS, Checkpoint, damage_of, list_checkpoints, read_checkpoint
from emailrl.mail.database import HOW_DATABASES_CHANGE
from emailrl.model.resolve import find_adapter, same_base, with_own_settings
from emailrl.records import read_records
from emailrl.runs.folder import STATE_FILE, held, remove_records
from emailrl.runs.run import State, versions
from emailrl.settings import Settings
from emailrl.settings.names import changed

GO_BACK: Final = "Add --overwrite to do so, or copy the run first to keep both."
Changes = dict[tuple[str, str], tuple[Any, Any]]  # Recorded and current value by section and name.

_OR_NEW_RUN: Final = "or start a new run without --resume."
_IRRELEVANT: Final = ("resume", "output_dir")
_NOT_OF_TRAINING: Final = ("output_field", "test_set_size")  # Of the settings of questions.


def run_to_resume(resume: str, output_dir: Path, mode: str, *, any_mode: bool = False) -> Path | None:
    """The directory of the run that ``resume`` means; None if ``auto`` finds none. ``auto`` is the run of ``mode``
    begun last if it died before its first checkpoint, else the newest with one, as for ``latest`` and ``best``
    (``any_mode``: of all modes but sft); a path is that of a run or of a checkpoint."""
    but, searched = (SFT, None) if any_mode else (None, mode)
    if resume == "auto":
        begun = [run for run in checkpoints.run_folders(output_dir, mode) if (run / LOCK).exists()]
        vain = begun[-1] if begun and _is_vain(begun[-1]) else None
        since = (vain / LOCK).stat().st_mtime if vain else 0.0
        runs = checkpoints.find_runs(output_dir, searched, but=but)
        later = [run for run in runs if list_checkpoints(run)[-1].created.timestamp() > since]
        return later[-1] if later else vain
    if resume in ("latest", "best"):
        return checkpoints.newest_run(output_dir, searched, but=but, which=resume)
    path = Path(resume)
    return path if list_checkpoints(path) else read_checkpoint(path).path.parent


def _is_vain(run: Path) -> bool:
    """Whether a run has no checkpoint to resume, damaged or intact; a first one, half-written, has no name yet."""
    only_products = all(item.metadata.kind == SFT for item in list_checkpoints(run))
    return only_products and not any(path.exists() for path in checkpoints.incomplete_checkpoints(run))


def _resumable(run: Path) -> list[Checkpoint]:
    """A run's checkpoints with a trainer state, by step; what sft has made has none."""
    return [item for item in list_checkpoints(run) if STATE_FILE in item.metadata.files]


def checkpoint_to_resume(directory: Path, resume: str) -> Checkpoint | None:
    """The run's checkpoint that ``resume`` means, hashes unchecked; None if the run died before its first."""
    if resume == "auto" and _is_vain(directory):
        return None
    path = Path(resume)
    if resume in ("auto", "latest", "best") or path == directory:
        found = [item for item in _resumable(directory) if resume != "best" or item.metadata.kind == "best"]
        if not found:
            raise UsageError(f"{directory} has no checkpoint to resume from.", "Start a run without --resume.")
        return found[-1]
    return read_checkpoint(path)


def loss_of_going_back(directory: Path, checkpoint: Checkpoint) -> str | None:
    """What resuming from this checkpoint removes; None if ``latest`` would resume from the same step."""
    step = checkpoint.metadata.step
    later = {item.path: item.metadata.step for item in _resumable(directory) if item.metadata.step > step}
    if not (damaged := _damaged_after(directory, step)) and not later:
        return None
    last = max([*_recorded_steps(directory), *later.values(), *map(_step_in_name, damaged)])
    names = ", ".join(path.name for path in (*later, *damaged))
    steps = f"step {last}" if last == step + 1 else f"steps {step + 1} to {last}"
    loss = f"Resuming from step {step} removes later work in {directory}: {steps}, {names}."
    return " ".join([*damaged.values(), loss])


def _damaged_after(directory: Path, step: int) -> dict[Path, str]:
    """A run's damaged ``checkpoint-N`` of steps after this one, each with what is wrong."""
    damaged = checkpoints.incomplete_checkpoints(directory).items()
    return {path: why for path, why in damaged if path.exists() and _step_in_name(path) > step}


def _step_in_name(path: Path) -> int:
    digits = path.name.removeprefix("checkpoint-")
    return int(digits) if digits.isdecimal() else 0


def _recorded_steps(directory: Path) -> set[int]:
    path = directory / "metrics.jsonl"
    steps = [record.get("step") for record in read_records(path)] if path.exists() else []
    return {step for step in steps if isinstance(step, int)}


@contextmanager
def resumed(
    resume: str, directory: Path, *, overwrite: bool = False, remedy: str = GO_BACK
) -> Iterator[Checkpoint | None]:
    """Lock the run in ``directory``, and only then choose its checkpoint that ``resume`` means; None as above. Raises
    UsageError, with ``remedy``, if later work would be lost without ``overwrite``."""
    with held(directory, "--resume"):
        checkpoint = checkpoint_to_resume(directory, resume)
        if checkpoint is not None and not (checkpoints.verify(checkpoint).path / STATE_FILE).is_file():
            remedy = "Resume from a checkpoint-N that emailrl wrote."
            raise UsageError(f"{checkpoint.path} has no trainer state.", remedy)
        if checkpoint and not overwrite and (loss := loss_of_going_back(directory, checkpoint)):
            raise UsageError(loss, remedy)
        yield checkpoint


@dataclass(frozen=True, slots=True)
class Start:
    """What a run starts or resumes from."""

    settings: Settings  # With the base model of the adapter or checkpoint, if none was named.
    adapter: Path | None = None  # None is a new adapter.
    parent: str | None = None  # `run_id:step` of the weights' checkpoint; for any other folder, its path and sha256.
    notes: list[str] = field(default_factory=list)


def find_start(settings: Settings, checkpoint: Checkpoint | None = None) -> Start:
    """Start from ``checkpoint``, else from ``settings.training.adapter``, after checking its recorded hashes. The
    settings returned name the reference policy: a checkpoint's own if it is ``auto``."""
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
        parent = _recorded(path) or f"{path.resolve()} sha256:{checkpoints.sha256_of(path / WEIGHTS)}"
        notes.append(f"starting from the weights of {parent}")
        settings, others = with_own_settings(settings, path, given_wins=True)
        notes += [f"the adapter was trained with {other}" for other in others]
    else:
        settings, others = with_own_settings(settings, settings.model.name, given_wins=True)
        notes += [f"the model was trained with {other}" for other in others]
        return Start(settings, parent=_recorded(Path(settings.model.name)), notes=notes)
    if "name" not in settings.model.model_fields_set:
        settings = settings.with_model(base)
        notes.append(f"no model given: using {base}, {why}")
    return Start(settings, path, parent, notes)


def _recorded(folder: Path) -> str | None:
    """``run_id:step`` of the checkpoint or export in a folder; None for any other."""
    return read_checkpoint(folder).reference if (folder / METADATA).is_file() else None


def with_lora(settings: Settings, lora: dict[str, Any]) -> Settings:
    """The settings with the rank, alpha, dropout and target modules of a loaded adapter (``Policy.lora``)."""
    own = {f"lora_{name}": lora[name] for name in ("rank", "alpha", "dropout")}
    return changed(settings, **own, target_modules=",".join(lora["target_modules"]))


def check_agrees(
    checkpoint: Checkpoint, settings: Settings, mode: str, *,
    database: str, questions: str, source: str, fixed: Collection[str] = (), teacher: str | None = None,
) -> list[str]:  # fmt: skip
    """Differences from the checkpoint's settings, for the log. ``database``, ``questions`` and ``teacher`` are
    fingerprints, ``source`` names the questions. Raises UsageError, naming the cause, for another base model, mode,
    adapter, LoRA shape, database, set of questions or ``fixed`` setting."""
    before, path = checkpoint.metadata, checkpoint.path
    if before.base_model and not same_base(before.base_model, settings.model.name):
        problem = f"{path} was trained from {before.base_model}, not from {settings.model.name}."
        raise UsageError(problem, f"Resume with --model {before.base_model}.")
    if before.mode != mode:
        hint = f"Resume with --mode {before.mode}."
        if before.mode == SFT:
            hint = f"Continue it with emailrl sft, or start a run from it: --adapter {path}, without --resume."
        raise UsageError(f"{path} is from mode {before.mode}.", hint)
    adapter, recorded = settings.training.adapter, before.settings.get("training", {}).get("adapter")
    if adapter is not None and str(adapter) != recorded:
        problem = f"A resumed run has its own weights and was not started from {adapter}."
        raise UsageError(problem, "Drop --adapter, or start a new run without --resume.")
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
    was, own = before.versions, versions(settings)
    own |= {"teacher": teacher} if teacher else {}
    edited = [use for use in ("reward", "environment", "teacher") if was.get(use) not in (None, own.get(use))]
    notes = [f"{name} {old} -> {new}" for (_, name), (old, new) in changes.items()]
    notes += [f"the content of {use.upper()}" for use in edited]
    return [f"changed since the checkpoint: {note}" for note in notes]


def nothing_left(directory: Path, step: int, reason: str, notes: list[str]) -> str:
    """The result of resuming a run that has ended; what the ``notes`` of ``check_agrees`` name has no effect."""
    vain = "".join(f" Without effect, {note}." for note in notes)
    return f"Nothing left to do in {directory}: it ended after step {step}, {reason}.{vain}"


def rewind(run_dir: Path, state: State) -> list[str]:
    """Remove records beyond the state's step, so that no step appears twice; return notes on what was removed.
    ``metrics.jsonl`` and ``evaluations.jsonl`` are truncated by their writers. A later or damaged ``best_model`` is
    replaced by the checkpoint of the best step if that still exists. Otherwise a later one stays until a better one is
    found, a damaged one until the next evaluation, as ``state`` then has no best. A damaged ``final`` is removed."""
    checkpoints.recover(run_dir)
    said, final, best = [], run_dir / "final", run_dir / "best_model"
    gone: dict[Path, str] = {}
    if why := damage_of(final):
        gone[final] = f"which is damaged and will be written again at the end: {why}"
    missing = state.best_step is not None and not best.exists()
    if why := "its folder does not exist" if missing else damage_of(best):
        problem = "missing" if missing else "damaged"
        if _restored(best, state):
            said.append(f"best_model, which was {problem}, is restored from the checkpoint of its step: {why}")
        else:
            said.append(f"best_model is {problem}, and only a later evaluation selects another: {why}")
            state.forget_best()
    remove_records(run_dir, after=state.step)
    for item in list_checkpoints(run_dir):
        later = item.metadata.step > state.step
        if later and item.metadata.kind != "best":
            gone[item.path] = f"which is after step {state.step}"
        elif later and damage_of(item.path) is None:
            kept = f"is from the later step {item.metadata.step}; it stays until a better one"
            said.append(f"best_model {f'restored to step {state.best_step}' if _restored(item.path, state) else kept}")
    gone |= {path: f"which is damaged: {why}" for path, why in _damaged_after(run_dir, state.step).items()}
    checkpoints.remove_checkpoints(gone)
    return [*said, *(f"removed {path.name}, {why}" for path, why in gone.items())]


def lost_metrics(run_dir: Path, step: int) -> list[str]:
    """A note that names the steps up to ``step`` without a line in ``metrics.jsonl``, if any."""
    if not (lost := sorted({*range(1, step + 1)} - _recorded_steps(run_dir))):
        return []
    named = ", ".join(map(str, lost[:10])) + (", ..." if len(lost) > 10 else "")
    told = f"{run_dir / 'metrics.jsonl'} has no line of {counted(len(lost), 'step')} ({named})"
    return [f"{told}; curves and reports lack their numbers"]


def _restored(best: Path, state: State) -> bool:
    """Replace ``best_model`` by an intact checkpoint of the best step; False if there is none."""
    others = (item for item in list_checkpoints(best.parent) if item.path != best)
    found = (item for item in others if item.metadata.step == state.best_step and damage_of(item.path) is None)
    if (source := next(found, None)) is None:
        return False

    def fill(directory: Path) -> None:
        for name in source.metadata.files:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source.path / name, directory / name)

    checkpoints.write_checkpoint(best, replace(source.metadata, kind="best"), fill)
    return True
