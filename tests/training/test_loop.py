"""The loop with scripted parts: the order of events, what is recorded, steps that teach nothing, refills."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from training.scripted import QUESTIONS, play

from emailrl.records import read_records
from emailrl.training.algorithms import MODES
from emailrl.training.state import Cursor, StepQuestions


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
    said = [line for line in played.said if "no groups left" in line]
    assert said[1].startswith("Step 2: ") and "2 such steps so far" in said[1]


def test_a_refill_asks_further_questions_in_place_of_those_dropped_and_records_every_round(tmp_path: Path) -> None:
    order = [question.id for question in StepQuestions(QUESTIONS, Cursor(), 42, epochs=None).take(4)]
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
    assert log.index("Step 1: refill-1 asks 1 more questions") < log.index("Step 1: refill-2 asks 1 more questions")
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


def test_truncated_trajectories_stay_in_the_groups_statistics_but_train_nothing(tmp_path: Path) -> None:
    whole, masked = (
        play(tmp_path / how, steps=1, truncated=1, algorithm={"truncated_trajectories": how})
        for how in ("train", "mask")
    )
    assert (whole.metrics[0]["trainable_tokens"], masked.metrics[0]["trainable_tokens"]) == (4, 2)
    assert [played.metrics[0]["dropped"]["trajectories_truncated"] for played in (whole, masked)] == [0, 2]
    notes = list(read_records(tmp_path / "mask/training/step-000001.jsonl"))
    assert [note["dropped"] for note in notes] == [None, "truncated"] * 2
    # What was compared with the others is the rest's: ±0.75 / (1.06066 + 1e-4).
    assert [note["advantage"] for note in notes] == [pytest.approx(-0.70704, abs=1e-5), None] * 2
    assert [len(note["samples"]) for note in notes] == [1, 0] * 2


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
        named = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "name"]
        assert all(ast.unparse(node.value) in ("version", "path") for node in named)
