"""Where trajectories lie: the newest file of a run or folder, new lines as they come, what training noted of them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emailrl.checkpoints import list_checkpoints
from emailrl.errors import EmailRLError, UsageError
from emailrl.inspection.tokens import TokenTexts
from emailrl.policy.resolve import resolve_model
from emailrl.recording import numbered_records, trajectory_from_dict
from emailrl.trajectory import Trajectory

_HEAD_BYTES = 4096
"""Enough of a first line to tell a trajectory from a metric or a question."""


@dataclass(frozen=True, slots=True)
class TrainingNote:
    """What training added to a trajectory, from ``training/step-NNNNNN.jsonl``."""

    advantage: float | None = None
    """Of all its trained tokens; None where they have their own, or it never reached an update."""
    dropped: str | None = None
    """Why its group or samples were left out, where the record says so."""
    token_advantages: tuple[tuple[float | None, ...], ...] = ()
    """Of each training sequence, where tokens have advantages of their own (PPO, whitening, a KL in the reward); None
    for a token that was not trained."""


def find_file(path: Path) -> Path:
    """Return the trajectory file that ``path`` means: itself, or the newest one anywhere under a folder.

    Raises ``UsageError`` where there is none.
    """
    if existing(path).is_file():
        return path
    newest = newest_file([path])
    if newest is None:
        raise UsageError(f"No trajectory file under {path}.", "Runs keep theirs in trajectories/*.jsonl.")
    return newest


def existing(path: Path) -> Path:
    """Return ``path``; raises ``UsageError`` where nothing is there."""
    if not path.exists():
        raise UsageError(f"No such file or folder: {path}.", "Give a trajectory file (.jsonl) or a run's folder.")
    return path


def output_roots(output_dir: Path) -> list[Path]:
    """Return the folders that commands run bare write trajectories to: runs, rollouts and benchmarks."""
    parent = output_dir.parent
    return [*sorted(parent.glob(f"{output_dir.name}*")), parent / "rollouts", parent / "benchmarks"]


def newest_file(roots: Iterable[Path]) -> Path | None:
    """Return the trajectory file written last among and under ``roots``, or None; other JSONL is passed over."""
    files = [file for root in roots for file in ([root] if root.is_file() else root.rglob("*.jsonl"))]
    by_age = sorted(files, key=lambda file: (file.stat().st_mtime_ns, file.name), reverse=True)
    return next(filter(_holds_trajectories, by_age), None)


def _holds_trajectories(file: Path) -> bool:
    with file.open("rb") as stream:
        head = stream.read(_HEAD_BYTES)
    return head.startswith(b"{") and b'"group_id"' in head and b'"scenario"' in head


def pick(file: Path, index: int) -> tuple[int, int, Trajectory]:
    """Return ``(position, count, trajectory)`` for ``index`` of a file (0 the first, -1 the last)."""
    records = list(numbered_records(file))
    if not records:
        raise UsageError(f"{file} holds no complete trajectory yet.", "Wait for the run, or name another file.")
    position = index if index >= 0 else len(records) + index
    if not 0 <= position < len(records):
        raise UsageError(f"{file} holds {len(records)} trajectories; there is no --index {index}.", "Count from 0.")
    return position, len(records), build(file, *records[position])


def torn_line(file: Path) -> int | None:
    """Return the number of a last line that lacks its newline (still being written, or cut off), or None."""
    content = file.read_bytes()
    return None if not content or content.endswith(b"\n") else content.count(b"\n") + 1


def build(file: Path, line: int, record: dict[str, Any]) -> Trajectory:
    """Make a trajectory of one line's object; ``EmailRLError`` names file and line where it is not one."""
    try:
        return trajectory_from_dict(record)
    except KeyError as error:
        raise EmailRLError(f"{file}, line {line}: not a trajectory, {error.args[0]!r} is missing.") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise EmailRLError(f"{file}, line {line}: not a trajectory ({error}).") from None


def follow(roots: Sequence[Path], *, poll_seconds: float = 0.5) -> Iterator[tuple[Path, int, Trajectory]]:
    """Yield ``(file, position, trajectory)`` as lines are appended, for ever; newer files under a folder are taken up.

    Starts at the last whole line there is, or waits for the first file. A line without its newline is waited for too.
    """
    file = newest_file(roots)
    offset, position = (0, 0) if file is None else _before_last_line(file)
    while True:
        if file is not None:
            with file.open("rb") as stream:
                stream.seek(offset)
                for line in stream:
                    if not line.endswith(b"\n"):
                        break
                    offset += len(line)
                    yield file, position, build(file, position + 1, _object(file, position + 1, line))
                    position += 1
        newest = newest_file(roots)
        if newest == file:
            time.sleep(poll_seconds)
        else:
            file, offset, position = newest, 0, 0


def _before_last_line(file: Path) -> tuple[int, int]:
    """Byte offset and number (from 0) of the last line that ends in a newline."""
    lines = file.read_bytes().splitlines(keepends=True)
    complete = [line for line in lines if line.endswith(b"\n")]
    return (sum(map(len, complete[:-1])), len(complete) - 1) if complete else (0, 0)


def _object(file: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise EmailRLError(f"{file}, line {number}: not JSON ({error}).") from None
    if not isinstance(record, dict):
        raise EmailRLError(f"{file}, line {number}: expected a JSON object, found {type(record).__name__}.")
    return record


def training_note(file: Path, trajectory: Trajectory) -> TrainingNote | None:
    """Return what training recorded under the trajectory's id, or None where no training record stands beside it."""
    record_file = file.parent.parent / "training" / file.name
    if not record_file.is_file():
        return None
    for _, record in numbered_records(record_file):
        if record.get("id") == trajectory.id:
            return TrainingNote(record.get("advantage"), record.get("dropped"), _token_advantages(record))
    return None


def _token_advantages(record: dict[str, Any]) -> tuple[tuple[float | None, ...], ...]:
    """Each training sequence's advantages by token; nothing where all tokens have the same."""
    return tuple(tuple(sample["advantages"]) for sample in record.get("samples", []) if "advantages" in sample)


def origin(file: Path, trajectory: Trajectory) -> str | None:
    """Return what made a trajectory where that was no step of training: a benchmark, an evaluation or a rollout."""
    results = file.parent.parent / "results.json"
    if file.parent.name == "trajectories" and results.is_file():
        return f"benchmark of {_measured(results, file.name) or trajectory.policy_version or 'an unnamed model'}"
    if file.name.startswith("eval-"):
        return f"evaluation at step {trajectory.step}"
    if file.name.startswith("confirm-"):
        return f"best_model, from step {trajectory.step}, on held-out validation questions"
    return None if file.name.startswith("step-") else "rollout"


def _measured(results: Path, name: str) -> str | None:
    """The model whose trajectories a benchmark wrote to the file of a name; None where its results do not say."""
    try:
        records = json.loads(results.read_bytes())["results"]
        return next((str(each["model"]) for each in records if Path(each["trajectories"]).name == name), None)
    except (ValueError, KeyError, TypeError):
        return None  # another program's results.json


def fitting_tokenizer(folders: Iterable[Path], trajectory: Trajectory) -> TokenTexts | None:
    """Return the first folder's tokenizer that decodes the recorded ids to the recorded texts, or None."""
    for folder in folders:
        if (folder / "tokenizer.json").is_file():
            tokens = TokenTexts.load(folder)
            if tokens.fits(trajectory):
                return tokens
    return None


def tokenizer_folders(file: Path, model_name: str) -> Iterator[Path]:
    """Yield the folders that may hold the tokenizer behind ``file``, likeliest first.

    The checkpoints of its run come first, then the base model they name, then ``model_name``, the one now set.
    """
    run_dir = file.parent.parent if file.parent.name == "trajectories" else file.parent
    checkpoints = list_checkpoints(run_dir)
    yield from (checkpoint.path for checkpoint in checkpoints)
    for name in dict.fromkeys([*(checkpoint.metadata.base_model for checkpoint in checkpoints), model_name]):
        folder = _model_folder(name)
        if folder is not None:
            yield folder


def _model_folder(name: str) -> Path | None:
    """Where a model's files lie on this machine (packaged, local, in the hub's cache); the network is not asked."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = resolve_model(name)
    except EmailRLError:
        return None  # a folder that is gone: its ids are shown as ids, and the view says so
    if isinstance(found, Path):
        return found
    cached = try_to_load_from_cache(found, "tokenizer.json")
    return Path(cached).parent if isinstance(cached, str) else None
