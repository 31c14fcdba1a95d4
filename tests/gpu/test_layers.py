"""Fused layers, packing and recomputation on the GPU's own kernels, against transformers' layers padded; FlashAttention
over segments with shared keys against SDPA in float32; and supervised fine-tuning on them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu.small import distance, make_samples, make_updater, moved, paid, weights
from torch import Tensor

from emailrl.model.fused import fused_backbone
from emailrl.model.packing import pack, takes_packed, varlen_backward, varlen_forward
from emailrl.model.policy import load_policy
from emailrl.settings import load_settings
from emailrl.sft.examples import Example
from emailrl.sft.fit import Fitter
from tests.model.test_packing import TREE

pytestmark = pytest.mark.gpu
PADDED: dict[str, Any] = {"packing": False, "fused_layers": False, "gradient_checkpointing": "on"}
WAYS: dict[str, dict[str, Any]] = {
    "packed": {"fused_layers": False, "gradient_checkpointing": "on"},
    "packed, all kept": {"fused_layers": False, "gradient_checkpointing": "off"},
    "fused, on": {"gradient_checkpointing": "on"},
    "fused, selective": {"gradient_checkpointing": "selective"},
    "fused, off": {"gradient_checkpointing": "off"},
    "fused, auto": {"gradient_checkpointing": "auto"},
}


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def step_of(model: Path, **way: Any) -> tuple[Tensor, list[Tensor]]:
    """Log-probabilities of the trained tokens, and the gradient, of one step; float64 sums over micro-batches."""
    updater = make_updater(model, **way)
    assert (fused_backbone(updater.policy.model) is not None) == way.get("fused_layers", True)
    assert takes_packed(updater.policy.model) == way.get("packing", True)
    start = weights(updater)
    samples = make_samples(16, 300, 900)
    trained = updater.train(samples, paid(samples), step=1)
    both = zip(samples, trained.tokens, strict=True)
    logprobs = [now for one, row in both for now, on in zip(row.logprobs, one.loss_mask, strict=True) if on]
    return torch.tensor(logprobs), moved(start, weights(updater))


@pytest.fixture(scope="module")
def exact(model: Path) -> tuple[Tensor, list[Tensor]]:
    return step_of(model, dtype="fp32", **PADDED)


@pytest.mark.parametrize("name", WAYS)
def test_float32(model: Path, exact: tuple[Tensor, list[Tensor]], name: str) -> None:
    logprobs, gradient = step_of(model, dtype="fp32", **WAYS[name])
    gap = float((logprobs - exact[0]).abs().max())
    print(f"log-probabilities differ by at most {gap:.1e}, gradients by {distance(gradient, exact[1]):.1e}")
    assert exact[0].std() > 0.1
    assert gap < 1e-4 and distance(gradient, exact[1]) < 1e-4


@pytest.mark.parametrize("name", ["packed", "fused, on", "fused, auto"])
def test_bf16_rounds_no_more_than_transformers(model: Path, exact: tuple[Tensor, list[Tensor]], name: str) -> None:
    plain, plain_gradient = step_of(model, dtype="bf16", **PADDED)
    logprobs, gradient = step_of(model, dtype="bf16", **WAYS[name])
    theirs, ours = (float((one - exact[0]).abs().mean()) for one in (plain, logprobs))
    far, near = distance(plain_gradient, exact[1]), distance(gradient, exact[1])
    print(f"mean distance from float32 {ours:.1e} (padded {theirs:.1e}), gradient {near:.1e} (padded {far:.1e})")
    assert 0 < ours < 1.3 * theirs and 0 < near < 1.3 * far


@pytest.mark.parametrize("name", ["packed", "fused, on", "fused, auto"])
def test_fp16_gradients_do_not_vanish(model: Path, name: str) -> None:
    """A loss divided by 16 million: unscaled, its gradients are below the smallest number of fp16."""
    many: dict[str, Any] = {"algorithm": "dr_grpo", "constant_length": 1_000_000}
    start = make_updater(model, dtype="fp32", **PADDED | many)
    samples = make_samples(16, 300, 900)
    start.train(samples, paid(samples), step=1)
    narrow = make_updater(model, dtype="fp16", **WAYS[name] | many)
    metrics = narrow.train(samples, paid(samples), step=1).metrics
    gradients = [[one.grad for one in updater.parameters if one.grad is not None] for updater in (narrow, start)]
    gap = distance(*gradients)
    print(f"scale 2^{torch.tensor(narrow.loss_scale.get_scale()).log2():.0f}, distance from float32 {gap:.1e}")
    assert metrics["updates_skipped"] == 0 and narrow.loss_scale.is_enabled()
    assert len(gradients[0]) == len(gradients[1]) and gap < 0.05


@pytest.mark.parametrize("scale", [1, 40])
def test_flash_attention_sees_the_same_keys(scale: int) -> None:
    """A key too many or too few would move most outputs of short segments by far more than bfloat16 does."""
    ids = torch.zeros(len(TREE), 12 * scale, dtype=torch.long, device="cuda")
    mask = ids.bool()
    for row, (_, length) in enumerate(TREE):
        mask[row, scale * length - 1] = True
    packed = pack(ids, mask, torch.tensor([scale * shared for shared, _ in TREE], device="cuda"))
    assert packed.segments.keys is not None
    generator = torch.Generator("cuda").manual_seed(0)
    query, key, value, grad = (
        torch.randn(packed.token_ids.shape[1], heads, 128, device="cuda", generator=generator).bfloat16()
        for heads in (8, 2, 2, 8)
    )
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [one.to(dtype) for one in (query, key, value)]
        made = varlen_forward(inputs[0], inputs[1], inputs[2], packed.segments, 128**-0.5)
        gradients = varlen_backward(grad.to(dtype), (*inputs, *made), packed.segments, 128**-0.5)
        results.append([made[0].float(), *(one.float() for one in gradients)])
    for name, exact, flash in zip(("output", "by query", "by key", "by value"), *results, strict=True):
        distance = float((flash - exact).norm() / exact.norm())
        assert distance < 1e-2, f"{name}: {distance:.3f} of its norm away"


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
