"""The loop with scripted parts: the order of events, steps that teach nothing, rollouts that all raise, early stops."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

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
from emailrl.training.algorithms import resolve
from emailrl.training.filtering import make_filter
from emailrl.training.interrupts import Interrupts
from emailrl.training.loop import loop
from emailrl.training.modes import MODES
from emailrl.training.resume import take_snapshot
from emailrl.training.run import Data, Run
from emailrl.training.state import Cursor, RunState, next_questions
from emailrl.training.tracking import Tracker
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
    ) -> None:
        self.rewards, self.accuracies, self.raises, self.outages = rewards, accuracies, raises, outages
        self.right = right
        """Questions of which the second rollout is right; None goes by the rewards."""
        self.truncated = truncated
        """The number of the rollout that is cut off at the token limit."""
        self.events: list[str] = []
        self.asked: list[tuple[str, list[str]]] = []
        self.observe: Any = None
        self.base_model, self.lora = "nano", {"rank": 1}

    def save_adapter(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "adapter_model.safetensors").write_text("x")

    def load_adapter(self, path: Path, version: str) -> None:
        assert path.name == version and (path / "adapter_model.safetensors").exists()
        self.events.append(f"load {version}")

    def release(self) -> None:
        self.events.append("release")

    def resume(self) -> None:
        self.events.append("resume")

    def collect(self, scenarios: list[Scenario], group_size: int, *, step: int, **how: Any) -> list[TrajectoryGroup]:
        evaluating = how.get("split_label") == "val"
        self.events.append(f"{'evaluate' if evaluating else 'collect'} {step}")
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

    def step(self, samples: list[Any], *, step: int) -> dict[str, float]:
        self.events.append(f"update {step}")
        for sample in samples:
            self.observe(sample, [0.0, 0.0, -0.5], [0.0, 0.0, -0.5], [0.0, 0.0, sample.advantage])
        tokens = {"trainable_tokens": sum(s.num_trainable for s in samples), "total_tokens": 3 * len(samples)}
        return {"loss": 0.5, "learning_rate": 1e-5} | tokens

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
    algorithm: Mapping[str, Any] = MappingProxyType({}),
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
    script, state = Script(rewards, list(accuracies), raises, outages, right, truncated), RunState()
    tracker = Tracker(directory, settings, run_id="r", step=0, say=said.append)
    part: Any = script
    run = Run(
        settings=settings,
        mode=MODES["masked"],
        algorithm=resolve(settings),
        data=Data(QUESTIONS, QUESTIONS, [], "d", "q"),
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


def test_the_order_of_events(tmp_path: Path) -> None:
    played = play(tmp_path)
    assert [event for event in played.events if event not in ("release", "resume")] == [
        "load v-000000", "evaluate 0",
        "collect 1", "update 1",
        "load v-000001", "collect 2", "update 2", "load v-000002", "evaluate 2",
        "collect 3", "update 3", "load v-000003", "evaluate 3",
    ]  # fmt: skip
    assert played.saved == {"best_model": 0, "checkpoint-2": 2, "final": 3}
    assert [(line["step"], line["epoch"], line.get("eval_accuracy")) for line in played.metrics] == [
        (1, 0, None),
        (2, 1, 0.0),  # the questions are done: the next step begins the next epoch
        (3, 1, 0.0),
    ]
    assert sorted(path.name for path in (tmp_path / "policy").iterdir()) == ["v-000002", "v-000003"]


def test_the_memory_is_the_trainers_between_rollout_and_rollout(tmp_path: Path) -> None:
    events = [event.split()[0] for event in play(tmp_path).events]
    awake = False
    for event in events:
        awake = event == "resume" or (awake and event != "release")
        assert awake == (event in ("resume", "load", "collect", "evaluate")), event


def test_a_steps_numbers_are_those_of_its_rollouts(tmp_path: Path) -> None:
    line = play(tmp_path, rewards=lambda step: [0.0, 1.5], steps=1).metrics[0]
    assert {name: line[name] for name in ("reward_mean", "reward_median", "reward_min", "reward_max", "accuracy")} == {
        "reward_mean": 0.75, "reward_median": 0.75, "reward_min": 0.0, "reward_max": 1.5, "accuracy": 0.5,
    }  # fmt: skip
    assert line["reward_std"] == pytest.approx(0.8660254)  # of 0, 1.5, 0, 1.5, divided by n - 1
    assert (line["trainable_tokens"], line["total_tokens"], line["trainable_share"]) == (4, 12, 1 / 3)
    assert line["num_trajectories"] == 4 and line["exceptions"] == 0


def test_what_training_adds_stands_under_the_trajectories_ids(tmp_path: Path) -> None:
    played = play(tmp_path, rewards=lambda step: [0.0, 1.5] if step == 1 else [0.5, 0.51], steps=2)
    first, second = (list(read_records(played.directory / f"training/step-00000{step}.jsonl")) for step in (1, 2))
    sample = {"loss_mask": [0, 0, 1], "old_logprobs": [None, None, -0.5], "ratio": [None, None, 1.0]}
    for number, record in enumerate(first):
        expected = 0.70704 if number % 2 else -0.70704  # ±0.75 / (1.06066 + 1e-4)
        assert record["advantage"] == pytest.approx(expected, abs=1e-5)
        assert record["dropped"] is None and record["samples"] == [sample]
    assert [(record["advantage"], record["dropped"], record["samples"]) for record in second] == [
        (None, "group_low_std", [])
    ] * 4


def test_a_step_without_a_group_left_is_said_and_counted_and_changes_nothing(tmp_path: Path) -> None:
    played = play(tmp_path, rewards=lambda step: [0.5, 0.5] if step < 3 else [0.0, 1.0])
    assert [event for event in played.events if event.startswith("update")] == ["update 3"]
    assert [line["dropped"]["groups_low_std"] for line in played.metrics] == [2, 2, 0]
    assert [line["loss"] for line in played.metrics] == [None, None, 0.5]
    assert [line["trainable_tokens"] for line in played.metrics] == [0, 0, 4]
    said = [line for line in played.said if "nothing is left" in line]
    assert said[1].startswith("Step 2: ") and "2 such steps so far" in said[1]


def test_a_refill_asks_further_questions_in_place_of_those_dropped_and_records_every_round(tmp_path: Path) -> None:
    order = [question.id for question in next_questions(QUESTIONS, Cursor(), 4, 42)[0]]
    played = play(
        tmp_path,
        steps=2,
        eval_steps=9,
        right=lambda step: {order[1], order[3]} if step == 1 else set(order),  # one of two members right: 0.5
        algorithm={"dynamic_filtering": True},
    )
    assert played.asked[:3] == [("train", order[:2]), ("refill-1", order[2:3]), ("refill-2", order[3:])]
    assert [label for label, _ in played.asked[3:]] == ["train"]  # the next step is full at once
    first, second = played.metrics
    assert (first["refill_rounds"], first["groups_kept"], first["num_trajectories"]) == (2, 2, 8)
    assert (second["refill_rounds"], second["groups_kept"], second["num_trajectories"]) == (0, 2, 4)
    assert first["dropped"]["groups_below_range"] == 2 and first["trainable_tokens"] == 4
    assert first["accuracy"] == 0.25  # over all that was played, not over what was kept
    log = (tmp_path / "training.log").read_text()
    assert log.index("Step 1: refill-1 asks 1 further questions") < log.index(
        "Step 1: refill-2 asks 1 further questions"
    )
    recorded = list(read_records(tmp_path / "trajectories/step-000001.jsonl"))
    assert [record["scenario"]["id"] for record in recorded] == [name for name in order for _ in range(2)]
    notes = {note["id"]: note["dropped"] for note in read_records(tmp_path / "training/step-000001.jsonl")}
    assert notes == {
        f"1-{name}-{n}": None if name in (order[1], order[3]) else "group_below_range" for name in order for n in (0, 1)
    }
    assert (first["epoch"], second["epoch"]) == (1, 1)
    assert played.events.count("release") == 4  # two evaluations and two steps, whatever their rounds


def test_what_was_played_before_an_interrupt_in_a_refill_is_on_record(tmp_path: Path) -> None:
    asked: list[int] = []

    def right(step: int) -> set[str]:
        asked.append(step)
        if len(asked) == 3:  # asked of each question once: this is the first of the refill
            raise KeyboardInterrupt
        return set()

    with pytest.raises(KeyboardInterrupt):
        play(tmp_path, right=right, algorithm={"dynamic_filtering": True})
    assert len(list(read_records(tmp_path / "trajectories/step-000001.jsonl"))) == 4
    assert not (tmp_path / "training/step-000001.jsonl").exists()


def test_a_step_that_no_refill_can_fill_is_skipped_and_said(tmp_path: Path) -> None:
    played = play(tmp_path, steps=1, right=lambda step: set(), algorithm={"dynamic_filtering": True})
    assert not [event for event in played.events if event.startswith("update")]
    assert played.metrics[0]["dropped"]["groups_below_range"] == 4 == len(QUESTIONS)
    assert any("Step 1: nothing is left to learn from, no update" in line for line in played.said)
    assert any("Dropped: 4 groups_below_range" in line for line in played.said)


def test_truncated_trajectories_stay_in_the_groups_statistics_but_train_nothing(tmp_path: Path) -> None:
    whole, masked = (
        play(tmp_path / how, steps=1, truncated=1, algorithm={"truncated_trajectories": how})
        for how in ("train", "mask")
    )
    assert (whole.metrics[0]["trainable_tokens"], masked.metrics[0]["trainable_tokens"]) == (4, 2)
    assert [played.metrics[0]["dropped"]["trajectories_truncated"] for played in (whole, masked)] == [0, 2]
    notes = list(read_records(tmp_path / "mask/training/step-000001.jsonl"))
    assert [note["dropped"] for note in notes] == [None, "truncated"] * 2
    assert [note["advantage"] for note in notes] == pytest.approx([-0.70704, 0.70704] * 2, abs=1e-5)
    assert [len(note["samples"]) for note in notes] == [1, 0] * 2


def test_a_step_in_which_every_rollout_raised_ends_the_run_with_the_error_and_keeps_the_last_step(
    tmp_path: Path,
) -> None:
    played = play(tmp_path, raises=2, eval_steps=9)
    assert played.said[-1].startswith(
        "error: Every rollout raised (step-000002); the first: OSError: the engine is gone"
    )
    assert played.saved == {"best_model": 0, "checkpoint-1": 1}
    assert len(list(read_records(tmp_path / "trajectories/step-000002.jsonl"))) == 4  # to be looked at
    assert [line["step"] for line in played.metrics] == [1]


def test_the_best_model_is_replaced_only_by_a_better_one(tmp_path: Path) -> None:
    played = play(tmp_path, accuracies=(0.25, 0.5, 0.5, 0.25), steps=3, eval_steps=1)
    assert played.saved["best_model"] == 1
    assert [line["accuracy_best"] for line in played.metrics] == [0.5, 0.5, 0.5]
    assert sum("New best accuracy" in line for line in played.said) == 2


@pytest.mark.parametrize(
    ("accuracies", "evaluation", "steps", "reason"),
    [
        ((1.0,), {}, 0, "target accuracy 95.0% reached"),
        ((0.0, 0.5, 1.0), {"eval_steps": 1}, 2, "target accuracy 95.0% reached"),
        ((0.5, 0.5, 0.25), {"eval_steps": 1, "patience": 2}, 2, "no better accuracy in 2 evaluations"),
        ((0.5, 0.5, 0.75, 0.5), {"eval_steps": 1, "patience": 2}, 3, "all steps done"),
    ],
)
def test_early_stops(
    accuracies: tuple[float, ...], evaluation: dict[str, Any], steps: int, reason: str, tmp_path: Path
) -> None:
    played = play(tmp_path, accuracies=accuracies, **evaluation)
    assert len(played.metrics) == steps and played.saved["final"] == steps
    assert f"Done after step {steps}: {reason}." in played.said[-1]


def test_an_evaluation_with_a_judge_outage_chooses_nothing_and_counts_for_nothing(tmp_path: Path) -> None:
    # Of 4 answers the judge misses one: 75 % and, at step 0, 0 % would have been the best.
    played = play(
        tmp_path, accuracies=(0.0, 0.5, 1.0, 0.25), outages={0: 3, 2: 1}, eval_steps=1, patience=2, target_accuracy=0.7
    )
    assert played.saved == {"best_model": 1, "checkpoint-2": 2, "final": 3}
    state = played.run.state
    assert (state.best_accuracy, state.best_step, state.evaluations_without_better) == (0.5, 1, 1)
    said = [line for line in played.said if "could not be scored" in line]
    assert [line.partition(" answers")[0] for line in said] == ["3 of 4", "1 of 4"]
    assert not any("Best accuracy so far: 0.0%" in line or "at step None" in line for line in played.said)
    evaluations = list(read_records(tmp_path / "evaluations.jsonl"))
    assert [(line["accuracy"], line["exceptions"]) for line in evaluations] == [(0, 3), (0.5, 0), (0.75, 1), (0.25, 0)]


def test_a_run_without_a_whole_evaluation_has_no_best_model(tmp_path: Path) -> None:
    played = play(tmp_path, outages={0: 1, 1: 1}, steps=1)
    assert played.saved == {"final": 1}
    assert played.said[-1] == ("Done after step 1: all steps done. No evaluation was whole: there is no best_model.")


def test_an_outage_at_every_answer_ends_the_run_with_the_error(tmp_path: Path) -> None:
    played = play(tmp_path, outages={2: 4})
    assert "the first: EmailRLError: the judge is away" in played.said[-1]
    assert [line["step"] for line in played.metrics] == [1] and played.saved == {"best_model": 0}


def test_the_loop_asks_for_no_modes_and_no_algorithms_name() -> None:
    from emailrl.training import loop as module
    from emailrl.training import run as run_module
    from emailrl.training.algorithms import ALGORITHMS

    for source in (module, run_module):
        tree = ast.parse(Path(str(source.__file__)).read_text())
        compared = {
            node.value
            for comparison in ast.walk(tree)
            if isinstance(comparison, ast.Compare | ast.Match)
            for node in ast.walk(comparison)
            if isinstance(node, ast.Constant)
        }
        assert not compared & {*MODES, *ALGORITHMS}
        assert not any(isinstance(node, ast.Attribute) and node.attr == "name" for node in ast.walk(tree))
