"""A run whose parts that need a model are scripted: they note what is asked of them, and answer as they were told."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from emailrl.base.errors import EmailRLError
from emailrl.checkpoints import list_checkpoints
from emailrl.engines.vllm.replica import Replica
from emailrl.engines.vllm.servers import VllmServers
from emailrl.records import read_records
from emailrl.records.trajectory import Scenario, StopReason, TokenSample, Trajectory, TrajectoryGroup, Turn
from emailrl.runs.log import Display, Tracker
from emailrl.runs.run import Interrupts, Origin
from emailrl.settings import (
    AgentSettings,
    AlgorithmSettings,
    EvaluationSettings,
    OutputSettings,
    Settings,
    TrackingSettings,
    TrainingSettings,
    VllmSettings,
)
from emailrl.training.algorithms import MODES, resolve
from emailrl.training.batch import Layout, TrainingSample, micro_batches
from emailrl.training.loop import loop
from emailrl.training.run import TrainingRun
from emailrl.training.state import Rollouts, RunState, make_filter
from emailrl.training.update import TokenNumbers, UpdateResult

QUESTIONS = [Scenario(f"q{n}", "?", "!", [], "a@x", "2001-01-01") for n in range(4)]


@dataclass
class Script:
    """What the parts of a run answer that need a model: policy, engine, updater, and who plays and evaluates."""

    accuracies: list[float]  # Of the evaluations, in order
    rewards: Callable[[int], list[float]]  # Of a group's members, by the step
    right: Callable[[int], set[str]] | None  # Questions of which the second rollout is right; None goes by the rewards
    raises: int | None  # The step in which every rollout raises
    fails: int | None  # The step whose evaluation raises
    outages: Mapping[int, int]  # By the step, how many answers of its evaluation the judge misses
    truncated: int | None  # The number of the rollout that is cut off at the token limit
    entropy: Callable[[int], float]
    skips: Collection[int]  # The steps whose update is not finite
    play: str = ""  # The version that plays ahead of the trainer
    skipped_in_a_row: int = 0
    events: list[str] = field(default_factory=list)
    asked: list[tuple[str, list[str]]] = field(default_factory=list)
    base_model = "nano"
    lora: ClassVar[dict[str, int]] = {"rank": 1}

    def save_adapter(self, directory: Path, *, with_tokenizer: bool = True) -> None:
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
        label = how["split_label"]
        if label in ("val", "confirm"):
            return self._evaluated("evaluate" if label == "val" else label, scenarios, step)
        self.events.append(f"collect {step}" + f" by {self.play}" * bool(self.play))
        self.asked.append((label, [scenario.id for scenario in scenarios]))
        groups = []
        for scenario in scenarios:
            members = [rollout(scenario, n, step, reward) for n, reward in enumerate(self.rewards(step))]
            for number, member in enumerate(members):
                if step == self.raises:
                    member.exception = "OSError: the engine is gone"
                if number == self.truncated:
                    member.stop_reason = StopReason.TRUNCATED
                if self.right is not None:
                    member.rubric["answer_correct"] = number == 1 and scenario.id in self.right(step)
            groups.append(TrajectoryGroup(f"{step}-{scenario.id}", scenario, members))
        return groups

    def _evaluated(self, event: str, scenarios: list[Scenario], step: int) -> list[TrajectoryGroup]:
        self.events.append(f"{event} {step}")
        if step == self.fails:
            raise EmailRLError("the server is gone")
        played = [rollout(scenario, 0, step, 0.0) for scenario in scenarios]
        for one in played[: round(self.accuracies.pop(0) * len(played))]:
            one.rubric["answer_correct"] = True
        for one in played[: self.outages.get(step, 0)]:
            one.exception = "EmailRLError: the judge is away"
            one.rubric["answer_correct"] = None
        return [TrajectoryGroup(one.group_id, one.scenario, [one]) for one in played]

    def train(self, samples: list[TrainingSample], paid: Mapping[str, float], *, step: int) -> UpdateResult:
        self.events.append(f"update {step}")
        tokens = {"trainable_tokens": sum(s.num_trainable for s in samples), "total_tokens": 3 * len(samples)}
        metrics = {"loss": 0.5, "learning_rate": 1e-5, "entropy": self.entropy(step)} | tokens
        rows = ([0.0, 0.0, paid[sample.trajectory_id]] for sample in samples)
        tokens_of = [TokenNumbers([0.0, 0.0, -0.5], [0.0, 0.0, -0.5], row) for row in rows]
        broken = step in self.skips
        self.skipped_in_a_row = (self.skipped_in_a_row + 1) * broken
        batches = micro_batches(samples, Layout(99))
        return UpdateResult(metrics, tokens_of, [({"loss": math.nan}, batches)] * broken)

    def state_dict(self) -> dict[str, Any]:
        return {}


class Servers(Script, VllmServers):
    """An engine that loads a version, slowly, while the trainer goes on."""

    loading = False
    replicas: ClassVar = [Replica("http://one"), Replica("http://two", alive=False), Replica("http://three")]

    def load_adapter(self, path: Path, version: str) -> None:
        assert not self.loading, "versions are loaded one after the other"
        super().load_adapter(path, version)

    def hand_over(self, path: Path | None, version: str) -> Any:
        assert path is not None and path.name == version and path.is_dir()
        return Pinned(self, version, is_new=True)

    def pin(self) -> Any:
        return Pinned(self, [event for event in self.events if event.startswith("load ")][-1].split()[1])

    def settle(self) -> None: ...


@dataclass
class Pinned:
    """Stays on one version."""

    servers: Servers
    version: str
    is_new: bool = False

    def load(self) -> None:
        self.servers.loading = self.is_new
        time.sleep(0.1 * self.is_new)
        self.servers.events.append(f"load {self.version}" * self.is_new)
        self.servers.loading = False

    def cancel(self) -> None: ...

    def close(self) -> None: ...


def rollout(scenario: Scenario, number: int, step: int, reward: float) -> Trajectory:
    """A rollout of one sampled token; right where its reward is above 1."""
    return Trajectory(
        f"{step}-{scenario.id}-{number}",
        f"{step}-{scenario.id}",
        scenario,
        turns=[Turn([7], [-0.5], "stop")],
        samples=[TokenSample([1, 2, 7], [0, 0, 1], [None, None, -0.5])],
        reward=reward,
        rubric={"answer_correct": reward > 1},
    )


class Played:
    """A finished run: its events, questions asked, lines said and directory."""

    def __init__(self, run: TrainingRun, script: Script, said: list[str]) -> None:
        self.run, self.said, self.directory = run, said, run.directory
        self.events, self.asked = script.events, script.asked
        self.metrics = list(read_records(run.directory / "metrics.jsonl"))
        self.saved = {item.path.name: item.metadata.step for item in list_checkpoints(run.directory)}


def play(
    directory: Path,
    *,
    rewards: Callable[[int], list[float]] = lambda step: [0.0, 1.5],
    accuracies: tuple[float, ...] = (0.0,) * 9,
    raises: int | None = None,
    outages: Mapping[int, int] = MappingProxyType({}),
    fails: int | None = None,
    steps: int = 3,
    right: Callable[[int], set[str]] | None = None,
    truncated: int | None = None,
    val: Sequence[Scenario] = QUESTIONS,
    confirm: Sequence[Scenario] = (),
    algorithm: Mapping[str, Any] = MappingProxyType({}),
    entropy: Callable[[int], float] = lambda step: 0.1,
    skips: Collection[int] = (),
    staleness: int = 0,
    **evaluation: Any,
) -> Played:
    settings = Settings(
        algorithm=AlgorithmSettings(**algorithm),
        training=TrainingSettings(per_device_train_batch_size=2, num_generations=2, max_steps=steps),
        evaluation=EvaluationSettings(**{"eval_steps": 2} | evaluation),
        output=OutputSettings(save_steps=2),
        tracking=TrackingSettings(wandb_mode="disabled"),
        agent=AgentSettings(engine="vllm" if staleness else "auto"),
        vllm=VllmSettings(max_staleness=staleness, vllm_urls="http://127.0.0.1:1" if staleness else ""),
    )
    said: list[str] = []
    tracker = Tracker(directory, settings, Display(said.append), run_id="r", mode="masked", step=0, evaluated=0)
    parts = list(accuracies), rewards, right, raises, fails, outages, truncated, entropy, skips
    script: Any = (Servers if staleness else Script)(*parts)
    wanted = make_filter(resolve(settings), settings.algorithm, answers=True)
    run = TrainingRun(
        settings=settings, mode=MODES["masked"], algorithm=resolve(settings), directory=directory,
        origin=Origin("r", "masked", "grpo", "d", "q"), val=val, confirm=confirm,
        state=RunState(), policy=script, engine=script, evaluator=script, updater=script,
        rollouts=Rollouts(settings.training, QUESTIONS, directory, wanted, script, None, 2),
        tracker=tracker, interrupts=Interrupts(said.append), total_steps=steps,
        play_on=(lambda engine, activity: engine.version) if staleness else None,
    )  # fmt: skip
    try:
        with run.rescued():
            run.finish(loop(run))
        run.confirm_best()
    except (EmailRLError, OSError) as error:
        said.append(f"error: {error}")
    finally:
        tracker.close()
    return Played(run, script, said)
