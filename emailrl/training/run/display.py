"""The interface through which a run reports progress to a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from emailrl.measure.evaluation import Evaluation
from emailrl.records.trajectory import Trajectory


class Display(Protocol):
    """Follows a run's progress; its methods must not raise."""

    def start(self, run_dir: Path, step: int, total: int) -> None:
        """The run starts or resumes after ``step`` of ``total`` steps; ``run_dir`` has its earlier records."""

    def phase(self, name: str, total: int = 0) -> None:
        """A phase starts; ``total`` is its number of rollouts, 0 if it has none."""

    def played(self, trajectory: Trajectory) -> None:
        """A rollout has ended; it is not scored yet."""

    def recorded(self, file: Path, trajectories: Sequence[Trajectory]) -> None:
        """These trajectories were scored and written to ``file``."""

    def evaluation(self, evaluation: Evaluation) -> None:
        """An evaluation has ended."""

    def step(self, metrics: Mapping[str, Any], seconds_left: float) -> None:
        """A step has ended; ``metrics`` is its object in ``metrics.jsonl``."""

    def end(self) -> None:
        """The run has ended, successfully or not."""


class NoDisplay:
    """Shows nothing."""

    def start(self, run_dir: Path, step: int, total: int) -> None: ...

    def phase(self, name: str, total: int = 0) -> None: ...

    def played(self, trajectory: Trajectory) -> None: ...

    def recorded(self, file: Path, trajectories: Sequence[Trajectory]) -> None: ...

    def evaluation(self, evaluation: Evaluation) -> None: ...

    def step(self, metrics: Mapping[str, Any], seconds_left: float) -> None: ...

    def end(self) -> None: ...


SILENT = NoDisplay()
