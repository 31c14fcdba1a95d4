"""Supervised fine-tuning on the GPU's own layers: what is imitated grows likelier."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gpu.small import make_samples

from emailrl.model.fused.model import fused_backbone
from emailrl.model.load import load_policy
from emailrl.settings import load_settings
from emailrl.sft.examples import Example
from emailrl.sft.fit import Fitter

pytestmark = pytest.mark.gpu


def test_an_adapter_learns_through_the_fused_layers(model: Path, tmp_path: Path) -> None:
    named = {"model_name": str(model), "lora_rank": 8, "sft_learning_rate": 5e-3, "sft_steps": 60}
    policy = load_policy(settings := load_settings(named, environ={}, cwd=tmp_path), trainable=True)
    assert fused_backbone(policy.model) is not None
    fitter = Fitter(policy, settings.training, settings.sft, settings.agent.temperature)
    examples = [
        Example(one.trajectory_id, one.group_id, np.array(one.token_ids, np.uint32), np.array(one.loss_mask, bool))
        for one in make_samples(4, 100, 200)
    ]
    losses = [fitter.step(examples, step=step)["loss"] for step in range(1, 31)]
    assert losses[-1] < 0.8 * losses[0]
