"""The conditions of a started benchmark, and which one to resume."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emailrl.base.disk import check_own
from emailrl.base.errors import UsageError
from emailrl.measure.journal import differences, playing_conditions
from emailrl.records.trajectory import Scenario

if TYPE_CHECKING:
    from emailrl.measure.subjects import Subject
    from emailrl.settings import Settings

CONDITIONS = "conditions.json"
"""The conditions of a started benchmark: the file that identifies it for resuming."""


def check_folder(out: Path) -> None:
    """Raise UsageError if a new benchmark in ``out`` would remove anything but an old one, or write through a link."""
    check_own(out, "--out")
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file.", "Name a folder with --out.")
    if out.exists() and not (out / CONDITIONS).is_file() and any(out.iterdir()):
        raise UsageError(f"{out} contains something other than a benchmark.", "Name another folder with --out.")


def is_unfinished(folder: Path) -> bool:
    """Whether the folder holds an unfinished benchmark."""
    if not (folder / CONDITIONS).is_file():
        return False
    try:
        return bool(json.loads((folder / "results.json").read_bytes())["interrupted"])
    except (OSError, ValueError, TypeError, KeyError):  # not written, or not by a benchmark
        return True


def to_resume(
    begun: Sequence[Path], subjects: Sequence[Subject], scenarios: Sequence[Scenario], settings: Settings
) -> Path:
    """The newest of the folders ``begun`` (oldest first) with these conditions; else the newest."""
    now = all_conditions(subjects, scenarios, settings)
    return next((folder for folder in reversed(begun) if _fits(folder / CONDITIONS, now)), begun[-1])


def all_conditions(subjects: Sequence[Subject], scenarios: Sequence[Scenario], settings: Settings) -> dict[str, Any]:
    """The conditions that a resumed benchmark must share with the original."""
    from emailrl.engines.local.weights import adapter_sha256

    adapters = [subject.adapter and adapter_sha256(subject.adapter.path) for subject in subjects]
    models = ", ".join(subject.label for subject in subjects)
    bases = [subject.model_name for subject in subjects]
    shared = playing_conditions(settings, scenarios, temperature=settings.agent.eval_temperature, models=bases)
    benchmark = {"samples": settings.benchmark.bench_samples, "sequential": settings.benchmark.bench_sequential}
    return {"models": models, "adapters": adapters} | benchmark | shared


def _fits(path: Path, now: dict[str, Any]) -> bool:
    try:
        return not differences(path, now)
    except UsageError:
        return False
