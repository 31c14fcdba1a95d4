"""Locate trajectories: the newest file of a run or folder, one line of a file, new lines, and what made a file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from emailrl.base.errors import UsageError
from emailrl.checkpoints import run_folders
from emailrl.records import TrajectoryIndex
from emailrl.records.trajectory import Trajectory

_HEAD_BYTES = 4096
"""Keys that distinguish a trajectory from a metric or a question."""
_HEAD_LINES = 20
"""Lines to check, as the first may be damaged."""


def find_file(path: Path) -> Path:
    """Return the trajectory file for ``path``: itself, or the newest one under a folder.

    Raises ``UsageError`` if there is none.
    """
    if existing(path).is_file():
        return path
    newest = newest_file([path])
    if newest is None:
        raise UsageError(f"No trajectory file under {path}.", "Runs keep theirs in trajectories/*.jsonl.")
    return newest


def existing(path: Path) -> Path:
    """Return ``path``; raises ``UsageError`` if it does not exist."""
    if not path.exists():
        raise UsageError(f"No such file or folder: {path}.", "Give a trajectory file (.jsonl) or a run's folder.")
    return path


def output_roots(output_dir: Path) -> list[Path]:
    """Return the default output folders of trajectories: runs, rollouts and benchmarks."""
    parent = output_dir.parent
    return [*run_folders(output_dir), parent / "rollouts", parent / "benchmarks"]


def newest_run(output_dir: Path) -> Path | None:
    """Return the run with the newest trajectories, or None; ignores benchmarks and rollouts."""
    newest = newest_file(run_folders(output_dir))
    return None if newest is None else made_in(newest)


def made_in(file: Path) -> Path:
    """Return the run or benchmark that wrote a trajectory file, or the file itself if nothing else did."""
    return file.parent.parent if file.parent.name == "trajectories" else file


def newest_file(roots: Iterable[Path]) -> Path | None:
    """Return the newest trajectory file among and under ``roots``, or None; skips other JSONL files.

    A run writes ``confirm-NNNNNN.jsonl`` last, though by an earlier policy: such a file counts only without others.
    """
    files = [file for root in roots for file in ([root] if root.is_file() else _jsonl_under(root))]
    by_age = sorted(((not _is_confirm(file), _modified(file), file.name, file) for file in files), reverse=True)
    return next((file for *_, file in by_age if _holds_trajectories(file)), None)


def _jsonl_under(root: Path) -> Iterator[Path]:
    """The JSONL files under a folder; skips files that a run removes meanwhile."""
    for folder, _, names in os.walk(root):
        files = (Path(folder, name) for name in names if name.endswith(".jsonl"))
        yield from (file for file in files if file.is_file())


def _is_confirm(file: Path) -> bool:
    return file.name.startswith("confirm-")


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
    """Whether a folder holds a run's or a benchmark's metrics, with or without trajectories."""
    files = (folder / name for name in ("metrics.jsonl", "evaluations.jsonl", "results.json"))
    return any(file.is_file() and file.stat().st_size for file in files)


def pick(index: TrajectoryIndex, position: int) -> tuple[int, Trajectory]:
    """Return ``(position, trajectory)`` for a position in a file (0 the first, -1 the last).

    Raises ``UsageError`` if there is none, ``EmailRLError`` if the line is not a trajectory.
    """
    found = position_in(index, position)
    return found, index.trajectory(found)


def position_in(index: TrajectoryIndex, position: int) -> int:
    """Return a position counted from the file's start; raises ``UsageError`` if it is out of range."""
    count = len(index)
    if not count:
        raise UsageError(f"{index.path} holds no complete trajectory yet.", "Wait for the run, or name another file.")
    found = position if position >= 0 else count + position
    if not 0 <= found < count:
        noun = "trajectory" if count == 1 else "trajectories"
        raise UsageError(f"{index.path} holds {count} {noun}; there is no --index {position}.", "Count from 0.")
    return found


def follow(roots: Sequence[Path], *, poll_seconds: float = 0.5) -> Iterator[tuple[TrajectoryIndex, int]]:
    """Yield ``(index, position)`` as lines are appended, forever; follows newer files under a folder.

    Starts at the last complete line, or waits for the first file. Waits for incomplete lines.
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


def origin(file: Path, trajectory: Trajectory) -> str | None:
    """Return a trajectory's source if it is not a training step: a benchmark, an evaluation or a rollout."""
    if file.parent.name == "trajectories" and _results(file).is_file():
        made_by = benchmark_record(file).get("model") or trajectory.policy_version or "an unnamed model"
        return f"benchmark of {made_by}"
    if file.name.startswith("eval-"):
        return f"evaluation at step {trajectory.step}"
    if file.name.startswith("confirm-"):
        return f"best_model, from step {trajectory.step}, on other validation questions"
    return None if file.name.startswith("step-") else "rollout"


def _results(file: Path) -> Path:
    return file.parent.parent / "results.json"


def benchmark_record(file: Path) -> dict[str, Any]:
    """Return the model that made a file, from the benchmark's results; an empty dict for other files."""
    try:
        records = read_object(_results(file)).get("results", [])
        return next((each for each in records if Path(each["trajectories"]).name == file.name), {})
    except (KeyError, TypeError):
        return {}  # another program's results.json


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if there is none."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
