"""What the in-process engine takes."""

from __future__ import annotations

from emailrl.engines.budget import merges


def test_small_models_are_sampled_from_merged_weights() -> None:
    assert merges(10**9, quantized=False)
    assert not merges(10**9 + 1, quantized=False) and not merges(1, quantized=True)
