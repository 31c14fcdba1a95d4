"""Whole runs on a tiny model: the loss falls, best_model is usable, and what was cut short goes on bit for bit."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end.commands import begin, exit_code, file_operations
from safetensors.torch import load_file
from sft.talk import settings_for
from tiny import make_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from emailrl.base.errors import UsageError
from emailrl.checkpoints import find_checkpoint, list_checkpoints
from emailrl.model.policy import load_policy
from emailrl.model.resolve import find_adapter
from emailrl.records import read_records
from emailrl.runs.folder import STATE_FILE
from emailrl.runs.log import Tracker
from emailrl.settings import Settings
from emailrl.settings.names import changed
from emailrl.sft import fit
from emailrl.sft.loop import SftResult, sft


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Settings, SftResult]:
    settings = settings_for(tmp_path_factory.mktemp("whole"), model, lora_dropout=0.1)
    return settings, sft(settings)


def lines(run: Path) -> list[dict[str, Any]]:
    records = list(read_records(run / "metrics.jsonl"))
    return [{name: value for name, value in record.items() if name != "seconds"} for record in records]


def weights(folder: Path, name: str = "adapter_model.safetensors") -> dict[str, torch.Tensor]:
    return load_file(folder / name)


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_run_lowers_the_loss_and_leaves_an_adapter(whole: tuple[Settings, SftResult], model: Path) -> None:
    settings, result = whole
    run = result.out.parent
    assert (run.name, result.out.name, result.steps) == ("grpo_sft", "best_model", 8)
    recorded = lines(run)
    assert [line["step"] for line in recorded] == list(range(1, 9))
    assert recorded[-1]["loss"] < recorded[0]["loss"] - 0.2
    losses = [line["val_loss"] for line in recorded if line["val_loss"] is not None]
    assert len(losses) == 4 and result.val_loss == min(losses) < losses[0]
    product = find_checkpoint("best", settings.output.output_dir).metadata
    assert (product.kind, product.mode, product.base_model, product.parent) == ("sft", "sft", str(model), None)
    assert product.metrics["val_loss"] == result.val_loss and product.lora["rank"] == 4
    assert load_policy(settings, adapter=find_adapter(result.out, settings.output.output_dir).path).lora["rank"] == 4
    names = [item.path.name for item in list_checkpoints(run)]
    assert names == ["checkpoint-4", "checkpoint-6", "best_model", "checkpoint-8"]


def test_all_weights_are_trained_and_written_as_a_model(model: Path, tmp_path: Path) -> None:
    result = sft(settings_for(tmp_path, model, full_finetuning=True, sft_learning_rate=3e-3))
    before, after = weights(model, "model.safetensors"), weights(result.out, "model.safetensors")
    assert before.keys() == after.keys() and all(not torch.equal(before[name], after[name]) for name in before)
    recorded = lines(result.out.parent)
    assert recorded[-1]["loss"] < recorded[0]["loss"] - 0.2
    assert load_policy(settings_for(tmp_path, result.out)).base_model == str(result.out)
    resumed = settings_for(tmp_path, model, full_finetuning=True, sft_learning_rate=3e-3, sft_steps=9)
    assert sft(resumed, resume="latest").steps == 9


def test_killed_anywhere_it_goes_on_bit_for_bit(whole: tuple[Settings, SftResult], model: Path, tmp_path: Path) -> None:
    _, result = whole
    settings = settings_for(tmp_path, model, lora_dropout=0.1)
    for operation in (9, 40, 70):
        assert file_operations(partial(sft, settings, resume="auto"), tmp_path / "outputs", kill_at=operation) is None
    resumed = sft(settings, resume="auto")
    assert resumed.out.parent == tmp_path / "outputs" / "grpo_sft"
    assert_equal(weights(resumed.out), weights(result.out))
    assert_equal(*(weights(one.out.parent / "checkpoint-8") for one in (resumed, result)))
    assert lines(resumed.out.parent) == lines(result.out.parent)
    assert (resumed.loss, resumed.val_loss) == (result.loss, result.val_loss)


@pytest.mark.parametrize("cut_short", ["validation", "line"])
@pytest.mark.parametrize("step", [4, 8])
def test_a_validation_cut_short_is_repeated_by_the_resumed_run(
    whole: tuple[Settings, SftResult], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_short: str,
    step: int,
) -> None:  # fmt: skip
    _, result = whole
    settings = settings_for(tmp_path, model, lora_dropout=0.1)
    validate, record = fit.Fitter.loss, Tracker.step
    validations = iter(range(0, 10, 2))  # SFT_EVAL_STEPS is 2

    def loss(self: fit.Fitter, examples: Any, *more: Any) -> float:
        if next(validations) == step and cut_short == "validation":
            os.kill(os.getpid(), signal.SIGTERM)
        return validate(self, examples, *more)

    def line(self: Tracker, metrics: Any, text: str, left: float) -> None:
        record(self, metrics, text, left)
        if metrics["step"] == step and cut_short == "line":
            raise OSError("No space left on device")

    with monkeypatch.context() as patched, pytest.raises((KeyboardInterrupt, OSError)):
        patched.setattr(fit.Fitter, "loss", loss)
        patched.setattr(Tracker, "step", line)
        sft(settings)
    resumed = sft(settings, resume="latest")
    expected = lines(result.out.parent)
    if cut_short == "validation":
        expected[step - 1]["val_loss"] = None  # the line was written without it
    assert lines(resumed.out.parent) == expected
    assert (resumed.steps, resumed.loss, resumed.val_loss) == (8, result.loss, result.val_loss)
    assert_equal(weights(resumed.out), weights(result.out))
    files = [one.out.parent / "checkpoint-8" / STATE_FILE for one in (resumed, result)]
    after, expected = (torch.load(file, weights_only=True)["state"] for file in files)
    assert after == expected


def test_a_loss_that_rises_again_stops_the_run_and_the_lowest_is_kept(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = iter([2.0, 1.5, 1.0, 1.1, 1.2, 0.5])
    monkeypatch.setattr(fit.Fitter, "loss", lambda *_: next(given))
    said: list[str] = []
    result = sft(settings_for(tmp_path, model, sft_steps=40, sft_patience=2), progress=said.append)
    assert (result.steps, result.val_loss) == (8, 1.0)
    assert "the validation loss stopped falling. Validation loss 1.0000 at step 4." in said[-1]
    assert find_checkpoint(result.out, tmp_path).metadata.step == 4


def test_resuming_with_other_conversations_is_refused(whole: tuple[Settings, SftResult], model: Path) -> None:
    settings, result = whole
    said: list[str] = []
    assert sft(settings, resume="latest", progress=said.append) == result
    line = f"Nothing left to do in {result.out.parent}: it ended after step 8, all steps done."
    assert said == [line]
    rates = f"{settings.sft.sft_learning_rate} -> 0.125"
    sft(changed(settings, sft_learning_rate=0.125), resume="latest", progress=said.append)
    assert said[1:] == [f"{line} Without effect, changed since the checkpoint: sft_learning_rate {rates}."]
    settings = changed(settings, sft_steps=9)
    with pytest.raises(UsageError, match="exists"):
        sft(settings, out=result.out.parent)
    for changes, complaint in (
        ({"min_reward": 2.0}, "No trajectory is left"),
        ({"seed": 7}, r"has seed \d+, not 7\. Resume with SEED="),
        ({"eval_dataset_size": 1}, r"on other questions: EVAL_DATASET_SIZE was \d+, now 1\. Resume with"),
    ):
        with pytest.raises(UsageError, match=complaint):
            sft(changed(settings, **changes), resume="latest")
    with pytest.raises(UsageError, match="removes later work"):
        sft(settings, resume=str(result.out.parent / "checkpoint-4"))


def test_a_run_of_train_is_not_gone_on_with(model: Path, tmp_path: Path) -> None:
    best = make_checkpoint(tmp_path / "mine" / "best_model", model)
    with pytest.raises(UsageError, match="no checkpoint to resume from"):
        sft(settings_for(tmp_path, model), out=tmp_path / "mine", resume="auto")
    assert best.path.is_dir()


@pytest.mark.slow
def test_a_model_from_nothing_learns_from_demo_worlds(tmp_path: Path) -> None:
    settings = settings_for(
        tmp_path, tmp_path, trajectories=[], from_scratch=True, sft_steps=12, sft_batch_size=8, sft_eval_steps=12,
        sft_learning_rate=None, eval_dataset_size=8,
    )  # fmt: skip
    result = sft(settings, workers=1)
    recorded = lines(result.out.parent)
    assert recorded[-1]["loss"] < recorded[0]["loss"] - 0.2
    assert AutoModelForCausalLM.from_pretrained(result.out).num_parameters() == 5_640_192
    assert len(AutoTokenizer.from_pretrained(result.out)) == 2048


def test_the_command_prints_its_four_numbers(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings_for(tmp_path, model)
    (tmp_path / "run").mkdir()
    given = f"--model {model} --trajectories {tmp_path}/talk.jsonl --max-steps 2 --wandb disabled --batch-size 4"
    child = begin(tmp_path / "run", "sft", *given.split(), "--out", "mine", "--json")
    assert exit_code(child) == 0, (tmp_path / "run" / "output.txt").read_text()
    told = json.loads((tmp_path / "run" / "output.txt").read_text().splitlines()[-1])
    assert list(told) == ["out", "steps", "loss", "val_loss"]
    assert told["out"] == str(tmp_path / "run" / "mine" / "best_model") and told["steps"] == 2
