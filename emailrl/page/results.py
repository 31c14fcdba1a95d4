"""Results of benchmarks, and the two of them that a page's headline compares."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from emailrl.base.disk import stamp_of
from emailrl.base.errors import EmailRLError
from emailrl.checkpoints import WEIGHTS, Checkpoint
from emailrl.measure.evaluation import Evaluation, compared
from emailrl.records import Record, read_trajectories

_SAME = (
    "split", "temperature", "max_turns", "thinking", "max_thinking_tokens", "samples", "seed", "database", "questions",
    "environment", "reward_name", "num_questions",
)  # fmt: skip
"""Fields in which two results must agree to be of the same test."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two results of one test, ``before`` None if there is only ``after``."""

    before: Record | None
    after: Record

    @property
    def files(self) -> tuple[Path, ...]:
        """Their trajectory files, as far as these are there."""
        named = (Path(each["trajectories"]) for each in (self.before, self.after) if each)
        return tuple(filter(Path.is_file, named))

    def record(self) -> Record:
        """``before``, ``after`` and, if both files are there, how they are ``compared``."""
        stamped = [(file, stamp_of(file)) for file in self.files]
        compared = _compared(*stamped) if self.before and len(stamped) == 2 else None
        return {"before": self.before, "after": self.after, "compared": compared}


def benchmark_record(file: Path) -> dict[str, Any]:
    """Return the model that made a file, from the benchmark's results; an empty dict for other files."""
    records = list_in(read_object(file.parent.parent / "results.json"), "results", dict)
    return next((each for each in records if Path(str(each.get("trajectories"))).name == file.name), {})


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if there is none."""
    try:
        found = json.loads(path.read_bytes()) if path.is_file() else {}  # reading a pipe would block
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def list_in(results: Record, name: str, kind: type) -> list[Any]:
    """A list of a benchmark's results or notes; empty if another program wrote the file."""
    found = results.get(name)
    return [each for each in found if isinstance(each, kind)] if isinstance(found, list) else []


def results_of(*folders: Path) -> list[Record]:
    """Benchmarks' results as training made them: models without adapter first, then checkpoints by their steps. Each
    names its ``trajectories`` where they lie now, and has the fingerprints of its ``database`` and ``questions``, the
    ``step`` of a checkpoint that is still there, and its ``adapter``'s hash: the conditions have one for each number
    that begins a file's name."""
    results = []
    for folder in folders:
        conditions = read_object(folder / "conditions.json")
        adapters = {f"{number:02}": each for number, each in enumerate(list_in(conditions, "adapters", object))}
        told = {name: conditions.get(name) for name in ("database", "questions")}
        for each in list_in(read_object(folder / "results.json"), "results", dict):
            name = Path(str(each.get("trajectories"))).name
            step = read_object(Path(str(each.get("checkpoint"))) / "metadata.json").get("step")
            own = {"trajectories": str(folder / "trajectories" / name), "adapter": adapters.get(name[:2], False)}
            results.append(each | told | own | {"step": step if isinstance(step, int) else None})
    return sorted(results, key=lambda each: (bool(each.get("checkpoint")), each["step"] or 0))


def pair_of(*folders: Path) -> Pair | None:
    """The one or two results of benchmarks on the same test; None for more, which no headline can compare."""
    results = results_of(*folders)
    if len(results) not in (1, 2) or not all(isinstance(each.get("accuracy"), float) for each in results):
        return None
    before, after = results[0], results[-1]
    return Pair(None if before is after else before, after) if _same_test(before, after) else None


def pair_of_run(folder: Path, checkpoints: Sequence[Checkpoint]) -> Pair | None:
    """The newest complete benchmark of a run's weights, and the newest of what the run began from (its base model, or
    its parent's weights) on the same questions. Weights are told by their hash, so that a run which was moved or copied
    keeps its benchmarks, and never gets another's."""
    here, metadata = folder.resolve(), checkpoints[-1].metadata
    near = dict.fromkeys(each.resolve() for each in (*here.parents, Path("outputs"), Path()))
    results = chain.from_iterable(each.glob("benchmarks/*/results.json") for each in near)
    newest = sorted(results, key=lambda file: -file.stat().st_mtime_ns)
    found = chain.from_iterable(results_of(file.parent) for file in newest)
    whole = [each for each in found if each.get("complete") and not each.get("attacked")]
    tests = [each for each in whole if each.get("base_model") == metadata.base_model]
    own = {each.metadata.files[WEIGHTS] for each in checkpoints if WEIGHTS in each.metadata.files}
    if (after := next((each for each in tests if each["adapter"] in own), None)) is None:
        return None
    began: set[str | None] = {None}
    if (parent := metadata.parent) is not None:  # a path with its hash, or run_id:step of a run beside this one
        made = map(read_object, here.parent.glob("*/*/metadata.json"))
        of_parent = (each for each in made if f"{each.get('run_id')}:{each.get('step')}" == parent)
        began = {each.get("files", {}).get(WEIGHTS, "") for each in of_parent}
        began.add(parent.rpartition(" sha256:")[2])
    return Pair(next((each for each in tests if each["adapter"] in began and _same_test(each, after)), None), after)


def _same_test(one: Record, other: Record) -> bool:
    return all(one.get(name) == other.get(name) for name in _SAME)


@lru_cache(maxsize=8)  # a served page asks again every few seconds
def _compared(before: tuple[Path, Any], after: tuple[Path, Any]) -> Record | None:
    """How two files, each with the stamp of its content, compare; None if one cannot be read."""
    try:
        one, other = (Evaluation(list(read_trajectories(file))) for file, _ in (before, after))
    except EmailRLError:  # the page lists the line among what is left out
        return None
    return compared(one, other)
