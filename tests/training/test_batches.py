"""Micro-batches and mini-batches: literal shapes of small cases."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emailrl.training.batch import Layout, TrainingSample, micro_batches, mini_batches


def sample(length: int, name: str = "t") -> TrainingSample:
    trained = [0] + [1] * (length - 1)
    logprobs = [-0.5 if one else None for one in trained]
    return TrainingSample(name, "g", list(range(1, length + 1)), trained, logprobs)


def test_padding() -> None:
    (batch,) = micro_batches([sample(2), sample(4)], Layout(8, pad_id=99))
    assert batch.indices == (1, 0)
    assert batch.token_ids.tolist() == [[1, 2, 3, 4], [1, 2, 99, 99]]
    assert batch.loss_mask.tolist() == [[False, True, True, True], [False, True, False, False]]
    assert batch.sampler_logprobs.nan_to_num(9).tolist() == [[9, -0.5, -0.5, -0.5], [9, -0.5, 9, 9]]
    assert (batch.num_tokens, batch.num_trainable) == (6, 4)
    (batch,) = micro_batches([sample(3), sample(2)], Layout(6))
    assert batch.token_ids.tolist() == [[1, 2, 3], [1, 2, 0]]


def test_a_trajectory_in_two_samples_weighs_once_by_its_tokens() -> None:
    batches = micro_batches([sample(2), sample(4), sample(3, "u")], Layout(4))
    # Of the four trainable tokens of t, one stands in its first sample and three in its second.
    assert {batch.indices: batch.share.tolist() for batch in batches} == {(1,): [0.75], (2,): [1.0], (0,): [0.25]}


def test_cap_counts_padding_and_the_longest_come_first() -> None:
    lengths = [3, 9, 5, 5, 4, 20]
    batches = micro_batches([sample(length) for length in lengths], Layout(12))
    # 20 is over the cap and stands alone; two rows of 9 would be 18; 5 x 2 = 10 fits, 5 x 3 does not; 4 x 2 fits.
    assert [batch.indices for batch in batches] == [(5,), (1,), (2, 3), (4, 0)]
    assert [tuple(batch.token_ids.shape) for batch in batches] == [(1, 20), (1, 9), (2, 5), (2, 4)]


def test_packed_cap_counts_tokens_alone_and_batches_are_even() -> None:
    lengths = [3, 9, 5, 5, 4, 20]
    batches = micro_batches([sample(length) for length in lengths], Layout(14, packing=True))
    # 20 is over the cap; the 26 others take two batches, cut behind 9 + 5.
    assert [batch.indices for batch in batches] == [(5,), (1, 2), (3, 4, 0)]
    assert [batch.num_tokens for batch in batches] == [20, 14, 12]
    assert [tuple(batch.token_ids.shape) for batch in batches] == [(1, 20), (2, 9), (3, 5)]


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(2, 30), min_size=1, max_size=30), cap=st.integers(10, 100))
def test_batches_hold_every_sample_once_and_packed_ones_are_few(lengths: list[int], cap: int) -> None:
    packed, padded = (micro_batches(list(map(sample, lengths)), Layout(cap, packing=way)) for way in (True, False))
    for batches in (packed, padded):
        assert sorted(i for batch in batches for i in batch.indices) == list(range(len(lengths)))
        assert sum(batch.num_tokens for batch in batches) == sum(lengths)
    assert all(batch.num_tokens <= cap or len(batch.indices) == 1 for batch in packed)
    assert all(batch.token_ids.numel() <= cap or len(batch.indices) == 1 for batch in padded)
    over = sum(length > cap for length in lengths)
    within = sum(length for length in lengths if length <= cap)
    # First-fit leaves at most one batch half empty.
    assert len(packed) - over <= 2 * within / cap + 1 and len(packed) <= len(padded)


def test_batches_of_chosen_samples_keep_the_places_of_all() -> None:
    made = [sample(length) for length in (2, 4, 3, 6, 5)]
    assert [batch.indices for batch in micro_batches(made, Layout(8), chosen=[0, 2, 4])] == [(4,), (2, 0)]
    (packed,) = micro_batches(made, Layout(99, packing=True, share_prefixes=True), chosen=[1, 3])
    assert packed.indices == (1, 3) and packed.token_ids[0].tolist() == [1, 2, 3, 4, 0, 0]


def test_mini_batches() -> None:
    samples = [sample(5, f"t{i // 2}") for i in range(10)]  # five trajectories of two samples
    parts = list(mini_batches(samples, 2, seed="7/1"))
    assert sorted(len(part) for part in parts) == [4, 6]
    names = [{samples[i].trajectory_id for i in part} for part in parts]
    assert names[0] | names[1] == {f"t{i}" for i in range(5)} and not names[0] & names[1]
    assert list(mini_batches(samples, 2, seed="7/1")) == parts
    orders = {str(next(mini_batches(samples, 2, seed=f"7/{i}"))) for i in range(9)}
    assert len(orders) > 1
    assert [len(part) for part in mini_batches(samples, 99, seed="x")] == [2] * 5


@pytest.mark.parametrize(
    ("lengths", "layout", "expected"),
    [
        ([2, 2, 2, 2], Layout(99, max_rows=2), [[2, 2], [2, 2]]),
        ([3, 3, 3, 3], Layout(99, max_rows=2, packing=True), [[3, 3], [3, 3]]),
        ([9, 2, 2], Layout(99, max_rows=2, packing=True), [[9], [2, 2]]),  # the evener way
        ([9, 2, 2], Layout(18, max_rows=2), [[9], [2, 2]]),  # the one with less padding
        ([8, 7, 6, 3, 3], Layout(15, packing=True), [[8, 7], [6, 3, 3]]),  # full to the last token
        ([9, 8], Layout(5, packing=True), [[9], [8]]),
    ],
)
def test_cuts(lengths: list[int], layout: Layout, expected: list[list[int]]) -> None:
    batches = micro_batches(list(map(sample, lengths)), layout)
    assert [[lengths[i] for i in batch.indices] for batch in batches] == expected
