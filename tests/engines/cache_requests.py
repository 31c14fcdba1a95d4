"""Budgets and prompts for a small cache, and results compared."""

from __future__ import annotations

import random

import pytest

from emailrl.engines.base import Completion, Request, SamplingParams
from emailrl.engines.budget import BLOCK

TOKEN = 256
"""Bytes of a token in the tests' model: keys and values, 2 layers, 2 heads of 8, 4 bytes."""


def bytes_for(blocks: int) -> int:
    """A budget that holds just so many blocks of the tests' model: its four tensors, one of them twice, and block 0."""
    return -(-(blocks + 1) * BLOCK * TOKEN * 5 // 4)


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 40) for _ in range(length)]


def requests(*lengths: int, max_tokens: int = 100, temperature: float = 1.0) -> list[Request]:
    sampling = SamplingParams(max_tokens, temperature)
    return [Request(str(i), sampling, prompt(i, length), seed=i) for i, length in enumerate(lengths)]


def sampled(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def same(some: list[Completion], others: list[Completion]) -> None:
    for one, other in zip(some, others, strict=True):
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
