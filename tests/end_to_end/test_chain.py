"""SFT, then RL from its adapter, then RL with other settings from that: three commands, one chain of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end.conftest import Options
from safetensors.torch import load_file
from same_run import everything, lines, same, state_of

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.checkpoints import find_checkpoint
from emailrl.measure.export import export_checkpoint
from emailrl.model.policy import load_policy
from emailrl.settings import Settings, load_settings
from emailrl.sft.loop import SftResult, sft
from emailrl.training.loop import train

OWN = ("lora_rank", "lora_alpha", "lora_dropout")


@pytest.fixture(scope="module")
def taught(options: Options, tmp_path_factory: pytest.TempPathFactory) -> SftResult:
    """An adapter of rank 2 that has imitated experts on demo worlds."""
    folder = tmp_path_factory.mktemp("taught")
    changes = {"experts": "demo", "sft_steps": 2, "sft_batch_size": 4, "eval_dataset_size": 4, "lora_rank": 2}
    changes |= {"lora_dropout": 0.0, "sft_learning_rate": 0.05}
    return sft(load_settings(options(folder, **changes), environ={}, cwd=folder), workers=1)


def run_settings(options: Options, folder: Path, adapter: Path, **changes: Any) -> Settings:
    """Settings of a short run from an adapter, which has LoRA settings of its own."""
    given = {name: value for name, value in options(folder, **{"max_steps": 2} | changes).items() if name not in OWN}
    return load_settings(given | {"adapter": adapter}, environ={}, cwd=folder)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def test_three_commands_make_one_chain(options: Options, taught: SftResult, tmp_path: Path) -> None:
    first = train(run_settings(options, tmp_path, taught.out)).run_dir
    begun, last = find_checkpoint(first / "checkpoint-2", tmp_path).metadata, find_checkpoint(taught.out, tmp_path)
    assert begun.parent == f"{last.metadata.run_id}:{last.metadata.step}" and begun.resumed_from is None
    assert begun.lora["rank"] == 2 and begun.settings["lora"]["lora_rank"] == 2
    sampled = weights(first / "best_model")  # of step 0, as no answer was right: what was first sampled from
    assert find_checkpoint(first / "best_model", tmp_path).metadata.step == 0
    assert all(torch.equal(sampled[name], value) for name, value in weights(taught.out).items())
    assert any(not torch.equal(value, weights(first / "final")[name]) for name, value in weights(taught.out).items())

    second = train(run_settings(options, tmp_path, first / "final", algorithm="rloo", num_mini_batches=1)).run_dir
    assert second != first
    end = find_checkpoint(second / "final", tmp_path)
    assert end.metadata.parent == f"{begun.run_id}:2" and end.metadata.algorithm == "rloo"

    export = export_checkpoint(end, tmp_path / "export", format="adapter")
    assert f"from the weights of {begun.run_id}:2" in (export.out / "README.md").read_text()
    playing = load_settings({"model_name": end.metadata.base_model}, environ={}, cwd=tmp_path)
    policy = load_policy(playing, adapter=export.out)
    assert policy.lora["rank"] == 2


@pytest.mark.parametrize(("reference", "is_far"), [("base", True), ("start", False), ("auto", False)])
def test_a_resumed_run_keeps_its_parent_and_its_reference_and_equals_the_uninterrupted_one(
    options: Options, taught: SftResult, tmp_path: Path, reference: str, is_far: bool
) -> None:
    changes = {"beta": 0.1, "save_steps": 1, "num_mini_batches": 1}
    settings = run_settings(options, tmp_path, taught.out, reference=reference, **changes)
    run = train(settings).run_dir
    whole, end = everything(run), state_of(run / "final")
    assert (lines(run / "metrics.jsonl")[0]["kl"] > 1e-3) == is_far  # the start is at no distance at first
    train(settings, resume=str(run / "checkpoint-1"), overwrite=True)
    assert everything(run) == whole and same(state_of(run / "final"), end)
    metadata = find_checkpoint(run / "final", tmp_path).metadata
    assert metadata.settings["algorithm"]["reference"] == ("base" if is_far else "start")
    taught_by = find_checkpoint(taught.out, tmp_path).metadata
    assert metadata.parent == f"{taught_by.run_id}:{taught_by.step}"
    assert metadata.resumed_from == f"{metadata.run_id}:1"
    if is_far:
        moved = run_settings(options, tmp_path, taught.out, max_steps=3, reference="start", **changes)
        with pytest.raises(EmailRLError, match="started with REFERENCE=base"):
            train(moved, resume="latest")
    with pytest.raises(UsageError, match="from mode sft"):
        train(settings, resume=str(taught.out.parent / "checkpoint-2"))
