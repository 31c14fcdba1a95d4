"""Where trajectories lie: the newest file of a run or folder, one of a file, new lines as they are written."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from emailrl.checkpoints import run_folders
from emailrl.errors import UsageError
from emailrl.recording import TrajectoryIndex, training_notes, trajectory_in_line
from emailrl.trajectory import Trajectory

_HEAD_BYTES = 4096
"""Enough of a line to tell a trajectory from a metric or a question."""
_HEAD_LINES = 20
"""Lines that are looked at, as the first may be damaged."""


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
    return [*run_folders(output_dir), parent / "rollouts", parent / "benchmarks"]


def newest_run(output_dir: Path) -> Path | None:
    """Return the run whose trajectories were written last, or None; a benchmark or rollout is no run."""
    newest = newest_file(run_folders(output_dir))
    return None if newest is None else made_in(newest)


def made_in(file: Path) -> Path:
    """Return the run or benchmark that wrote a trajectory file, or the file itself if nothing else did."""
    return file.parent.parent if file.parent.name == "trajectories" else file


def newest_file(roots: Iterable[Path]) -> Path | None:
    """Return the trajectory file written last among and under ``roots``, or None; other JSONL is passed over."""
    files = [file for root in roots for file in ([root] if root.is_file() else _jsonl_under(root))]
    by_age = sorted(((_modified(file), file.name, file) for file in files), reverse=True)
    return next((file for *_, file in by_age if _holds_trajectories(file)), None)


def _jsonl_under(root: Path) -> Iterator[Path]:
    """The JSONL files under a folder; what a run removes meanwhile is passed over."""
    for folder, _, names in os.walk(root):
        files = (Path(folder, name) for name in names if name.endswith(".jsonl"))
        yield from (file for file in files if file.is_file())


def _modified(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _holds_trajectories(file: Path) -> bool:
    """Whether one of the first lines looks like a trajectory."""
    try:
        with file.open("rb") as stream:
            heads = [line[:_HEAD_BYTES] for line in islice(stream, _HEAD_LINES)]
    except OSError:
        return False
    return any(head.startswith(b"{") and b'"group_id"' in head and b'"scenario"' in head for head in heads)


def has_numbers(folder: Path) -> bool:
    """Whether a folder holds a run's or a benchmark's numbers, be there trajectories or not."""
    files = (folder / name for name in ("metrics.jsonl", "evaluations.jsonl", "results.json"))
    return any(file.is_file() and file.stat().st_size for file in files)


def pick(index: TrajectoryIndex, position: int) -> tuple[int, Trajectory]:
    """Return ``(position, trajectory)`` for a position in a file (0 the first, -1 the last).

    Raises ``UsageError`` where there is none, ``EmailRLError`` where the line is no trajectory.
    """
    found = position_in(index, position)
    return found, trajectory_in_line(index.path, *index.record(found))


def position_in(index: TrajectoryIndex, position: int) -> int:
    """Return a position in a file counted from its start; raises ``UsageError`` where it has none such."""
    count = len(index)
    if not count:
        raise UsageError(f"{index.path} holds no complete trajectory yet.", "Wait for the run, or name another file.")
    found = position if position >= 0 else count + position
    if not 0 <= found < count:
        noun = "trajectory" if count == 1 else "trajectories"
        raise UsageError(f"{index.path} holds {count} {noun}; there is no --index {position}.", "Count from 0.")
    return found


def follow(roots: Sequence[Path], *, poll_seconds: float = 0.5) -> Iterator[tuple[TrajectoryIndex, int]]:
    """Yield ``(index, position)`` as lines are appended, for ever; newer files under a folder are taken up.

    Starts at the last whole line there is, or waits for the first file. A line without its newline is waited for too.
    """
    file = newest_file(roots)
    index = None if file is None else TrajectoryIndex(file)
    position = 0 if index is None else max(len(index) - 1, 0)
    while True:
        if index is not None and index.path.exists():
            index.refresh()
            for each in range(position, len(index)):
                yield index, each
            position = len(index)
        newest = newest_file(roots)
        if newest == file:
            time.sleep(poll_seconds)
        elif newest is not None:
            file, index, position = newest, TrajectoryIndex(newest), 0


def training_note(file: Path, trajectory: Trajectory) -> TrainingNote | None:
    """Return what training recorded under the trajectory's id, or None where no training record stands beside it."""
    note = training_notes(file)[0].get(trajectory.id)
    if note is None:
        return None
    own = tuple(tuple(sample["advantages"]) for sample in note["samples"] if "advantages" in sample)
    return TrainingNote(note["advantage"], note["dropped"], own)
