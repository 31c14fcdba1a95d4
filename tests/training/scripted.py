"""A run whose parts that need a model are scripted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from emailrl.checkpoints import list_checkpoints
from emailrl.errors import EmailRLError
from emailrl.recording import read_records
from emailrl.settings import (
    AlgorithmSettings,
    EvaluationSettings,
    OutputSettings,
    Settings,
    TrackingSettings,
    TrainingSettings,
)
from emailrl.training.loop import loop
from emailrl.training.mix import resolve
from emailrl.training.run.filtering import make_filter
from emailrl.training.run.interrupts import Interrupts
from emailrl.training.run.modes import MODES
from emailrl.training.run.questions import Data
from emailrl.training.run.resume import take_snapshot
from emailrl.training.run.run import Run
from emailrl.training.run.state import RunState
from emailrl.training.run.tracking import Tracker
from emailrl.training.step.meter import StepResult, TokenNumbers
from emailrl.training.step.samples import TrainingSample
from emailrl.trajectory import Scenario, StopReason, TokenSample, Trajectory, TrajectoryGroup, Turn

QUESTIONS = [Scenario(f"q{n}", "?", "!", [], "a@x", "2001-01-01") for n in range(4)]


class Script:
    """Every part of a run that would need a model: notes what is asked of it, answers as it was told."""

    def __init__(
        self,
        rewards: Callable[[int], list[float]],
        accuracies: list[float],
        raises: int | None,
        outages: Mapping[int, int],
        right: Callable[[int], set[str]] | None = None,
        truncated: int | None = None,
        entropy: Callable[[int], float] = lambda step: 0.1,
    ) -> None:
        self.entropy = entropy
        self.rewards, self.accuracies, self.raises, self.outages = rewards, accuracies, raises, outages
        self.right = right
        """Questions of which the second rollout is right; None goes by the rewards."""
        self.truncated = truncated
        """The number of the rollout that is cut off at the token limit."""
        self.events: list[str] = []
        self.asked: list[tuple[str, list[str]]] = []
        self.base_model, self.lora = "nano", {"rank": 1}

    def save_adapter(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "adapter_model.safetensors").write_text("x")

    def load_adapter(self, path: Path, version: str) -> None:
        assert version in (path.name, "best-1", "best-2") and (path / "adapter_model.safetensors").exists()
        self.events.append(f"load {version}")

    def release(self) -> None:
        self.events.append("release")

    def resume(self) -> None:
        self.events.append("resume")

    def collect(self, scenarios: list[Scenario], group_size: int, *, step: int, **how: Any) -> list[TrajectoryGroup]:
        evaluating = how.get("split_label") in ("val", "confirm")
        label = {"val": "evaluate", "confirm": "confirm"}.get(how["split_label"], "collect")
        self.events.append(f"{label} {step}")
        groups = []
        if not evaluating:
            self.asked.append((how["split_label"], [scenario.id for scenario in scenarios]))
        for scenario in scenarios:
            rewards = [0.0] if evaluating else self.rewards(step)
            members = [self._play(scenario, n, step, reward) for n, reward in enumerate(rewards)]
            if self.right is not None and not evaluating:
                for member in members:
                    member.rubric["answer_correct"] = (member.id.endswith("-1")) and scenario.id in self.right(step)
            groups.append(TrajectoryGroup(f"{step}-{scenario.id}", scenario, members))
        if evaluating:
            right = round(self.accuracies.pop(0) * len(groups))
            for group in groups[:right]:
                group.trajectories[0].rubric["answer_correct"] = True
            for group in groups[: self.outages.get(step, 0)]:
                group.trajectories[0].exception = "EmailRLError: the judge is away"
                group.trajectories[0].rubric["answer_correct"] = None
        return groups

    def _play(self, scenario: Scenario, number: int, step: int, reward: float) -> Trajectory:
        sample = TokenSample([1, 2, 7], [0, 0, 1], [None, None, -0.5])
        exception = "OSError: the engine is gone" if step == self.raises else None
        return Trajectory(
            f"{step}-{scenario.id}-{number}",
            f"{step}-{scenario.id}",
            scenario,
            turns=[Turn([7], [-0.5], "stop")],
            samples=[sample],
            reward=reward,
            rubric={"answer_correct": reward > 1},
            stop_reason=StopReason.TRUNCATED if number == self.truncated else None,
            exception=exception,
        )

    def train(self, samples: list[TrainingSample], paid: Mapping[str, float], *, step: int) -> StepResult:
        self.events.append(f"update {step}")
        tokens = {"trainable_tokens": sum(s.num_trainable for s in samples), "total_tokens": 3 * len(samples)}
        metrics = {"loss": 0.5, "learning_rate": 1e-5, "entropy": self.entropy(step)} | tokens
        logprobs = [0.0, 0.0, -0.5]
        return StepResult(
            metrics, [TokenNumbers(logprobs, logprobs, [0.0, 0.0, paid[s.trajectory_id]]) for s in samples]
        )

    def state_dict(self) -> dict[str, Any]:
        return {}


class Played:
    """A finished run: its script's events, lines said and directory."""

    def __init__(self, run: Run, script: Script, said: list[str]) -> None:
        self.run, self.events, self.said, self.directory = run, script.events, said, run.directory
        self.asked = script.asked
        self.metrics = list(read_records(run.directory / "metrics.jsonl"))
        self.saved = {item.path.name: item.metadata.step for item in list_checkpoints(run.directory)}


def play(
    directory: Path,
    *,
    rewards: Callable[[int], list[float]] = lambda step: [0.0, 1.5],
    accuracies: tuple[float, ...] = (0.0,) * 9,
    raises: int | None = None,
    outages: Mapping[int, int] = MappingProxyType({}),
    steps: int = 3,
    right: Callable[[int], set[str]] | None = None,
    truncated: int | None = None,
    val_repeats: int = 1,
    confirm: Sequence[Scenario] = (),
    algorithm: Mapping[str, Any] = MappingProxyType({}),
    entropy: Callable[[int], float] = lambda step: 0.1,
    **evaluation: Any,
) -> Played:
    settings = Settings(
        algorithm=AlgorithmSettings(**algorithm),
        training=TrainingSettings(per_device_train_batch_size=2, num_generations=2, max_steps=steps),
        evaluation=EvaluationSettings(**{"eval_steps": 2} | evaluation),
        output=OutputSettings(save_steps=2),
        tracking=TrackingSettings(wandb_mode="disabled"),
    )
    said: list[str] = []
    script, state = Script(rewards, list(accuracies), raises, outages, right, truncated, entropy), RunState()
    tracker = Tracker(directory, settings, run_id="r", step=0, say=said.append)
    part: Any = script
    run = Run(
        settings=settings,
        mode=MODES["masked"],
        algorithm=resolve(settings),
        data=Data(QUESTIONS, QUESTIONS * val_repeats, [], "d", "q", list(confirm)),
        run_id="r",
        parent=None,
        directory=directory,
        state=state,
        policy=part,
        engine=part,
        collector=part,
        evaluator=part,
        updater=part,
        tracker=tracker,
        interrupts=Interrupts(said.append),
        filter=make_filter(resolve(settings), settings.algorithm, answers=True),
        total_steps=steps,
        epochs=None,
        snapshot=take_snapshot(state),
    )
    try:
        loop(run)
    except EmailRLError as error:
        run.rescue()
        said.append(f"error: {error}")
    finally:
        tracker.close()
    return Played(run, script, said)
