"""Splits by prefix: literal cuts, the best of all cuts by trying them; updates with and without sharing."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training.updaters import LENGTHS, PAID, Make, assert_close, gradients, samples

from emailrl.training.batch import Layout, TrainingSample, micro_batches, shared_with_last, split


def shared(cap: int, most: int) -> Layout:
    return Layout(cap, max_rows=most, packing=True, share_prefixes=True)


def test_split_by_hand() -> None:
    assert shared_with_last([[1, 2, 3], [1, 2, 4, 5], [1, 2, 4, 5], [1], [2, 1]]) == [0, 2, 4, 1, 0]
    first, second = [1, 1, 1, 1, 1], [2, 2, 2]
    rows = [[*second, 9], [*first, 8], [*first, 6, 6], [*second, 7, 7], [*first, 9]]
    # In order: 1…66, 1…8, 1…9, 2…77, 2…9. The first three are 5 + 2 + 1 + 1 tokens, the last two 3 + 2 + 1.
    assert split(rows, shared(15, 9)) == [[2, 1, 4, 3, 0]]
    assert split(rows, shared(9, 9)) == [[2, 1, 4], [3, 0]]
    # Under 8 the first three no longer fit. Three batches of 7, 6 + 1, 5 + 1 tokens are evener than of 7 + 1, 6, 5 + 1.
    assert split(rows, shared(8, 9)) == split(rows, shared(99, 2)) == [[2], [1, 4], [3, 0]]
    assert split(rows, shared(1, 9)) == [[2], [1], [4], [3], [0]]  # each over the cap, each alone
    assert split([], Layout(9)) == []


def distinct_prefixes(rows: list[list[int]]) -> int:
    """Tokens to compute, counted as the nodes of the tree."""
    return len({tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)})


ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=7)


@settings(max_examples=200, deadline=None)
@given(rows=ROWS, cap=st.integers(1, 20), most=st.integers(1, 7))
def test_no_way_to_cut_is_better(rows: list[list[int]], cap: int, most: int) -> None:
    batches = split(rows, shared(cap, most))
    order = [i for batch in batches for i in batch]
    assert sorted(order) == list(range(len(rows))) and [rows[i] for i in order] == sorted(rows)

    def cost(cuts: tuple[int, ...]) -> tuple[int, int, int] | None:
        sizes = []
        for start, end in pairwise((0, *cuts, len(rows))):
            tokens = distinct_prefixes([rows[i] for i in order[start:end]])
            if end - start > most or (tokens > cap and end - start > 1):
                return None
            sizes.append(tokens)
        return len(sizes), sum(sizes), sum(size**2 for size in sizes)

    every = [cost(cuts) for n in range(len(rows)) for cuts in combinations(range(1, len(rows)), n)]
    ends = [sum(len(batch) for batch in batches[:n]) for n in range(1, len(batches))]
    assert cost(tuple(ends)) == min(one for one in every if one is not None)


def family() -> list[TrainingSample]:
    """Five samples: two groups, one whose members took the same first action, trained in one and not in the other."""
    made = samples()
    prompt, action = made[1].token_ids[:4], made[1].token_ids[4:7]
    for i, alike in ((0, prompt), (2, [*prompt, *action][:6])):
        made[i] = replace(made[i], token_ids=[*alike, *made[i].token_ids[len(alike) :]])
    ids = [*made[3].token_ids[:5], *made[0].token_ids[5:9], 7, 8]
    return [*made, replace(made[3], trajectory_id="t4", token_ids=ids)]


FAMILY_PAID = PAID | {"t4": PAID["t3"]}


def test_batches_count_a_shared_prefix_once() -> None:
    made = family()
    (batch,) = micro_batches(made, Layout(99, packing=True, share_prefixes=True))
    rows = [made[i].token_ids for i in batch.indices]
    assert rows == sorted(one.token_ids for one in made)
    assert batch.num_tokens == distinct_prefixes(rows) == sum(len(row) for row in rows) - int(batch.shared.sum())
    assert sorted(batch.shared.tolist()) == [0, 0, 4, 5, 6]  # the third sample is 6 tokens long
    assert batch.token_ids.shape == (5, 14)
    apart = micro_batches(made, Layout(99, packing=True))[0]
    assert apart.num_tokens == sum(len(one.token_ids) for one in made) and not apart.shared.any()


def test_halves_share_within_themselves_alone() -> None:
    made = family()
    (batch,) = micro_batches(made, Layout(99, packing=True, share_prefixes=True))
    before = batch.shared.tolist()
    for half in batch.halves():
        rows = [made[i].token_ids for i in half.indices]
        assert half.shared.tolist() == shared_with_last(rows)
        assert half.num_tokens == distinct_prefixes(rows)
    assert batch.shared.tolist() == before


@pytest.mark.parametrize(
    "name", ["grpo", "dr_grpo", "gspo", "cispo", "ppo", "opd"]
)  # the others compute as one of these
def test_an_algorithm_is_the_same_however_its_samples_are_computed(make: Make, name: str) -> None:
    """With everything on: KL, correction, entropy, two passes, a trajectory in several samples, tool tokens."""
    made = [*family(), replace(samples()[1], trajectory_id="t0")]
    tool = [None, *made[0].sampler_logprobs[1:4], *[None] * (LENGTHS[0] - 4)]
    made[0] = replace(made[0], sampler_logprobs=tool)  # no sampler drew most of its tokens
    options = {
        "algorithm": name, "beta": 0.1, "importance_correction": "tis", "correction_low": 0.5, "correction_high": 2.0,
        "entropy_coef": 0.01, "update_epochs": 2,
        "learning_rate": 2e-3,  # ratios of about 1: those of e³ would enlarge float32 rounding
        "constant_length": 9 if name == "dr_grpo" else None,  # else gradients are near AdamW's epsilon
    }  # fmt: skip
    for minis in (1, 2):
        alone = make(prefix_sharing=False, max_tokens_per_micro_batch=1, num_mini_batches=minis, **options)
        assert len(micro_batches(made, alone.forward.layout())) == len(made)
        expected, expected_gradients = alone.train(made, FAMILY_PAID, step=1).metrics, gradients(alone)
        assert max(part.abs().max() for part in expected_gradients) > 1e-5
        for cap, sharing in ((16384, False), (30, False), (16384, True), (24, True)):
            updater = make(max_tokens_per_micro_batch=cap, prefix_sharing=sharing, num_mini_batches=minis, **options)
            assert updater.train(made, FAMILY_PAID, step=1).metrics == pytest.approx(expected, abs=1e-5, rel=1e-5)
            assert_close(gradients(updater), expected_gradients, atol=1e-5)


def test_what_shares_and_what_does_not(make: Make) -> None:
    def shares(**changes: Any) -> bool:
        (batch,) = micro_batches(family(), make(**changes).forward.layout())
        return bool(batch.shared.any())

    assert shares()
    assert not shares(prefix_sharing=False) and not shares(packing=False)
    assert not shares(lora_dropout=0.1)  # one draw of dropout would do for all members
