"""The subject of a page: a run's or benchmark's folder, a trajectory file or one line of it; and its record."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import emailrl
from emailrl.base.disk import not_a_file
from emailrl.checkpoints import CONFIRMED, list_checkpoints
from emailrl.page.locate import (
    existing,
    find_file,
    has_numbers,
    newest_file,
    origin,
    position_in,
    read_object,
)
from emailrl.records import Entry, Record, TrajectoryIndex, read_metrics
from emailrl.records.trajectory import Trajectory

_NUMBERED = re.compile(r"(step|eval|confirm)-(\d+)\.jsonl")
_SHARED = re.compile(r"\bNote: (.+: not a test on unseen mailboxes)$", re.M)
_ORDER = {"step": 0, "eval": 1, "confirm": 2}


@dataclass(frozen=True, slots=True)
class Place:
    """The trajectory files a page shows, in order, under ``root``; ``index`` may pick one line of a single file.

    A run that kept only its metrics has no files.
    """

    root: Path
    files: tuple[Path, ...]
    index: int | None = None

    @property
    def kind(self) -> str:
        """``run``, ``file`` or ``trajectory``."""
        if self.index is not None:
            return "trajectory"
        return "file" if self.files == (self.root,) else "run"

    @property
    def folder(self) -> Path:
        """The run or benchmark that the files belong to, or the folder they lie in."""
        if not self.files:
            return self.root
        parent = self.files[0].absolute().parent  # a file named from its own folder has a parent too
        return parent.parent if parent.name == "trajectories" else parent

    @property
    def name(self) -> str:
        """The name of ``folder``, even if it is the working folder."""
        return self.folder.resolve().name


def place_of(path: Path, index: int | None = None) -> Place:
    """Return the place of ``path``: a file, or all files of a run or benchmark; ``index`` picks one line of a file.

    A folder without trajectories is its own place if it holds a run's metrics, else the place is the run of the newest
    file below it. ``UsageError`` if there is none.
    """
    if existing(path).is_file() or index is not None:
        file = find_file(path)
        return Place(file, (file,), index)
    if has_numbers(path) and newest_file([path / "trajectories"]) is None:
        return Place(path, ())
    newest = find_file(path)
    folder = newest.parent
    if folder.name != "trajectories" and folder != path:
        return Place(newest, (newest,))
    files = sorted(filter(Path.is_file, folder.glob("*.jsonl")), key=_position)
    return Place(folder.parent if folder.name == "trajectories" else folder, tuple(files))


def _position(file: Path) -> tuple[int, int, str]:
    """Sort training steps and evaluations by step, a step before its evaluation; other files by name."""
    match = _NUMBERED.fullmatch(file.name)
    return (int(match[2]), _ORDER[match[1]], file.name) if match else (0, 0, file.name)


def source_of(file: Path) -> str:
    """Return a file's source: ``step``, ``eval``, ``confirm``, ``benchmark`` or ``rollout``."""
    if match := _NUMBERED.fullmatch(file.name):
        return match[1]
    is_benchmark = file.parent.name == "trajectories" and (file.parent.parent / "results.json").is_file()
    return "benchmark" if is_benchmark else "rollout"


def file_record(file: Path, first: Trajectory | None, count: int) -> Record:
    """Return a file's entry in the page's list; ``first`` is its first trajectory, if it holds one."""
    label = origin(file, first) if first else None
    match = _NUMBERED.fullmatch(file.name)
    return {
        "name": file.name,
        "source": source_of(file),
        "step": int(match[2]) if match else None,
        "label": label or (f"training step {int(match[2])}" if match else file.name),
        "count": count,
        "bytes": file.stat().st_size,
    }


def trajectories_of(index: TrajectoryIndex, wanted: int | None) -> list[tuple[Trajectory, Entry]]:
    """Return a file's trajectories, or the one at position ``wanted``, each with its entry.

    Skips lines without a trajectory; ``EmailRLError`` if ``wanted`` is one.
    """
    positions = index.readable if wanted is None else [position_in(index, wanted)]
    return [(index.trajectory(each), index[each]) for each in positions]


def run_record(place: Place, files: list[Record]) -> Record:
    """Return the record of the whole (``/data/run.json``): settings, versions, steps, evaluations, files."""
    folder = place.folder
    steps, bad_steps = read_metrics(folder / "metrics.jsonl")
    evaluations, bad_evaluations = read_metrics(folder / "evaluations.jsonl")
    checkpoints = list_checkpoints(folder)
    metadata = checkpoints[-1].metadata if checkpoints else None
    results = read_object(folder / "results.json")
    tested = _tested(folder.resolve())
    names = ("run_id", "mode", "algorithm", "base_model", "seed", "parent", "resumed_from", "git_commit",
             "database_fingerprint", "questions_fingerprint", "lora")  # fmt: skip
    return {
        "title": place.name if place.kind == "run" else f"{place.name} / {place.files[0].name}",
        "kind": place.kind,
        "made": {"emailrl": emailrl.__version__, "at": datetime.now(UTC).isoformat(timespec="seconds")},
        "run": {name: getattr(metadata, name) for name in names} if metadata else {},
        "checkpoints": [
            {"name": each.path.name, "kind": each.metadata.kind, "step": each.metadata.step} for each in checkpoints
        ],
        "settings": metadata.settings if metadata else _conditions(place),
        "versions": metadata.versions if metadata else {},
        "steps": steps,
        "evaluations": evaluations,
        "results": _list(results, "results"),
        "comparisons": _list(results, "comparisons"),
        "confirmed": read_object(folder / CONFIRMED) or None,
        "tested": tested,
        "files": files,
        "total": sum(each["count"] for each in files),
        "left_out": [*_not_files(place), *bad_steps, *bad_evaluations],
        "notes": [*_shared_inbox(folder), *_notes(results), *(f"Test: {each}" for each in _notes(tested or {}))],
        "redacted": False,
    }


def _not_files(place: Place) -> list[str]:
    """The entries of a run that are named like a trajectory file but are not files."""
    if place.kind != "run":
        return []
    folder = place.files[0].parent if place.files else place.root / "trajectories"
    return [f"{each.name} is {instead}" for each in sorted(folder.glob("*.jsonl")) if (instead := not_a_file(each))]


def _conditions(place: Place) -> Record:
    """The recorded settings of a benchmark or rollout, under one heading."""
    beside = [place.folder / "conditions.json", *(file.with_suffix(".conditions.json") for file in place.files[:1])]
    return next(({"conditions": found} for found in map(read_object, beside) if found), {})


def _notes(results: Record) -> list[str]:
    """The notes that a benchmark prints below its tables."""
    found = results.get("notes")
    return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []


def _shared_inbox(run: Path) -> list[str]:
    """What a run said at its start of training and validation on the same inbox."""
    if not (log := run / "training.log").is_file():
        return []
    with log.open(encoding="utf-8", errors="replace") as lines:
        found = [_SHARED.search(line) for line in islice(lines, 200)]
    return list(dict.fromkeys(match[1] for match in found if match))


def _list(results: Record, name: str) -> list[Any]:
    """A list of a benchmark's results; empty if another program wrote the file."""
    found = results.get(name)
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _tested(run: Path) -> Record | None:
    """The newest complete benchmark of one of the run's checkpoints, if there is one beside the run."""
    files = sorted(run.parent.glob("benchmarks/*/results.json"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
    results = (each for file in files for each in _list(read_object(file), "results"))
    return next(
        (each for each in results if Path(str(each.get("checkpoint"))).parent == run and each.get("complete")), None
    )
