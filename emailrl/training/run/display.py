"""What a run tells whoever shows it while it trains, beyond the lines it prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from emailrl.evaluation import Evaluation
from emailrl.trajectory import Trajectory


class Display(Protocol):
    """Hears of a run's progress; must not raise."""

    def start(self, run_dir: Path, step: int, total: int) -> None:
        """The run stands after ``step`` of ``total`` steps; what it did before is recorded in ``run_dir``."""

    def phase(self, name: str, total: int = 0) -> None:
        """What the run does now; ``total`` rollouts where it plays."""

    def played(self, trajectory: Trajectory) -> None:
        """A rollout has ended; it is not scored yet."""

    def recorded(self, file: Path, trajectories: Sequence[Trajectory]) -> None:
        """These were scored and are in ``file`` now."""

    def evaluation(self, evaluation: Evaluation) -> None:
        """An evaluation has ended."""

    def step(self, metrics: Mapping[str, Any], seconds_left: float) -> None:
        """A step has ended, with the line that ``metrics.jsonl`` has for it."""

    def end(self) -> None:
        """The run has ended, well or not."""


class NoDisplay:
    """Shows nothing."""

    def start(self, run_dir: Path, step: int, total: int) -> None: ...

    def phase(self, name: str, total: int = 0) -> None: ...

    def played(self, trajectory: Trajectory) -> None: ...

    def recorded(self, file: Path, trajectories: Sequence[Trajectory]) -> None: ...

    def evaluation(self, evaluation: Evaluation) -> None: ...

    def step(self, metrics: Mapping[str, Any], seconds_left: float) -> None: ...

    def end(self) -> None: ...
