"""Runs whose update uses the critic and the sampler correction, from settings to checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from emailrl.checkpoints import list_checkpoints, read_checkpoint
from emailrl.records import read_records
from emailrl.settings import Settings
from emailrl.training.loop import train
from emailrl.training.update import Updater

MakeSettings = Callable[..., Settings]


@pytest.mark.parametrize("mode", ["masked", "rollout"])
def test_ppo_with_a_correction(mode: str, make_settings: MakeSettings) -> None:
    settings = make_settings(
        algorithm="ppo", mode=mode, importance_correction="tis", max_steps=2, num_generations=1, top_p=0.9,
        temperature=0.7, lora_dropout=0.0, kl_target=None, critic_learning_rate=1e-2,
    )  # fmt: skip
    run = train(settings).run_dir
    lines = list(read_records(run / "metrics.jsonl"))[-2:]
    for line in lines:
        assert line["trainable_tokens"] > 0 and line["updates_skipped"] == 0 and line["micro_batches_halved"] == 0
        # The sampler is the trainer itself: whatever top-p left out, no weight is off.
        assert line["correction_min"] == pytest.approx(1, abs=1e-3)
        assert line["correction_max"] == pytest.approx(1, abs=1e-3) and line["correction_cut_fraction"] == 0
    assert lines[0]["value_mean"] == 0 and lines[1]["value_mean"] != 0
    for checkpoint in list_checkpoints(run):
        found = read_checkpoint(checkpoint.path)
        assert "value_head.safetensors" in found.metadata.files
    notes = [record for record in read_records(run / "training" / "step-000002.jsonl") if record["samples"]]
    for note in notes:
        for sample in note["samples"]:
            worth = [value for value, on in zip(sample["advantages"], sample["loss_mask"], strict=True) if on]
            assert None not in worth


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
