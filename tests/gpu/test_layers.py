"""Fused layers, packing and recomputation on the GPU's own kernels, against transformers' layers padded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.small import distance, make_samples, make_updater, moved, paid, weights
from torch import Tensor

from emailrl.model.fused.model import fused_backbone
from emailrl.model.packing import takes_packed

pytestmark = pytest.mark.gpu
Report = Callable[[str], None]
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
def test_float32(model: Path, exact: tuple[Tensor, list[Tensor]], report: Report, name: str) -> None:
    logprobs, gradient = step_of(model, dtype="fp32", **WAYS[name])
    gap = float((logprobs - exact[0]).abs().max())
    report(f"log-probabilities differ by at most {gap:.1e}, gradients by {distance(gradient, exact[1]):.1e}")
    assert exact[0].std() > 0.1
    assert gap < 1e-4 and distance(gradient, exact[1]) < 1e-4


@pytest.mark.parametrize("name", ["packed", "fused, on", "fused, auto"])
def test_bf16_rounds_no_more_than_transformers(
    model: Path, exact: tuple[Tensor, list[Tensor]], report: Report, name: str
) -> None:
    plain, plain_gradient = step_of(model, dtype="bf16", **PADDED)
    logprobs, gradient = step_of(model, dtype="bf16", **WAYS[name])
    theirs, ours = (float((one - exact[0]).abs().mean()) for one in (plain, logprobs))
    far, near = distance(plain_gradient, exact[1]), distance(gradient, exact[1])
    report(f"mean distance from float32 {ours:.1e} (padded {theirs:.1e}), gradient {near:.1e} (padded {far:.1e})")
    assert 0 < ours < 1.3 * theirs and 0 < near < 1.3 * far


@pytest.mark.parametrize("name", ["packed", "fused, on", "fused, auto"])
def test_fp16_gradients_do_not_vanish(model: Path, report: Report, name: str) -> None:
    """A loss divided by 16 million: unscaled, its gradients are below the smallest number of fp16."""
    many: dict[str, Any] = {"algorithm": "dr_grpo", "constant_length": 1_000_000}
    start = make_updater(model, dtype="fp32", **PADDED | many)
    samples = make_samples(16, 300, 900)
    start.train(samples, paid(samples), step=1)
    narrow = make_updater(model, dtype="fp16", **WAYS[name] | many)
    metrics = narrow.train(samples, paid(samples), step=1).metrics
    gradients = [[one.grad for one in updater.parameters if one.grad is not None] for updater in (narrow, start)]
    gap = distance(*gradients)
    report(f"scale 2^{torch.tensor(narrow.loss_scale.get_scale()).log2():.0f}, distance from float32 {gap:.1e}")
    assert metrics["updates_skipped"] == 0 and narrow.loss_scale.is_enabled()
    assert len(gradients[0]) == len(gradients[1]) and gap < 0.05
