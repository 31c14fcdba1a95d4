"""The source of a trajectory file (training step, evaluation, benchmark or rollout) and its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from emailrl.checkpoints import list_checkpoints
from emailrl.errors import EmailRLError
from emailrl.inspection.tokens import TokenTexts
from emailrl.model.resolve import resolve_model
from emailrl.records.trajectory import Trajectory


def origin(file: Path, trajectory: Trajectory) -> str | None:
    """Return a trajectory's source if it is not a training step: a benchmark, an evaluation or a rollout."""
    if file.parent.name == "trajectories" and _results(file).is_file():
        made_by = _benchmark_record(file).get("model") or trajectory.policy_version or "an unnamed model"
        return f"benchmark of {made_by}"
    if file.name.startswith("eval-"):
        return f"evaluation at step {trajectory.step}"
    if file.name.startswith("confirm-"):
        return f"best_model, from step {trajectory.step}, on other validation questions"
    return None if file.name.startswith("step-") else "rollout"


def fitting_tokenizer(folders: Iterable[Path], trajectory: Trajectory) -> TokenTexts | None:
    """Return the first tokenizer that decodes the recorded ids to the recorded texts, or None."""
    for folder in folders:
        if (folder / "tokenizer.json").is_file():
            tokens = TokenTexts.load(folder)
            if tokens.fits(trajectory):
                return tokens
    return None


def tokenizer_folders(file: Path, model_name: str) -> Iterator[Path]:
    """Yield the folders that may hold the tokenizer of ``file``, likeliest first.

    The run's checkpoints come first, then the checkpoint of the benchmark that wrote the file, then the base models
    that these and a rollout's conditions name, then ``model_name``.
    """
    run_dir = file.parent.parent if file.parent.name == "trajectories" else file.parent
    checkpoints = list_checkpoints(run_dir)
    yield from (checkpoint.path for checkpoint in checkpoints)
    measured = _benchmark_record(file)
    if measured.get("checkpoint"):
        yield Path(str(measured["checkpoint"]))
    rolled_out = _read_object(file.with_suffix(".conditions.json"))
    bases = [checkpoint.metadata.base_model for checkpoint in checkpoints]
    for name in dict.fromkeys([*bases, measured.get("base_model"), rolled_out.get("model"), model_name]):
        folder = _model_folder(str(name)) if name else None
        if folder is not None:
            yield folder


def _results(file: Path) -> Path:
    return file.parent.parent / "results.json"


def _benchmark_record(file: Path) -> dict[str, Any]:
    """The model that made the file, from the benchmark's results; empty for other files."""
    try:
        records = _read_object(_results(file)).get("results", [])
        return next((each for each in records if Path(each["trajectories"]).name == file.name), {})
    except (KeyError, TypeError):
        return {}  # another program's results.json


def _read_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _model_folder(name: str) -> Path | None:
    """A model's local files (packaged, local or in the hub's cache); does not use the network."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = resolve_model(name)
    except EmailRLError:
        return None  # the folder is gone: the view shows ids instead of text, with a note
    if isinstance(found, Path):
        return found
    cached = try_to_load_from_cache(found, "tokenizer.json")
    return Path(cached).parent if isinstance(cached, str) else None
