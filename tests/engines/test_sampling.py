"""Sampling against distributions small enough to work out by hand."""

from __future__ import annotations

import math
from itertools import islice, repeat

import pytest
import torch

from emailrl.engines.base import SamplingParams
from emailrl.engines.local.passes import sample, uniforms

# Probabilities 1/2, 1/4, 1/8, 1/8, not in order of size: cumulative 1/8, 5/8, 7/8, 1.
LOGITS = torch.tensor([[1 / 8, 1 / 2, 1 / 4, 1 / 8]]).log()


def one(draw: float, logits: torch.Tensor = LOGITS, **params: float) -> tuple[int, float]:
    tokens, logprobs = sample(logits, [SamplingParams(1, **params)], [repeat(draw)])
    return tokens[0], logprobs[0]


@pytest.mark.parametrize(
    ("draw", "token", "prob"),
    [(0.0, 0, 1 / 8), (0.124, 0, 1 / 8), (0.126, 1, 1 / 2), (0.624, 1, 1 / 2), (0.626, 2, 1 / 4), (0.876, 3, 1 / 8)],
)
def test_the_token_is_the_first_whose_cumulative_probability_exceeds_the_draw(
    draw: float, token: int, prob: float
) -> None:
    assert one(draw) == (token, pytest.approx(math.log(prob), abs=1e-6))


def test_temperature_comes_before_the_logprob() -> None:
    # At temperature 1/2 the probabilities are squared: 1/64, 16/64, 4/64, 1/64 of 22/64.
    assert one(0.5, temperature=0.5) == (1, pytest.approx(math.log(16 / 22), abs=1e-6))


def test_greedy_takes_the_likeliest_with_its_untempered_logprob() -> None:
    assert one(0.99, temperature=0) == (1, pytest.approx(math.log(1 / 2), abs=1e-6))
    assert one(0.99, torch.zeros(1, 4), temperature=0)[0] == 0


def test_top_k_and_top_p_cut_what_is_drawn_but_not_the_logprob() -> None:
    # Top 2: tokens 1 and 2 with 1/2 and 1/4, so the border lies at 2/3.
    assert one(0.66, top_k=2) == (1, pytest.approx(math.log(1 / 2), abs=1e-6))
    assert one(0.67, top_k=2) == (2, pytest.approx(math.log(1 / 4), abs=1e-6))
    # A nucleus of 0.6 is crossed by the second likeliest, which is kept; one of 0.5 is filled by the first.
    assert one(0.99, top_p=0.6)[0] == 2
    assert one(0.99, top_p=0.5)[0] == 1
    assert one(0.99, top_p=0.01)[0] == one(0.99, top_p=1e-50)[0] == 1


def test_the_nucleus_is_of_what_top_k_leaves() -> None:
    # Of the top 2, token 1 has 2/3 of the mass.
    assert one(0.99, top_k=2, top_p=0.66)[0] == 1
    assert one(0.99, top_k=2, top_p=0.67)[0] == 2


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf]])
    assert one(0.0, logits) == (1, 0.0)
    assert one(1 - 2**-24, logits) == (1, 0.0)


def test_rows_of_a_batch_keep_their_own_parameters() -> None:
    params = [SamplingParams(1, 0.0), SamplingParams(1, 0.5), SamplingParams(1, top_k=1), SamplingParams(1)]
    tokens, logprobs = sample(LOGITS.expand(4, -1), params, [repeat(0.9)] * 4)
    assert tokens == [1, 2, 1, 3]
    assert [math.exp(logprob) for logprob in logprobs] == pytest.approx([1 / 2, 4 / 22, 1 / 2, 1 / 8], abs=1e-6)


def test_frequencies_follow_the_distribution() -> None:
    rows = 20_000
    row = uniforms(7)
    tokens, _ = sample(LOGITS.expand(rows, -1), [SamplingParams(1)] * rows, [row] * rows)
    counts = torch.tensor(tokens).bincount(minlength=4) / rows
    # Five standard deviations of the largest share: 5 · sqrt(1/4 / 20,000) = 0.018.
    assert counts.tolist() == pytest.approx([1 / 8, 1 / 2, 1 / 4, 1 / 8], abs=0.018)


def test_a_seed_names_a_row_of_numbers() -> None:
    drawn, same, other = (list(islice(uniforms(seed), 200)) for seed in (3, 3, 4))
    assert drawn == same != other and len(set(drawn)) > 190
    assert all(0 <= number < 1 for number in drawn)
