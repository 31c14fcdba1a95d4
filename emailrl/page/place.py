"""The subject of a page: a run's or benchmark's folder, a trajectory file or one line of it; and its record."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain, islice
from pathlib import Path

import emailrl
from emailrl.base.disk import LOCK, is_locked, not_a_file
from emailrl.base.errors import UsageError
from emailrl.base.plain import counted
from emailrl.checkpoints import CONFIRMED, STATUS, list_checkpoints, run_folders
from emailrl.page.results import Pair, benchmark_record, list_in, pair_of, pair_of_run, read_object, results_of
from emailrl.records import Record, TrajectoryIndex, read_metrics
from emailrl.records.trajectory import Trajectory
from emailrl.runs.folder import STATE_FILE

_HEAD_BYTES = 4096  # keys that distinguish a trajectory from a metric or a question
_HEAD_LINES = 20  # lines to check, as the first may be damaged
_NUMBERED = re.compile(r"(step|eval|confirm)-(\d+)\.jsonl")
_SHARED = re.compile(r"\bNote: (.+: not a test on unseen mailboxes)$", re.M)
_TOLD, _RULE = re.compile(r"(?: INFO | \| )(\w[\w ]+): (.+?)(?= \| |$)", re.M), "=" * 60
_SILENT_SECONDS = 10  # after which a lock that nobody holds means that the run is gone
_PLACES = ("output_dir", "adapter", "tensorboard_dir", "export_dir", "wandb_name", "adapters", "resume")  # no methods
_ORDER = {"step": 0, "eval": 1, "confirm": 2}


def existing(path: Path) -> Path:
    """Return ``path``; raises ``UsageError`` if it does not exist."""
    if not path.exists():
        raise UsageError(f"No such file or folder: {path}.", "Start the run first, or name one that is there.")
    return path


def find_file(path: Path) -> Path:
    """Return the newest trajectory file at or under ``path``; ``UsageError`` if there is none."""
    if (newest := newest_file([existing(path)])) is None:
        raise UsageError(f"No trajectory in {path} yet.", "Wait for the first rollouts, or name another.")
    return newest


def output_roots(output_dir: Path) -> list[Path]:
    """Return the default output folders of trajectories: runs, rollouts and benchmarks."""
    parent = output_dir.parent
    return [*run_folders(output_dir), parent / "rollouts", parent / "benchmarks"]


def newest_in(output_dir: Path) -> Path:
    """Return the newest trajectory file of the default output folders; ``UsageError`` if there is none."""
    if (newest := newest_file(output_roots(output_dir))) is None:
        near = "".join(f", like {each}" for each in sorted(Path().glob("*/outputs"))[-1:])
        hint = f"Make one (emailrl quickstart, train, benchmark or rollout), or name one{near}."
        raise UsageError(f"No run, benchmark or rollout with trajectories under {output_dir.parent}.", hint)
    return newest


def newest_made(output_dir: Path) -> Path:
    """Return the run last written to, or without one the newest benchmark or rollout; ``UsageError`` without those."""
    if written := [state for run in run_folders(output_dir) if (state := run / STATUS).is_file()]:
        return max(written, key=lambda state: state.stat().st_mtime).parent
    newest = newest_file(run_folders(output_dir)) or newest_in(output_dir)
    return newest.parent.parent if newest.parent.name == "trajectories" else newest


def newest_file(roots: Sequence[Path]) -> Path | None:
    """Return the newest trajectory file among and under ``roots``, or None; skips other JSONL files. A run writes
    ``confirm-NNNNNN.jsonl`` last, though by an earlier policy: such a file counts only without others."""

    def age(file: Path) -> tuple[bool, int, str]:
        try:
            modified = file.stat().st_mtime_ns
        except FileNotFoundError:  # a run has removed it meanwhile
            modified = 0
        return not file.name.startswith("confirm-"), modified, file.name

    named = (Path(at, name) for at, _, names in chain.from_iterable(map(os.walk, roots)) for name in names)
    files = filter(Path.is_file, [*roots, *(file for file in named if file.suffix == ".jsonl")])
    return next(filter(_holds_trajectories, sorted(files, key=age, reverse=True)), None)


def _holds_trajectories(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            heads = [line[:_HEAD_BYTES] for line in islice(stream, _HEAD_LINES)]
    except OSError:
        return False
    return any(head.startswith(b"{") and b'"group_id"' in head and b'"scenario"' in head for head in heads)


def has_numbers(folder: Path) -> bool:
    """Whether a folder holds a run's state or metrics, or a benchmark's, with or without trajectories."""
    files = (folder / name for name in (STATUS, "metrics.jsonl", "evaluations.jsonl", "results.json"))
    return any(file.is_file() and file.stat().st_size for file in files)


def runs_in(folder: Path) -> list[Path]:
    """Return the folders directly in ``folder`` with numbers of a run or benchmark, by name."""
    return sorted(filter(has_numbers, folder.glob("*/")))


def position_in(index: TrajectoryIndex, position: int) -> int:
    """Return a position counted from the file's start, -1 being the last; ``UsageError`` if it is out of range."""
    if not (count := len(index)):
        raise UsageError(f"{index.path} holds no complete trajectory yet.", "Wait for the run, or name another file.")
    try:
        return range(count)[position]
    except IndexError:
        held = f"{index.path} holds {counted(count, 'trajectory')}"
        raise UsageError(f"{held}; there is no --index {position}.", "Count from 0.") from None


def follow(roots: Sequence[Path], *, poll_seconds: float = 0.5) -> Iterator[tuple[TrajectoryIndex, int]]:
    """Yield ``(index, position)`` of complete lines, from the last one there, forever, also of newer files."""
    file = newest_file(roots)
    index = None if file is None else TrajectoryIndex(file)
    position = 0 if index is None else max(len(index) - 1, 0)
    while True:
        newest = newest_file(roots)  # asked first: what the older file got before a newer one began is read below
        if index is not None and index.path.exists():
            index.refresh()
            for each in range(position, len(index)):
                yield index, each
            position = len(index)
        if newest == file:
            time.sleep(poll_seconds)
        elif newest is not None:
            file, index, position = newest, TrajectoryIndex(newest), 0


def origin(file: Path, trajectory: Trajectory) -> str | None:
    """Return a trajectory's source if it is not a training step: a benchmark, an evaluation or a rollout."""
    if (source := source_of(file)) == "benchmark":
        return f"benchmark of {benchmark_record(file).get('model') or trajectory.policy_version or 'an unnamed model'}"
    of_runs = {
        "step": None,
        "eval": f"evaluation at step {trajectory.step}",
        "confirm": f"best_model, from step {trajectory.step}, on other validation questions",
    }
    return of_runs.get(source, source)


def source_of(file: Path) -> str:
    """Return a file's source: ``step``, ``eval``, ``confirm``, ``benchmark`` or ``rollout``."""
    if match := _NUMBERED.fullmatch(file.name):
        return match[1]
    is_benchmark = file.parent.name == "trajectories" and (file.parent.parent / "results.json").is_file()
    return "benchmark" if is_benchmark else "rollout"


@dataclass(frozen=True, slots=True)
class Place:
    """The trajectory files a page shows, in order, under ``root``; those of a run's tests (``pair``), beside it, come
    last. ``index`` may pick one line of a single file. Of several ``runs`` only the numbers are shown."""

    root: Path
    files: tuple[Path, ...]
    index: int | None = None
    pair: Pair | None = None
    runs: tuple[Path, ...] = ()

    @property
    def kind(self) -> str:
        """``run``, ``file`` or ``trajectory``."""
        if self.index is not None:
            return "trajectory"
        return "file" if self.files == (self.root,) else "run"

    @property
    def folder(self) -> Path:
        """The run or benchmark that the files belong to, or the folder they lie in."""
        if self.root not in self.files:
            return self.root
        parent = self.root.absolute().parent  # a file named from its own folder has a parent too
        return parent.parent if parent.name == "trajectories" else parent

    @property
    def conditions(self) -> list[Path]:
        """Where the conditions of a benchmark or rollout may lie; it holds them locked while it plays."""
        return [self.folder / "conditions.json", *(file.with_suffix(".conditions.json") for file in self.files[:1])]

    @property
    def name(self) -> str:
        """The name of ``folder``, even if it is the working folder."""
        return self.folder.resolve().name


def place_of(path: Path, index: int | None = None) -> Place:
    """Return the place of ``path``: a file, or all files of a run or benchmark; ``index`` picks one line of a file. A
    folder with neither trajectories nor metrics means its runs, else the newest file below; UsageError without one."""
    if existing(path).is_file() or index is not None:
        file = find_file(path)
        return Place(file, (file,), index)
    if has_numbers(path) and newest_file([path / "trajectories"]) is None:
        return _with_tests(path, [])
    if not has_numbers(path) and (runs := runs_in(path)):
        return place_of_several(runs) if len(runs) > 1 else place_of(runs[0])
    newest = find_file(path)
    folder = newest.parent
    if folder.name != "trajectories" and folder != path:
        return Place(newest, (newest,))

    def position(file: Path) -> tuple[int, int, str]:  # a step before its evaluation; other files by name
        match = _NUMBERED.fullmatch(file.name)
        return (int(match[2]), _ORDER[match[1]], file.name) if match else (0, 0, file.name)

    files = sorted(filter(Path.is_file, folder.glob("*.jsonl")), key=position)
    return _with_tests(folder.parent if folder.name == "trajectories" else folder, files)


def place_of_several(runs: Sequence[Path]) -> Place:
    """Return the place of several runs, or of two benchmarks of one test; UsageError for a path that is neither."""
    for path in runs:
        if not has_numbers(existing(path)):
            raise UsageError(f"{path} holds no metrics of a run.", "Name run folders, or one benchmark or file alone.")
    pair = pair_of(*runs) if len(runs) == 2 else None
    if pair and len({file.parent for file in pair.files}) == 2:
        return Place(pair.files[1].parent.parent, pair.files, pair=pair)
    return Place(runs[0].parent, (), runs=tuple(runs))


def _with_tests(root: Path, files: list[Path]) -> Place:
    """The place of a run with its tests, or of a benchmark."""
    checkpoints = list_checkpoints(root)
    pair = pair_of_run(root, checkpoints) if checkpoints else pair_of(root)
    return Place(root, tuple(dict.fromkeys((*files, *(pair.files if pair else ())))), pair=pair)


def name_of(file: Path) -> str:
    """Return the name of a file in a page: of a benchmark's with its folder, as a run's page may have several."""
    return f"{file.parent.parent.name}/{file.name}" if source_of(file) == "benchmark" else file.name


def file_record(file: Path, first: Trajectory | None, count: int) -> Record:
    """Return a file's entry in the page's list; ``first`` is its first trajectory, if it holds one."""
    label = origin(file, first) if first else None
    match = _NUMBERED.fullmatch(file.name)
    return {
        "name": name_of(file),
        "source": source_of(file),
        "step": int(match[2]) if match else None,
        "label": label or (f"training step {int(match[2])}" if match else file.name),
        "count": count,
        "bytes": file.stat().st_size,
    }


def run_record(place: Place, files: list[Record]) -> Record:
    """Return the record of the whole (``/data/run.json``): settings, versions, steps, evaluations, files."""
    folder = place.folder
    steps, bad_steps = read_metrics(folder / "metrics.jsonl")
    evaluations, bad_evaluations = read_metrics(folder / "evaluations.jsonl")
    checkpoints = list_checkpoints(folder)
    metadata = checkpoints[-1].metadata if checkpoints else None
    results = read_object(folder / "results.json")
    names = ("run_id", "mode", "algorithm", "base_model", "seed", "parent", "resumed_from", "git_commit",
             "database_fingerprint", "questions_fingerprint", "lora")  # fmt: skip
    at = below if (below := place.root / "trajectories").is_dir() else place.root
    named = sorted(at.glob("*.jsonl")) if place.kind == "run" else []
    not_files = [f"{each.name} is {instead}" for each in named if (instead := not_a_file(each))]
    said = ""  # by a run at its start
    if (log := folder / "training.log").is_file():
        with log.open(encoding="utf-8", errors="replace") as lines:
            said = "".join(islice(lines, 200))
    header = dict(_TOLD.findall("".join(said.split(_RULE)[1:2])))  # until a checkpoint has the settings
    notes = [*dict.fromkeys(_SHARED.findall(said)), *list_in(results, "notes", str)]
    if (pair := place.pair) is not None and metadata is not None:
        notes += [f"Test: {each}" for each in list_in(pair.after, "notes", str)]
        tests = zip(map(name_of, reversed(pair.files)), ("after", "before"), strict=False)
        labels = {name: {"label": f"test {when} training"} for name, when in tests}
        files = [each | labels.get(each["name"], {}) for each in files]
    return {
        "title": place.name if place.kind == "run" else f"{place.name} / {place.files[0].name}",
        "kind": place.kind,
        "made": {"emailrl": emailrl.__version__, "at": datetime.now(UTC).isoformat(timespec="seconds")},
        "run": {name: getattr(metadata, name) for name in names} if metadata else {},
        "settings": metadata.settings if metadata else _conditions(place) or ({"run": header} if header else {}),
        "versions": metadata.versions if metadata else {},
        "steps": steps,
        "evaluations": evaluations,
        "results": results_of(folder),
        "comparisons": list_in(results, "comparisons", dict),
        "confirmed": read_object(folder / CONFIRMED) or None,
        "pair": pair and pair.record(),
        "status": _status(folder),
        "saved": max((each.metadata.step for each in checkpoints if STATE_FILE in each.metadata.files), default=None),
        "live": any(map(is_locked, place.conditions)),
        "files": files,
        "total": sum(each["count"] for each in files),
        "left_out": [*not_files, *bad_steps, *bad_evaluations],
        "notes": notes,
        "redacted": False,
    }


def _conditions(place: Place) -> Record:
    """The conditions of a benchmark or rollout, in groups; first both values where two benchmarks differ."""
    both = [next(filter(None, map(read_object, place.conditions)), {})]
    if place.pair and place.pair.before:
        both.insert(0, read_object(Path(place.pair.before["trajectories"]).parent.parent / "conditions.json"))
    flat = [*map(_flat, both)]
    differing = {name: [each.get(name) for each in flat] for name in _differing(flat)}
    groups = {name: value for name, value in both[-1].items() if isinstance(value, dict)}
    own = {name: value for name, value in both[-1].items() if name not in groups and name not in differing}
    return {name: group for name, group in {"before → after": differing, "conditions": own, **groups}.items() if group}


def _flat(settings: Record) -> Record:
    """Settings without their groups."""
    groups = (value.items() if isinstance(value, dict) else [(name, value)] for name, value in settings.items())
    return dict(chain.from_iterable(groups))


def _differing(flat: Sequence[Record]) -> list[str]:
    return [name for name in dict.fromkeys(chain(*flat)) if len({str(each.get(name)) for each in flat}) > 1]


def runs_record(runs: Sequence[Path]) -> Record:
    """Return the record of several runs, each with its numbers and the settings in which they differ (``given``)."""
    records = [run_record(replace(place_of(path), files=()), []) for path in runs]
    flat: list[Record] = []
    for record in records:
        given = {name: value for name, value in _flat(record["settings"]).items() if name not in _PLACES}
        flat.append({name: Path(each).name if str(each)[:1] == "/" else each for name, each in given.items()})
    differing = _differing(flat)
    kept = ("title", "status", "live", "steps", "evaluations", "results", "confirmed", "pair")
    shown = [
        {name: record[name] for name in kept} | {"given": {name: given.get(name) for name in differing}}
        for record, given in zip(records, flat, strict=True)
    ]
    nothing: Record = {"steps": [], "evaluations": [], "files": [], "total": 0, "notes": [], "redacted": False}
    left_out = [f"{record['title']}: {line}" for record in records for line in record["left_out"]]
    return nothing | {"kind": "runs", "title": counted(len(runs), "run"), "runs": shown, "left_out": left_out}


def _status(folder: Path) -> Record | None:
    """A run's ``status.json`` with ``silent``, its age in seconds; if no process holds it, it is ``killed``."""
    status = read_object(folder / STATUS)
    if not isinstance(at := status.get("at"), int | float):
        return None
    silent = max(time.time() - at, 0.0)
    is_gone = status.get("state") == "running" and silent > _SILENT_SECONDS and not is_locked(folder / LOCK)
    return status | {"silent": silent} | ({"state": "killed"} if is_gone else {})
