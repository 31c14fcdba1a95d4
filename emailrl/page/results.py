"""Results of benchmarks, and the two of them that a page's headline compares."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
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
    """Two results of one test, ``before`` None if there is only ``after``; and their trajectory files."""

    before: Record | None
    after: Record
    files: tuple[Path, ...]

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
    if not path.is_file():  # reading a pipe would block
        return {}
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def list_in(results: Record, name: str, kind: type) -> list[Any]:
    """A list of a benchmark's results or notes; empty if another program wrote the file."""
    found = results.get(name)
    return [each for each in found if isinstance(each, kind)] if isinstance(found, list) else []


def in_order(results: Iterable[Record]) -> list[Record]:
    """A benchmark's results as training made them: models without adapter first, then checkpoints by their steps."""

    def place(result: Record) -> tuple[bool, int]:
        checkpoint = result.get("checkpoint")
        step = read_object(Path(str(checkpoint)) / "metadata.json").get("step")
        return bool(checkpoint), step if isinstance(step, int) else 0

    return sorted(results, key=place)


def pair_of_benchmark(folder: Path) -> Pair | None:
    """A benchmark's one or two results; None for more, which no headline can compare."""
    results = in_order(list_in(read_object(folder / "results.json"), "results", dict))
    if len(results) not in (1, 2) or not all(isinstance(each.get("accuracy"), float) for each in results):
        return None
    return Pair(results[0] if len(results) == 2 else None, results[-1], _files(folder, results))


def pair_of_run(folder: Path, checkpoints: Sequence[Checkpoint]) -> Pair | None:
    """The newest complete benchmark of a run's weights, and the newest of what the run began from (its base model, or
    its parent's weights) on the same questions. Weights are told by their hash, so that a run which was moved or copied
    keeps its benchmarks, and never gets another's."""
    here, metadata = folder.resolve(), checkpoints[-1].metadata
    near = dict.fromkeys(each.resolve() for each in (*here.parents, Path("outputs"), Path()))
    results = chain.from_iterable(each.glob("benchmarks/*/results.json") for each in near)
    newest = sorted(results, key=lambda file: -file.stat().st_mtime_ns)
    tests = [(file.parent, each) for file in newest for each in _tested(file, metadata.base_model)]
    own = {each.metadata.files[WEIGHTS] for each in checkpoints if WEIGHTS in each.metadata.files}
    at, after = next(((at, each) for at, each in tests if each["adapter"] in own), (here, None))
    if after is None:
        return None
    began: set[str | None] = {None}
    if (parent := metadata.parent) is not None:  # a path with its hash, or run_id:step of a run beside this one
        made = map(read_object, here.parent.glob("*/*/metadata.json"))
        of_parent = (each for each in made if f"{each.get('run_id')}:{each.get('step')}" == parent)
        began = {each.get("files", {}).get(WEIGHTS, "") for each in of_parent}
        began.add(parent.rpartition(" sha256:")[2])
    for place, before in tests:
        if before["adapter"] in began and all(before.get(name) == after.get(name) for name in _SAME):
            return Pair(before, after, (*_files(place, [before]), *_files(at, [after])))
    return Pair(None, after, _files(at, [after]))


def _tested(file: Path, base_model: str) -> Iterator[Record]:
    """A benchmark's complete results of a base model without attack, each with the fingerprints of its database and
    ``questions`` and its ``adapter``'s hash: the conditions have one for each number that begins a file's name."""
    conditions = read_object(file.with_name("conditions.json"))
    adapters = {f"{number:02}": adapter for number, adapter in enumerate(list_in(conditions, "adapters", object))}
    for each in list_in(read_object(file), "results", dict):
        number = Path(str(each.get("trajectories"))).name.partition("-")[0]
        is_whole = each.get("complete") and not each.get("attacked")
        if is_whole and each.get("base_model") == base_model and number in adapters:
            told = {name: conditions.get(name) for name in ("database", "questions")}
            yield each | told | {"adapter": adapters[number]}


def _files(folder: Path, results: Iterable[Record]) -> tuple[Path, ...]:
    """The results' trajectory files, where the folder lies now."""
    named = (folder / "trajectories" / Path(str(each.get("trajectories"))).name for each in results)
    return tuple(filter(Path.is_file, named))


@lru_cache(maxsize=8)  # a served page asks again every few seconds
def _compared(before: tuple[Path, Any], after: tuple[Path, Any]) -> Record | None:
    """How two files, each with the stamp of its content, compare; None if one cannot be read."""
    try:
        one, other = (Evaluation(list(read_trajectories(file))) for file, _ in (before, after))
    except EmailRLError:  # the page lists the line among what is left out
        return None
    return compared(one, other)
