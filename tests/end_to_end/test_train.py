"""What a run leaves, mode by mode; and one with a critic, a sampler correction and an update that is not finite."""

from __future__ import annotations

from typing import Any

import pytest
from end_to_end.conftest import MakeSettings

from emailrl.checkpoints import list_checkpoints, sha256_of, verify
from emailrl.measure.evaluation import wilson_interval
from emailrl.records import read_records, read_trajectories
from emailrl.training.loop import TrainResult, train
from emailrl.training.update import Updater


def test_a_run_leaves_best_final_and_numbered_checkpoints_that_verify(finished: TrainResult) -> None:
    checkpoints = {item.path.name: verify(item).metadata for item in list_checkpoints(finished.run_dir)}
    assert {name: (data.kind, data.step) for name, data in checkpoints.items()} == {
        "best_model": ("best", 0),  # no answer is right, and of equals the earlier stays
        "checkpoint-4": ("checkpoint", 4),
        "checkpoint-6": ("checkpoint", 6),
        "final": ("final", 6),
    }
    assert (finished.best_step, finished.best_accuracy, finished.steps) == (0, 0.0, 6)
    for name, data in checkpoints.items():
        files = {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "trainer_state.pt"}
        assert files <= set(data.files), name
        assert data.metrics["accuracy"] == 0.0 and "reward" in data.metrics
        assert (data.mode, data.algorithm, data.seed, data.parent) == ("masked", "grpo", 42, None)


def test_metrics_have_one_line_a_step_with_every_number(finished: TrainResult) -> None:
    metrics = list(read_records(finished.run_dir / "metrics.jsonl"))
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5, 6]
    names = (
        "loss policy_loss kl kl_coef reward_mean reward_std reward_median reward_min reward_max accuracy"
        " accuracy_moving accuracy_best answer_correct sources_correct num_turns duration trainable_tokens"
        " total_tokens trainable_share dropped exceptions clip_fraction entropy grad_norm learning_rate seconds"
    )
    for line in metrics:
        assert all(line[name] is not None for name in names.split())
        assert line["seconds"].keys() == {"rollout", "update", "evaluation", "total"}
        assert line["trainable_tokens"] == 2 * 3 * 8
        assert line["trainable_share"] == line["trainable_tokens"] / line["total_tokens"]
    assert [line["learning_rate"] for line in metrics] == pytest.approx([0.005, 0.01, 0.01, 0.01, 0.01, 0.01])
    assert ["eval_accuracy" in line for line in metrics] == [False, True] * 3
    evaluations = list(read_records(finished.run_dir / "evaluations.jsonl"))
    assert [line["step"] for line in evaluations] == [0, 2, 4, 6]
    assert [line["accuracy_high"] for line in evaluations] == [wilson_interval(0, 3)[1]] * 4
    assert "Step 6/6 | Loss: " in (finished.run_dir / "training.log").read_text()


def test_trajectories_name_the_adapter_they_were_sampled_from(finished: TrainResult) -> None:
    run = finished.run_dir
    (last,) = {(t.policy_version, t.adapter_sha256) for t in read_trajectories(run / "trajectories/step-000006.jsonl")}
    assert last == ("v-000005", sha256_of(run / "policy/v-000005/adapter_model.safetensors"))
    (evaluated,) = {t.adapter_sha256 for t in read_trajectories(run / "trajectories/eval-000006.jsonl")}
    assert evaluated == sha256_of(run / "final/adapter_model.safetensors")


@pytest.mark.parametrize(("mode", "steps"), [("simple", 3), ("rollout", 3), ("masked", 4)])
def test_epochs_bound_simple_and_rollout_and_max_steps_bounds_all(
    mode: str, steps: int, make_settings: MakeSettings
) -> None:
    settings = make_settings(
        mode=mode, max_steps=4, num_train_epochs=1, per_device_train_batch_size=4, eval_steps=9, num_mini_batches=1
    )
    result = train(settings)
    assert result.steps == steps and result.run_dir.name == f"grpo_{mode}"
    asked = [
        {t.scenario.id for t in read_trajectories(result.run_dir / f"trajectories/step-{step:06d}.jsonl")}
        for step in (1, 2, 3)
    ]
    assert [len(names) for names in asked] == [4, 4, 2] and len(set.union(*asked)) == 10  # an epoch, each once


def test_refills_pass_through_the_epochs_faster_and_end_the_run_with_them(make_settings: MakeSettings) -> None:
    settings = make_settings(
        mode="rollout", num_train_epochs=1, per_device_train_batch_size=4, eval_steps=9, max_refill_rounds=9,
        dynamic_filtering=True, filter_on="reward", filter_low=5, filter_high=6, overlong_buffer=4,
    )  # fmt: skip
    said: list[str] = []
    result = train(settings, progress=said.append)
    assert result.steps == 1 and any("Done after step 1: all epochs done" in line for line in said)
    played = list(read_trajectories(result.run_dir / "trajectories/step-000001.jsonl"))
    assert len({t.id for t in played}) == 30 and len({t.scenario.id for t in played}) == 10  # the epoch, each once
    assert [t.id.split("-0000")[0] for t in played[::3]] == ["train"] * 4 + ["refill-1"] * 4 + ["refill-2"] * 2
    (line,) = read_records(result.run_dir / "metrics.jsonl")
    assert line["dropped"]["groups_below_range"] == 10 and line["loss"] is None and line["eval_accuracy"] == 0.0
    for t in played:  # 8 of 8 tokens: charged in full, and only in training
        assert t.reward_terms["overlong"] == -1.0 and t.reward == sum(t.reward_terms.values())
    for t in read_trajectories(result.run_dir / "trajectories/eval-000001.jsonl"):
        assert "overlong" not in t.reward_terms


def test_simple_mode_completes_a_static_prompt_that_holds_the_source_mail(make_settings: MakeSettings) -> None:
    settings = make_settings(mode="simple", max_steps=1, num_mini_batches=1)
    run = train(settings).run_dir
    for trajectory in read_trajectories(run / "trajectories/step-000001.jsonl"):
        assert [message.role for message in trajectory.messages] == ["system", "user", "assistant"]
        prompt = trajectory.messages[1].content
        assert prompt.startswith(trajectory.scenario.question)
        assert f"[{trajectory.scenario.message_ids[0]}]" in prompt
        assert set(trajectory.reward_terms) == {"readable", "valid", "useful", "brevity"}
        assert trajectory.mode == "simple"
    evaluated = next(iter(read_trajectories(run / "trajectories/eval-000001.jsonl")))
    assert evaluated.messages[1].content == evaluated.scenario.question
    assert set(evaluated.reward_terms) != {"readable", "valid", "useful", "brevity"}


@pytest.mark.parametrize("mode", ["masked", "rollout"])
def test_ppo_with_a_correction(mode: str, make_settings: MakeSettings) -> None:
    settings = make_settings(
        algorithm="ppo", mode=mode, importance_correction="tis", max_steps=2, num_generations=1, top_p=0.9,
        temperature=0.7, lora_dropout=0.0, kl_target=None, critic_learning_rate=1e-2,
    )  # fmt: skip
    run = train(settings).run_dir
    lines = list(read_records(run / "metrics.jsonl"))
    for line in lines:
        # The sampler is the trainer itself: whatever top-p left out, no weight is off.
        assert line["correction_min"] == pytest.approx(1, abs=1e-3)
        assert line["correction_max"] == pytest.approx(1, abs=1e-3) and line["correction_cut_fraction"] == 0
    assert lines[0]["value_mean"] == 0 and lines[1]["value_mean"] != 0
    assert all("value_head.safetensors" in checkpoint.metadata.files for checkpoint in list_checkpoints(run))


def test_an_update_that_is_not_finite_is_said_and_kept(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Updater.loss

    def broken(updater: Updater, *arguments: Any) -> Any:
        return original(updater, *arguments) * float("nan")

    settings = make_settings(max_steps=1, num_mini_batches=1)
    said: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(Updater, "loss", broken)
        run = train(settings, progress=said.append).run_dir
    assert any("Step 1: 1 update skipped" in line and str(run / "skipped") in line for line in said)
    assert [line["updates_skipped"] for line in read_records(run / "metrics.jsonl")][-1] == 1
    assert sorted(path.name for path in (run / "skipped").iterdir()) == [
        "step-000001-1.json", "step-000001-1.safetensors",
    ]  # fmt: skip
    assert train(settings, overwrite=True).run_dir == run and not (run / "skipped").exists()
