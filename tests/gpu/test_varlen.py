"""FlashAttention over segments with shared keys against SDPA in float32, in value and in gradient; needs a GPU."""

from __future__ import annotations

import pytest
import torch

from emailrl.policy.packing import pack
from emailrl.policy.varlen import varlen_backward, varlen_forward
from tests.policy.test_prefix_sharing import TREE, grow


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlashAttention needs a GPU")
@pytest.mark.parametrize("scale", [1, 40])
def test_flash_attention_sees_the_same_keys(scale: int) -> None:
    """A key too many or too few would move most outputs of short segments by far more than bfloat16 does."""
    ids, mask, shared = grow([(scale * first, scale * length) for first, length in TREE])
    row = pack(ids.cuda(), mask.cuda(), shared.cuda())
    assert row.segments.key_index is not None
    generator = torch.Generator("cuda").manual_seed(0)
    num_tokens = row.token_ids.shape[1]
    query, key, value, grad = (
        torch.randn(num_tokens, heads, 128, device="cuda", generator=generator).bfloat16() for heads in (8, 2, 2, 8)
    )
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [one.to(dtype) for one in (query, key, value)]
        made = varlen_forward(inputs[0], inputs[1], inputs[2], row.segments, 128**-0.5)
        gradients = varlen_backward(grad.to(dtype), (*inputs, *made), row.segments, 128**-0.5)
        results.append([made[0].float(), *(one.float() for one in gradients)])
    for name, exact, flash in zip(("output", "by query", "by key", "by value"), *results, strict=True):
        distance = float((flash - exact).norm() / exact.norm())
        assert distance < 1e-2, f"{name}: {distance:.3f} of its norm away"
