"""An assembled run (policy, engine, questions, updater, directory) and the operations the loop calls on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from emailrl.agent.play import Collector
from emailrl.base.errors import EmailRLError
from emailrl.base.plain import counted
from emailrl.engines.base import Sampler
from emailrl.engines.vllm.servers import PinnedVersion, VllmServers
from emailrl.measure.evaluation import Evaluation, evaluate
from emailrl.model.policy import Policy
from emailrl.ranks import ALONE, Ranks
from emailrl.records import write_records
from emailrl.records.trajectory import Scenario
from emailrl.settings import Settings
from emailrl.training.algorithms import Algorithm
from emailrl.training.batch import TrainingSample, save_batches
from emailrl.training.run.ahead import Ahead
from emailrl.training.run.checkpointing import CheckpointWriter, Versions, version_of
from emailrl.training.run.collapse import Alarm, watch, way_back
from emailrl.training.run.data import RunData
from emailrl.training.run.directory import REPLACED
from emailrl.training.run.filtering import Collected, Filter
from emailrl.training.run.interrupts import Interrupts
from emailrl.training.run.metrics import training_records
from emailrl.training.run.modes import Mode
from emailrl.training.run.printing import complete, evaluation_block
from emailrl.training.run.rollouts import Rollouts
from emailrl.training.run.state import RunState, StepQuestions
from emailrl.training.run.tracking import Tracker
from emailrl.training.update import Skipped, TokenNumbers, Updater, UpdateResult

MAX_SKIPPED_IN_A_ROW = 3
"""This many consecutive updates with a non-finite loss or gradient end the run."""


@dataclass
class Run:
    """Everything one run holds; the loop is in ``training.loop``."""

    settings: Settings
    mode: Mode
    algorithm: Algorithm
    data: RunData
    directory: Path
    state: RunState
    policy: Policy
    engine: Sampler
    collector: Collector
    evaluator: Collector
    updater: Updater
    tracker: Tracker
    interrupts: Interrupts
    filter: Filter
    total_steps: int
    epochs: int | None
    """Passes over the questions that end the run; None if only ``total_steps`` does."""
    writer: CheckpointWriter
    ranks: Ranks = ALONE
    staleness: int = 0
    """Number of steps by which the sampling policy may lag behind."""
    ahead: Ahead | None = field(default=None, init=False)
    """Runs rollouts while steps train; None alternates the two."""
    rollouts: Rollouts = field(init=False)
    versions: Versions = field(init=False)
    _loaded_step: int | None = field(default=None, init=False)
    remaining: list[str] | None = field(default=None, init=False)
    """What is left to do once everything is saved; None before that."""
    _half_done: bool = field(default=False, init=False)
    """The weights have moved since the snapshot."""

    def __post_init__(self) -> None:
        self.rollouts = Rollouts(
            self.settings, self.data.train, self.directory, self.filter, self.epochs, num_ranks=self.ranks.world
        )
        self.versions = Versions(self.directory)

    @property
    def mask_truncated(self) -> bool:
        """Whether trajectories cut off at the token limit are excluded from the loss."""
        return self.settings.algorithm.truncated_trajectories == "mask"

    @property
    def waits(self) -> dict[str, float]:
        """``Ahead.seconds`` of the last step; empty if rollouts and steps alternate."""
        return self.ahead.seconds if self.ahead is not None else {}

    # -- rollouts and evaluation

    def refresh_engine(self) -> None:
        """Make the engine sample from the current policy."""
        self.engine.resume()
        step = self.state.step
        if step != self._loaded_step:
            self.engine.load_adapter(self._saved(step), version_of(step))
            self._loaded_step = step

    def hand_over(self, step: int) -> PinnedVersion:
        """An engine that samples from the policy after ``step``, or the current one if that is no longer kept.

        It remains to be loaded: see ``VllmServers.hand_over``.
        """
        assert isinstance(self.engine, VllmServers)
        if not self.versions.at(step).exists():
            step = self.state.step
        if step == self._loaded_step:
            return self.engine.pin()
        pinned = self.engine.hand_over(self._saved(step), version_of(step))
        self._loaded_step = step
        return pinned

    def _saved(self, step: int) -> Path:
        """The directory of the policy after ``step``; the current one is saved there once.

        What stays: that version, the previous one, those of rollouts ahead, and those from which a run resumed from the
        newest checkpoint samples its first steps.
        """
        directory = self.versions.at(step)
        if not directory.exists():
            self.versions.save(step, self.policy)
            saved = self.writer.saved_step or 0
            self.versions.remove_outdated(newest=2 + self.staleness, needed=range(saved - self.staleness, saved))
        return directory

    def collect(self) -> tuple[Collected, StepQuestions]:
        """The rollouts of the next step, run now or ahead, with the questions asked.

        Raises EmailRLError if every rollout raised.
        """
        step, display = self.state.step + 1, self.tracker.display
        if self.ahead is not None:
            display.phase(f"train rollouts of step {step}")
            collected, questions = self.ahead.take()
            played = [trajectory for group in collected.groups for trajectory in group.trajectories]
            display.recorded(self.rollouts.file_of(f"step-{step:06d}.jsonl"), played)
            return collected, questions
        self.refresh_engine()
        questions = self.rollouts.questions(self.state)
        collected = self.rollouts.play(step, questions, self.collector, display=display)
        self.engine.release()
        return collected, questions

    def evaluate_if_due(self) -> Evaluation | None:
        """Evaluate at step 0, every EVAL_STEPS and after the last step, unless already done."""
        state, wanted = self.state, self.settings.evaluation
        due = state.step % wanted.eval_steps == 0 or state.is_last(self.total_steps, self.epochs)
        if not due or state.last_evaluated == state.step:
            return None
        if self.ahead is not None:
            self.ahead.settle()
        self.refresh_engine()
        self.tracker.say(f"--- Evaluating at step {state.step} ---")
        evaluation = self.measure(self.data.val, state.step, "val")
        self.rollouts.record(f"eval-{state.step:06d}.jsonl", evaluation.trajectories, self.tracker.display)
        is_best = False
        if evaluation.is_void:  # an outage is not an accuracy: it must not select a model or end a run
            state.last_evaluated = state.step
        else:
            is_best = state.note_evaluation(evaluation, wanted.patience)
            state.last_metrics = {"evaluated_step": state.step} | evaluation.metrics()
        self.tracker.evaluation(evaluation)
        self.tracker.say(evaluation_block(evaluation, state, is_best=is_best))
        return evaluation

    def measure(self, questions: Sequence[Scenario], step: int, label: str) -> Evaluation:
        """Play the questions with the engine's current weights, then put the engine to sleep."""
        num_samples, display = self.settings.evaluation.eval_samples, self.tracker.display
        self.tracker.say(f"Evaluating on {counted(len(questions), 'question')} ...")
        display.phase(f"{label} rollouts of step {step}", len(questions) * num_samples)
        evaluation = evaluate(
            self.evaluator,
            questions,
            step=step,
            seed=self.settings.training.seed,
            temperature=self.settings.agent.eval_temperature,
            num_samples=num_samples,
            split_label=label,
            progress=display.played,
        )
        self.engine.release()
        return evaluation

    # -- state

    def stop_reason(self) -> str | None:
        """Why the run ends here, or None if it continues."""
        return self.state.stop_reason(self.settings.evaluation, self.total_steps, self.epochs)

    def train(self, samples: Sequence[TrainingSample], paid: Mapping[str, float]) -> UpdateResult:
        """Make the updates of the current step (``Updater.train``).

        From here to ``complete_step`` the weights belong to no step. Without samples, this is logged, counted and
        skipped.
        """
        self._half_done = True
        step = self.state.step + 1
        self.tracker.display.phase(f"update of step {step}")
        if not samples:
            self.state.steps_without_update += 1
            so_far = counted(self.state.steps_without_update, "such step")
            self.tracker.say(f"Step {step}: no groups left to train on, no update ({so_far} so far).")
            return UpdateResult()
        result = self.updater.train(samples, paid, step=step)
        if result.skipped:
            self._keep_skipped(step, result.skipped)
        return result

    def _keep_skipped(self, step: int, skipped: Sequence[Skipped]) -> None:
        """Record the batches of skipped updates; raise EmailRLError after too many in a row."""
        folder = self.directory / "skipped"
        for number, each in enumerate(skipped, 1):
            save_batches(folder, f"step-{step:06d}-{number}", each.batches, step, each.broken)
        updates = counted(len(skipped), "update")
        self.tracker.say(f"Step {step}: {updates} skipped (non-finite loss or gradient); batches in {folder}.")
        if self.updater.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            name, value = next(iter(skipped[-1].broken.items()))
            raise EmailRLError(
                f"The {name} is {value} at step {step}, in the third update in a row; the weights are as before them.",
                f"Lower LEARNING_RATE, or resume from an earlier checkpoint. Their batches are in {folder}.",
            )

    def record_training(
        self, collected: Collected, samples: Sequence[TrainingSample], tokens: Sequence[TokenNumbers]
    ) -> None:
        """Write what training adds to the current step's trajectories."""
        path = self.directory / "training" / f"step-{self.state.step + 1:06d}.jsonl"
        write_records(path, training_records(collected, samples, tokens, mask_truncated=self.mask_truncated))

    def complete_step(self) -> None:
        """Make the current state the one that the next checkpoint holds."""
        self.writer.take(self.state)
        self._half_done = False

    def end_step(self, metrics: Mapping[str, Any] | None = None) -> None:
        """Complete the step: save what is due, and warn of signs of collapse in ``metrics``.

        Raises EmailRLError at such a sign if ON_COLLAPSE is ``stop`` and the run would continue.
        """
        alarms = watch(self.state, metrics, self.settings.algorithm.kl_target) if metrics else []
        self.complete_step()
        if self.state.best_step == self.state.step:
            self.save("best")
        if self.state.step and self.state.step % self.settings.output.save_steps == 0:
            self.save("checkpoint")
        if alarms:
            self._warn(alarms)

    def save(self, kind: str) -> None:
        """Write ``best_model``, ``final`` or ``checkpoint-N``, and say so."""
        self.tracker.say(f"Model saved to: {self.writer.write(kind).path}")

    def _warn(self, alarms: Sequence[Alarm]) -> None:
        step, ends = self.state.step, self.stop_reason() is not None
        for alarm in alarms:
            self.tracker.say(f"Warning at step {step}: {alarm.warning} {way_back(self.directory, alarm.good_step)}")
        if self.settings.evaluation.on_collapse == "stop" and not ends:
            # Another checkpoint-N would evict the oldest, which may be the one to return to.
            self.save("final")
            first = min((alarm.good_step for alarm in alarms), key=lambda good: -1 if good is None else good)
            raise EmailRLError(
                f"Stopped at step {step} on signs of collapse (ON_COLLAPSE=stop).", way_back(self.directory, first)
            )

    def rescue(self) -> None:
        """Save the last complete step of a run that ends early, if its weights are still available."""
        step, saved_step = self.writer.step, self.writer.saved_step
        if self.remaining is not None:
            self.tracker.conclude(complete(skipped=self.remaining))
        elif saved_step == step:
            self.tracker.say(f"Stopped after step {step}, which is saved; --resume latest continues.")
        elif not step:
            replaced = (self.directory / REPLACED).exists()
            then = "the run being replaced is restored" if replaced else "nothing was trained or saved"
            self.tracker.say(f"Stopped before the first step; {then}.")
        elif self._half_done or self.interrupts.impatient:
            self.tracker.say(f"Stopped in step {step + 1}; {_saved_up_to(saved_step)}.")
        else:
            try:
                saved = f"saved in {self.writer.write('checkpoint').path}; --resume latest continues"
            except OSError as error:  # a full disk: what ended the run is raised, not this
                saved = f"which cannot be saved ({error.strerror}); {_saved_up_to(saved_step)}"
            self.tracker.say(f"Stopped after step {step}, {saved}.")


def _saved_up_to(step: int | None) -> str:
    return "there is no checkpoint yet" if step is None else f"saved up to step {step}; --resume latest continues"
