"""The loop with scripted parts: the order of events, records, refills, early stops, outages, the best model."""

from __future__ import annotations

import ast
import errno
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from training.scripted import QUESTIONS, Script, play

from emailrl.checkpoints import CONFIRMED
from emailrl.records import read_records, write_records
from emailrl.settings import Settings
from emailrl.training import loop as module
from emailrl.training import run as run_module
from emailrl.training.algorithms import ALGORITHMS, MODES
from emailrl.training.report import LAST_CURVE, curve, draw_curves
from emailrl.training.run import NothingLeft, check_unfinished


def test_the_order_of_events(tmp_path: Path) -> None:
    played = play(tmp_path)
    assert [event for event in played.events if event not in ("release", "resume")] == [
        "load v-000000", "evaluate 0",
        "collect 1", "update 1",
        "load v-000001", "collect 2", "update 2", "load v-000002", "evaluate 2",
        "collect 3", "update 3", "load v-000003", "evaluate 3",
    ]  # fmt: skip
    assert played.saved == {"best_model": 0, "checkpoint-2": 2, "final": 3}
    assert played.said[-2].endswith("No evaluation had a correct answer; best_model is from step 0.")
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


def test_a_step_in_which_every_rollout_raised_ends_the_run_with_the_error_and_keeps_the_last_step(
    tmp_path: Path,
) -> None:
    played = play(tmp_path, raises=2, eval_steps=9)
    assert "Every rollout failed (step-000002). First error: OSError: the engine is gone" in played.said[-1]
    assert played.saved == {"best_model": 0, "checkpoint-1": 1}
    assert len(list(read_records(tmp_path / "trajectories/step-000002.jsonl"))) == 4  # to be looked at
    assert [line["step"] for line in played.metrics] == [1]


def test_an_evaluation_that_fails_loses_nothing_of_the_step_before_it(tmp_path: Path) -> None:
    played = play(tmp_path, fails=1, eval_steps=1, steps=5)
    assert played.saved == {"best_model": 0, "checkpoint-1": 1}
    assert played.said[-2].startswith("Stopped after step 1, saved in ")
    assert [line["step"] for line in played.metrics] == [1]
    saved = torch.load(tmp_path / "checkpoint-1/trainer_state.pt", weights_only=True)["state"]
    assert saved["last_evaluated"] == 0  # the resumed run evaluates step 1


def test_a_run_that_fails_before_it_sampled_anything_leaves_no_checkpoint(tmp_path: Path) -> None:
    played = play(tmp_path, fails=0)
    assert played.saved == {} and not list(tmp_path.glob("checkpoint-*"))
    assert played.said[-2].startswith("Stopped before the first step;") and "the server is gone" in played.said[-1]


def test_a_full_disk_is_named_with_what_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save_adapter(self: Script, directory: Path, *, with_tokenizer: bool = True) -> None:
        if "checkpoint-2" in directory.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        (directory / "adapter_model.safetensors").write_text("x")

    monkeypatch.setattr(Script, "save_adapter", save_adapter)
    played = play(tmp_path, eval_steps=9)
    assert played.said[-2].startswith("Stopped after step 2, which cannot be saved (No space left on device); saved")
    assert f"'{tmp_path / 'checkpoint-2'}'" in played.said[-1]


def test_batches_of_skipped_updates_are_kept_and_the_third_in_a_row_ends_the_run(tmp_path: Path) -> None:
    played = play(tmp_path, skips={1, 2, 4, 5, 6}, steps=9, eval_steps=9)
    assert "The loss is nan at step 6, in the third update in a row; the weights are as before" in played.said[-1]
    assert played.said[-2] == (
        "Stopped in step 6; saved up to step 4; the same command with --resume latest continues."
    )
    assert played.saved == {"best_model": 0, "checkpoint-2": 2, "checkpoint-4": 4}
    assert [line["step"] for line in played.metrics] == [1, 2, 3, 4, 5]
    kept = {path.stem for path in (tmp_path / "skipped").iterdir()}
    assert kept == {f"step-00000{step}-1" for step in (1, 2, 4, 5, 6)}
    said = json.loads((tmp_path / "skipped/step-000006-1.json").read_text())
    rolled_out = {each["id"] for each in read_records(tmp_path / "trajectories/step-000006.jsonl")}
    assert said["not_finite"] == {"loss": "nan"} and {row["trajectory_id"] for row in said["rows"]} == rolled_out


def test_rollouts_ahead_of_the_trainer_are_played_by_kept_versions_and_removed_where_the_run_ends(
    tmp_path: Path,
) -> None:
    played = play(tmp_path, accuracies=(0.0, 0.5, 1.0), steps=9, staleness=1)
    # Step n is played by the policy after step n - 2; the evaluation after step 4 ends the run while step 5 is played.
    collected = sorted(event for event in played.events if event.startswith("collect"))
    assert collected == [f"collect {step} by v-{max(0, step - 2):06d}" for step in range(1, 6)]
    assert [event for event in played.events if event.startswith("load")] == [f"load v-{step:06d}" for step in range(5)]
    assert played.saved["final"] == 4 and [line["step"] for line in played.metrics] == [1, 2, 3, 4]
    assert [line["servers_up"] for line in played.metrics] == [2] * 4  # one of three has failed
    kept = sorted(path.name for path in (tmp_path / "trajectories").glob("*.jsonl"))
    assert kept == [*(f"eval-00000{n}.jsonl" for n in (0, 2, 4)), *(f"step-00000{n}.jsonl" for n in (1, 2, 3, 4))]
    # A run resumed from checkpoint-4 plays step 5 by version 3 again.
    assert "v-000003" in {path.name for path in (tmp_path / "policy").iterdir()}
    assert played.run.hand_over(0).version == "v-000004"  # the current one, where a version is no longer kept


def test_a_run_is_over_only_with_everything_that_it_leaves_at_its_end(tmp_path: Path) -> None:
    others = [replace(question, id=f"other{n}") for n, question in enumerate(QUESTIONS)]
    state = play(tmp_path, accuracies=(0.25, 0.75, 0.5, 0.5), steps=2, eval_steps=1, confirm=others).run.state

    def over(reason: str | None = "all steps done", *, confirms: bool = True) -> bool:
        try:
            check_unfinished(tmp_path, state, reason, [], confirms=confirms)
        except NothingLeft as left:
            said = f"Nothing left to do in {tmp_path}: it ended after step 2, all steps done."
            assert left.args == (said, tmp_path, state)
            return True
        return False

    assert over() and not over(None)
    for name, needed in ((CONFIRMED, False), (LAST_CURVE, True), ("final", True)):
        (tmp_path / name).rename(tmp_path / "away")
        assert not over() and over(confirms=False) != needed
        (tmp_path / "away").rename(tmp_path / name)
    assert over()
    for name in ("best_model", "final"):
        (tmp_path / name / "adapter_model.safetensors").write_text("damaged")
        assert not over() and not over(confirms=False)
        (tmp_path / name / "adapter_model.safetensors").write_text("x")
    state.step = 3  # one more since ``final`` was written
    assert not over()


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
        ((0.5, 0.5), {"eval_steps": 1, "patience": 1}, 1, "no better accuracy in 1 evaluation (+0.0 points"),
        ((0.5, 0.75, 0.5, 0.75), {"eval_steps": 1, "patience": 1}, 3, "all steps done"),
    ],
)
def test_early_stops(
    accuracies: tuple[float, ...], evaluation: dict[str, Any], steps: int, reason: str, tmp_path: Path
) -> None:
    played = play(tmp_path, accuracies=accuracies, **evaluation)
    assert len(played.metrics) == steps and played.saved["final"] == steps
    assert f"Done after step {steps}: {reason}" in played.said[-1]


def test_the_best_model_is_measured_on_questions_that_did_not_choose_it(tmp_path: Path) -> None:
    others = [replace(question, id=f"other{n}") for n, question in enumerate(QUESTIONS)]
    played = play(tmp_path, accuracies=(0.25, 0.75, 0.5, 0.5), steps=2, eval_steps=1, confirm=others)
    best = "Best accuracy 75.0% (95% interval 30.1% to 95.4%) at step 1, on the 4 validation questions that selected"
    assert played.said[-3].endswith(f"all steps done. {best} best_model.")
    assert (tmp_path / "curve.png").is_file() and (tmp_path / "curve.svg").is_file()
    again = "best_model measured again on 4 validation questions that did not select it"
    assert played.said[-1] == f"{again}: 50.0% (95% interval 15.0% to 85.0%)"
    assert played.events[-4:] == ["resume", "load best-1", "confirm 1", "release"]
    record = json.loads((tmp_path / "confirmed.json").read_text())
    assert (record["step"], record["accuracy"], record["num_questions"]) == (1, 0.5, 4)
    kept = read_records(tmp_path / "trajectories" / "confirm-000001.jsonl")
    assert [each["scenario"]["id"] for each in kept] == [f"other{n}" for n in range(4)]


def test_an_evaluation_with_a_judge_outage_chooses_nothing_and_counts_for_nothing(tmp_path: Path) -> None:
    # Of 4 answers the judge misses one: the 100 % of the others would have been the best.
    played = play(
        tmp_path, accuracies=(0.0, 0.5, 1.0, 0.25), outages={0: 3, 2: 1}, eval_steps=1, patience=2, target_accuracy=0.7
    )
    assert played.saved == {"best_model": 1, "checkpoint-2": 2, "final": 3}
    state = played.run.state
    assert (state.best_accuracy, state.best_step, state.evaluations_without_better) == (0.5, 1, 1)
    said = [line for line in played.said if "have no verdict" in line]
    assert [line.rpartition(" answers have")[0].split("\n")[-1] for line in said] == ["3 of 4", "1 of 4"]
    assert not any("Best accuracy so far: 0.0%" in line or "at step None" in line for line in played.said)
    evaluations = list(read_records(tmp_path / "evaluations.jsonl"))
    assert [(line["accuracy"], line["exceptions"]) for line in evaluations] == [(0, 3), (0.5, 0), (1, 1), (0.25, 0)]


def test_one_answer_in_twenty_without_a_verdict_voids_no_evaluation(tmp_path: Path) -> None:
    val = [replace(QUESTIONS[0], id=f"val{n}") for n in range(20)]
    played = play(tmp_path, accuracies=(0.0, 0.5, 1.0), outages={1: 1, 2: 2}, eval_steps=1, steps=2, val=val)
    # 9 of the 19 judged are right; two of 20 without a verdict are too many.
    assert (played.run.state.best_accuracy, played.run.state.best_step) == (9 / 19, 1)
    told = "\n".join(played.said)
    assert "Eval accuracy: 47.4% (9 of 19, 95% interval" in told
    assert "1 of 20 answers have no verdict, and are excluded from the accuracy." in told
    assert "2 of 20 answers have no verdict, so this evaluation does not count for the best model" in told


def test_a_run_without_a_whole_evaluation_has_no_best_model(tmp_path: Path) -> None:
    played = play(tmp_path, outages={0: 1, 1: 1}, steps=1)
    assert played.saved == {"final": 1}
    assert played.said[-1] == ("Done after step 1: all steps done. No evaluation selected a best_model.")


def test_an_outage_at_every_answer_ends_the_run_with_the_error(tmp_path: Path) -> None:
    played = play(tmp_path, outages={2: 4})
    assert "First error: EmailRLError: the judge is away" in played.said[-1]
    assert [line["step"] for line in played.metrics] == [1, 2]
    assert played.saved == {"best_model": 0, "checkpoint-2": 2}


def test_a_run_without_any_update_says_so_at_its_end(tmp_path: Path) -> None:
    played = play(tmp_path, rewards=lambda step: [1.0, 1.0], accuracies=(0.5, 0.5), steps=2)
    assert played.said[-1].startswith("Nothing was learned: 2 steps without an update")
    assert "Dropped: 2 groups with nearly equal rewards" in "\n".join(played.said)
    one = play(tmp_path / "one", rewards=lambda step: [0.0, 1.5 * (step == 2)], accuracies=(0.5, 0.5), steps=2)
    assert not any("Nothing was learned" in line for line in one.said)


def test_curves_are_drawn_of_whatever_the_run_has(tmp_path: Path) -> None:
    records = [{"step": 1, "accuracy": 0.5}, {"step": 2, "accuracy": None}, {"step": 3}]
    assert curve(records, "accuracy") == [(1, 0.5)]
    write_records(tmp_path / "metrics.jsonl", [])
    write_records(tmp_path / "evaluations.jsonl", [])
    settings = Settings().with_model("a $model$ of $1")
    png, svg = draw_curves(tmp_path, settings)
    empty = svg.read_bytes()
    assert (png, svg) == (tmp_path / "curve.png", tmp_path / "curve.svg")
    write_records(tmp_path / "metrics.jsonl", [{"step": 1, "accuracy": None, "reward_mean": 0.5}])
    evaluation = {"step": 0, "accuracy": 0.5, "accuracy_low": 0.25, "accuracy_high": 0.75, "reward": None}
    write_records(tmp_path / "evaluations.jsonl", [evaluation])
    draw_curves(tmp_path, settings)
    assert svg.read_bytes() != empty


def test_the_loop_asks_for_no_modes_and_no_algorithms_name() -> None:
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
