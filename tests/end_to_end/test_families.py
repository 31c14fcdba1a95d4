"""Two steps of training by each family, with Qwen's tokenizer and template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from end_to_end.conftest import options_of
from gpu.families import FAMILIES, make_family
from safetensors.torch import load_file

from emailrl.settings import load_settings
from emailrl.training.loop import train

OFTEN = ("Qwen3.5",)  # the others only with -m slow
REWARD = """
def by_ids(trajectory):
    return sum(token for turn in trajectory.turns for token in turn.completion_ids) % 97 / 97
"""


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=() if one in OFTEN else pytest.mark.slow) for one in FAMILIES]
)
def test_two_steps_of_masked_training(family: str, workplace: Path, shared_data: Path, tmp_path: Path) -> None:
    model = make_family(family, shared_data / "qwen_tokenizer", tmp_path / "model")
    own = {"model_name": str(model), "mode": "masked", "max_steps": 2, "per_device_train_batch_size": 1, "beta": 0.01}
    own |= {"num_generations": 2, "num_mini_batches": 1, "eval_dataset_size": 1, "eval_steps": 2, "lora_dropout": 0.0}
    (tmp_path / "reward.py").write_text(REWARD)
    own["reward"] = f"{tmp_path / 'reward.py'}:by_ids"
    run = train(load_settings(options_of(workplace, tmp_path, **own), environ={}, cwd=tmp_path)).run_dir
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["grad_norm"] > 0 and line["sampler_gap_mean"] < 1e-5
    before, after = (load_file(run / "policy" / f"v-00000{n}" / "adapter_model.safetensors") for n in (1, 2))
    assert all(not torch.equal(before[name], after[name]) for name in before if "lora_B" in name)
