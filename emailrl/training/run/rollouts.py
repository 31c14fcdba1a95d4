"""The rollouts of one step: ask questions, replace dropped ones, and record everything."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from emailrl.agent.play import Collector
from emailrl.base.errors import EmailRLError
from emailrl.records import write_trajectories
from emailrl.records.trajectory import Scenario, Trajectory, TrajectoryGroup
from emailrl.settings import Settings
from emailrl.training.run.display import Display
from emailrl.training.run.filtering import Collected, Filter, collect_groups
from emailrl.training.run.metrics import first_exception
from emailrl.training.run.state import RunState, StepQuestions, questions_per_step

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rollouts:
    """Plays the steps of one run, from any thread."""

    settings: Settings
    train: Sequence[Scenario]
    directory: Path
    filter: Filter
    epochs: int | None
    num_ranks: int = 1

    @property
    def per_step(self) -> int:
        """Questions per step, not counting replacements for dropped ones."""
        return questions_per_step(self.settings.training, self.num_ranks)

    @property
    def choose_by_outcome(self) -> bool:
        """Whether the outcomes of earlier questions decide which are asked next."""
        return self.filter.max_refill_rounds > 0

    def questions(self, place: RunState) -> StepQuestions:
        """The questions of the step that begins at ``place``."""
        return StepQuestions(self.train, place.cursor, self.settings.training.seed, epochs=self.epochs)

    def play(
        self,
        step: int,
        questions: StepQuestions,
        collector: Collector,
        *,
        display: Display,
        played: Mapping[str, Trajectory] = MappingProxyType({}),
    ) -> Collected:
        """Roll out the questions of ``step`` and record the trajectories.

        Those already ``played``, by id, are not repeated. Raises EmailRLError if every rollout raised.
        """
        training = self.settings.training
        recorded: list[Trajectory] = []

        def ask(scenarios: Sequence[Scenario], refill: int) -> list[TrajectoryGroup]:
            label = f"refill-{refill}" if refill else "train"
            if refill:
                logger.info("Step %d: %s asks %d more questions", step, label, len(scenarios))
            display.phase(f"{label} rollouts of step {step}", len(scenarios) * training.num_generations)
            groups = collector.collect(
                scenarios, training.num_generations, step=step, seed=training.seed, split_label=label,
                progress=display.played, played=played,
            )  # fmt: skip
            new = [trajectory for group in groups for trajectory in group.trajectories]
            recorded.extend(new)
            self.record(f"step-{step:06d}.jsonl", recorded, display, new)
            return groups

        return collect_groups(questions.take, ask, self.filter, count=self.per_step)

    def file_of(self, name: str) -> Path:
        """The file for the trajectories of a step or an evaluation."""
        return self.directory / "trajectories" / name

    def record(
        self, name: str, trajectories: Sequence[Trajectory], display: Display, new: Sequence[Trajectory] | None = None
    ) -> None:
        """Write trajectories to a file of the run, and show the ``new`` ones (None: all).

        Raises EmailRLError if every one raised.
        """
        path = self.file_of(name)
        write_trajectories(path, trajectories)
        display.recorded(path, trajectories if new is None else new)
        if (reason := first_exception(trajectories)) is not None:
            raise EmailRLError(
                f"Every rollout failed ({path.stem}). First error: {reason.rstrip('.')}.",
                "Fix it, then rerun with --resume latest.",
            )
