"""A run of ``train``: what the loop calls on it, and its end."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from emailrl.agent.play import Collector
from emailrl.base.disk import naming, replace_bytes
from emailrl.base.errors import EmailRLError
from emailrl.base.http import Bill
from emailrl.base.plain import counted
from emailrl.checkpoints import CONFIRMED, confirmed_of, damage_of, list_checkpoints, remove_checkpoints
from emailrl.engines.base import Sampler
from emailrl.engines.vllm.servers import PinnedVersion, VllmServers
from emailrl.measure.evaluation import Evaluation
from emailrl.records import write_records
from emailrl.records.trajectory import Scenario
from emailrl.runs.folder import remove_records
from emailrl.runs.resume import nothing_left
from emailrl.runs.run import Run
from emailrl.training import report
from emailrl.training.ahead import Ahead, PlayOn
from emailrl.training.algorithms import Algorithm, Mode
from emailrl.training.batch import TrainingSample, save_batches
from emailrl.training.state import Collected, Rollouts, RunState, StepQuestions
from emailrl.training.update import TokenNumbers, Updater, UpdateResult


class NothingLeft(Exception):
    """The run to resume has ended, and everything that a run leaves at its end is there: a line, its folder, state."""


def check_unfinished(directory: Path, state: RunState, reason: str | None, notes: list[str], *, confirms: bool) -> None:
    """Raise NothingLeft if the run ended for ``reason`` (None: it continues) and lacks nothing that a run leaves.
    ``confirms``: there are questions to measure the best model on. ``notes`` are those of ``check_agrees``."""
    saved = {item.metadata.kind: item for item in list_checkpoints(directory)}
    if reason is None or "final" not in saved or saved["final"].metadata.step != state.step:
        return
    damaged = any(damage_of(directory / name) for name in ("final", "best_model"))
    if damaged or not (directory / report.LAST_CURVE).exists():
        return
    confirms = confirms and bool(state.best_accuracy)
    if not confirms or ("best" in saved and confirmed_of(saved["best"]) is not None):
        raise NothingLeft(nothing_left(directory, state.step, reason, notes), directory, state)


@dataclass(kw_only=True)
class TrainingRun(Run[RunState]):
    """Everything one run holds; the loop is in ``training.loop``."""

    mode: Mode
    algorithm: Algorithm
    val: Sequence[Scenario]
    confirm: Sequence[Scenario] = ()  # Questions that measure the best model once more at the end
    engine: Sampler
    evaluator: Collector
    updater: Updater
    rollouts: Rollouts
    total_steps: int
    bill: Bill = field(default_factory=Bill)  # What the judge costs
    play_on: PlayOn | None = None  # Plays rollouts while steps train; None alternates the two
    ahead: Ahead | None = field(default=None, init=False)
    _loaded_step: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._lag = self.settings.staleness
        self.mask_truncated = self.settings.algorithm.truncated_trajectories == "mask"  # keeps them out of the loss
        if self.play_on is not None:
            assert isinstance(self.engine, VllmServers)
            parts = self.rollouts, self.play_on, self.engine, self.state, self._lag, self.total_steps
            self.ahead = Ahead(*parts, self.hand_over, self.settings.training.rank_timeout)

    def refresh_engine(self) -> None:
        """Make the engine sample from the current policy."""
        self.engine.resume()
        step = self.state.step
        if step != self._loaded_step:
            self.engine.load_adapter(self._saved(step), version_of(step))
            self._loaded_step = step

    def hand_over(self, step: int) -> PinnedVersion:
        """An engine that samples from the policy after ``step``, or the current one if that is no longer kept. It
        remains to be loaded: see ``VllmServers.hand_over``."""
        assert isinstance(self.engine, VllmServers)
        if not (self.directory / "policy" / version_of(step)).exists():
            step = self.state.step
        if step == self._loaded_step:
            return self.engine.pin()
        pinned = self.engine.hand_over(self._saved(step), version_of(step))
        self._loaded_step = step
        return pinned

    def _saved(self, step: int) -> Path:
        """The directory of the policy after ``step``; the current one is saved there once, and never written again.
        What stays: that version, the previous one, those of rollouts ahead, and those from which a run resumed from the
        newest checkpoint samples its first steps."""
        folder = self.directory / "policy"
        version = folder / version_of(step)
        if not version.exists():
            beside = folder / f".{version.name}"
            beside.mkdir(parents=True, exist_ok=True)
            with naming(version):
                self.policy.save_adapter(beside, with_tokenizer=False)  # samplers get ids
            beside.rename(version)
            saved, lag = self.saved_step or 0, self._lag
            needed = {version_of(number) for number in range(saved - lag, saved)}
            outdated = sorted(folder.glob("v-*"))[: -2 - lag]
            remove_checkpoints(path for path in outdated if path.name not in needed)
        return version

    def collect(self) -> tuple[Collected, StepQuestions]:
        """The rollouts of the next step, run now or ahead, with the questions asked. Raises EmailRLError if every
        rollout raised."""
        step, display = self.state.step + 1, self.tracker.display
        if self.ahead is not None:
            display.phase(f"rollouts of step {step}")
            collected, questions = self.ahead.take()
            display.recorded(self.rollouts.file_of(f"step-{step:06d}.jsonl"), collected.trajectories)
            return collected, questions
        self.refresh_engine()
        questions = self.rollouts.questions(self.state)
        collected = self.rollouts.play(step, questions, display)
        self.engine.release()
        return collected, questions

    def evaluate_if_due(self) -> Evaluation | None:
        """Evaluate at step 0, every EVAL_STEPS and after the last step, unless already done or without questions."""
        state, wanted = self.state, self.settings.evaluation
        due = state.step % wanted.eval_steps == 0 or state.is_last(self.total_steps, self.rollouts.epochs)
        if not self.val or not due or state.last_evaluated == state.step:
            return None
        if self.ahead is not None:
            self.ahead.settle()
        self.refresh_engine()
        self.tracker.say(f"--- Evaluating at step {state.step} ---")
        evaluation = self.measure(self.val, state.step, "val")
        self.rollouts.record(f"eval-{state.step:06d}.jsonl", evaluation.trajectories, self.tracker.display)
        if evaluation.is_void:  # an outage is not an accuracy: it must not select a model or end a run
            state.last_evaluated, is_best = state.step, False
        else:
            is_best = state.note_evaluation(evaluation, wanted.patience)
        self.tracker.evaluation(evaluation)
        self.tracker.say(report.evaluation_block(evaluation, state, is_best=is_best))
        return evaluation

    def measure(self, questions: Sequence[Scenario], step: int, label: str) -> Evaluation:
        """Play the questions with the engine's current weights, then put the engine to sleep."""
        num_samples, display = self.settings.evaluation.eval_samples, self.tracker.display
        self.tracker.say(f"Evaluating on {counted(len(questions), 'question')} ...")
        phase = "evaluation" if label == "val" else "final check"
        display.phase(f"{phase} after step {step}", len(questions) * num_samples)
        seed, temperature = self.settings.training.seed, self.settings.agent.eval_temperature
        how = {"seed": seed, "temperature": temperature, "split_label": label, "progress": display.played}
        groups = self.evaluator.collect(questions, num_samples, step=step, **how)  # type: ignore[arg-type]
        self.engine.release()
        return Evaluation([trajectory for group in groups for trajectory in group.trajectories], step)

    def stop_reason(self) -> str | None:
        """Why the run ends here, or None if it continues."""
        return self.state.stop_reason(self.settings.evaluation, self.total_steps, self.rollouts.epochs)

    def train(self, samples: Sequence[TrainingSample], paid: Mapping[str, float]) -> UpdateResult:
        """Make the updates of the current step (``Updater.train``); keep the batches of those that were skipped.
        Without samples, this is logged, counted and skipped. Raises EmailRLError after too many skipped updates."""
        self.half_done = True
        step, tracker = self.state.step + 1, self.tracker
        tracker.display.phase(f"update of step {step}")
        if not samples:
            self.state.steps_without_update += 1
            so_far = counted(self.state.steps_without_update, "such step")
            tracker.say(f"Step {step}: no groups left to train on, no update ({so_far} so far).")
            return UpdateResult()
        result = self.updater.train(samples, paid, step=step)
        if result.skipped:
            folder, updates = self.directory / "skipped", counted(len(result.skipped), "update")
            for number, (broken, batches) in enumerate(result.skipped, 1):
                save_batches(folder, f"step-{step:06d}-{number}", batches, step, broken)
            tracker.say(f"Step {step}: {updates} skipped (non-finite loss or gradient); batches in {folder}.")
            hint = f"Lower LEARNING_RATE, or resume from an earlier checkpoint. Their batches are in {folder}."
            self.check_skipped(broken, step, hint)
        return result

    def record_training(
        self, collected: Collected, samples: Sequence[TrainingSample], tokens: Sequence[TokenNumbers]
    ) -> None:
        """Write what training adds to the current step's trajectories."""
        path = self.directory / "training" / f"step-{self.state.step + 1:06d}.jsonl"
        write_records(path, report.training_records(collected, samples, tokens, mask_truncated=self.mask_truncated))

    def end_step(self, metrics: Mapping[str, Any] | None = None) -> None:
        """Complete the step: save what is due, and warn of signs of collapse in ``metrics``. Raises EmailRLError at
        such a sign if ON_COLLAPSE is ``stop`` and the run would continue."""
        step = self.state.step
        alarms = report.watch(self.state, metrics, self.settings.algorithm.kl_target) if metrics else []
        self.complete_step()
        if self.state.best_step == step:
            self.save("best")
        if step and step % self.settings.output.save_steps == 0:
            self.save("checkpoint")
        for alarm in alarms:
            way_back = report.way_back(self.directory, alarm.good_step)
            self.tracker.say(f"Warning at step {step}: {alarm.warning} {way_back}")
        if alarms and self.settings.evaluation.on_collapse == "stop" and self.stop_reason() is None:
            # Another checkpoint-N would evict the oldest, which may be the one to return to.
            self.save("final")
            first = min((alarm.good_step for alarm in alarms), key=lambda good: -1 if good is None else good)
            what = f"Stopped at step {step} on signs of collapse (ON_COLLAPSE=stop)."
            raise EmailRLError(what, report.way_back(self.directory, first))

    def finish(self, reason: str) -> None:
        """Write ``final`` and the curves, and report why the run ended."""
        if self.ahead is not None:
            self.ahead.close()
            remove_records(self.directory, after=self.state.step)
        self.save("final")
        self.tracker.display.ended(reason)
        self.tracker.say(f"Curves saved to: {report.draw_curves(self.directory, self.settings)[0]}")
        self.tracker.say(report.outcome(self.state, reason, len(self.val), self.settings), is_result=True)

    @property
    def confirms(self) -> bool:
        """Whether ``confirm_best`` measures anything."""
        return bool(self.state.best_accuracy and self.confirm)

    def confirm_best(self) -> None:
        """Measure the best model on other questions: the best of many evaluations is partly luck."""
        if not self.confirms:
            return
        step = self.state.best_step or 0
        with self.interrupts.droppable():
            self.engine.resume()
            self.engine.load_adapter(self.directory / "best_model", f"best-{step}")
            confirmed = self.measure(self.confirm, step, "confirm")
        self.rollouts.record(f"confirm-{step:06d}.jsonl", confirmed.trajectories, self.tracker.display)
        record = {"step": step} | confirmed.metrics()
        replace_bytes(self.directory / CONFIRMED, (json.dumps(record, indent=2) + "\n").encode())
        asked = counted(confirmed.num_questions, "validation question")
        found = report.percent(confirmed.accuracy, confirmed.interval)
        said = f"best_model measured again on {asked} that did not select it: {found}"
        self.tracker.say(said, is_result=True)


def version_of(step: int) -> str:
    """The name of the policy after ``step``, as trajectories record it."""
    return f"v-{step:06d}"
