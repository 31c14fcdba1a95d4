"""FlashAttention over segments with shared keys against SDPA in float32, in value and in gradient; needs a GPU."""

from __future__ import annotations

import pytest
import torch

from emailrl.model.packing import pack, varlen_backward, varlen_forward

TREE = [(0, 9), (4, 7), (6, 12), (2, 2), (0, 5), (5, 5), (3, 8)]
"""Rows of a batch: tokens shared with the row before, and tokens in all."""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlashAttention needs a GPU")
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
