"""Dealing samples to ranks: whole trajectories, tokens balanced, groups together where that computes fewer."""

from __future__ import annotations

import random
import time

import pytest

from emailrl.training.batch import TrainingSample, deal, make_shares


def sample(trajectory: str, group: str, ids: list[int]) -> TrainingSample:
    return TrainingSample(trajectory, group, ids, [0] * (len(ids) - 1) + [1], [None] * len(ids))


def of_lengths(*lengths: int) -> list[TrainingSample]:
    return [sample(f"t{n}", f"g{n}", [n] * length) for n, length in enumerate(lengths)]


def test_the_longest_go_first_to_the_emptiest_and_trajectories_stay_whole() -> None:
    samples = of_lengths(7, 6, 5, 4, 3)  # 7 | 6, then 5 to the 6, 4 to the 7, 3 to the 11 or the 11: the first
    assert deal(samples, range(5), 2, share_prefixes=False) == [[0, 3, 4], [1, 2]]
    assert deal(samples, [0, 2, 4], 4, share_prefixes=False) == [[0], [2], [4], []]  # a rank may get nothing
    samples = [sample("a", "g", [1] * 4), sample("b", "g", [2] * 9), sample("a", "g", [3] * 4)]
    assert deal(samples, range(3), 2, share_prefixes=False) == [[1], [0, 2]]


def test_shared_prefixes_count_once_and_keep_groups_together() -> None:
    """Two groups of two, 100 tokens alike and 10 of one's own: 120 a rank together, 220 torn apart."""
    samples = [
        sample(f"t{group}{member}", f"g{group}", [group] * 100 + [10 + member] * 10)
        for member in (0, 1)
        for group in (0, 1)
    ]
    assert deal(samples, range(4), 2, share_prefixes=True) == [[0, 2], [1, 3]]


def test_a_group_is_torn_apart_where_its_rank_would_be_the_slowest() -> None:
    samples = [sample(f"t{n}", "g", [0] * 10 + [n + 1] * 100) for n in range(4)]
    parts = deal(samples, range(4), 2, share_prefixes=True)
    assert sorted(map(len, parts)) == [2, 2]


def test_each_sample_is_in_one_share_and_each_mini_batch_on_every_rank() -> None:
    samples = of_lengths(*range(3, 10))
    paid = {one.trajectory_id: float(n) for n, one in enumerate(samples)}
    shares = make_shares(samples, paid, [[0, 2, 4, 6], [1, 3, 5]], 3, step=2, share_prefixes=False)
    assert sorted(place for share in shares for place in share.places) == list(range(7))
    for share in shares:
        assert [samples[place] for place in share.places] == share.samples
        assert share.paid == {one.trajectory_id: paid[one.trajectory_id] for one in share.samples}
        assert sorted(i for mini in share.mini_batches for i in mini) == list(range(len(share.samples)))
        assert (len(share.mini_batches), share.num_trajectories, share.step) == (2, 7, 2)
        assert all(share.places[i] % 2 == 0 for i in share.mini_batches[0])


def test_a_single_rank_gets_everything_as_it_is() -> None:
    samples = of_lengths(3, 9, 4)
    (share,) = make_shares(samples, {"t0": 1.0}, [[2, 0], [1]], 1, step=1, share_prefixes=True)
    assert share.samples == samples and share.mini_batches == [[2, 0], [1]] and share.places == [0, 1, 2]


@pytest.mark.parametrize("prefix", [0, 20])
def test_thousands_are_dealt_to_a_hundred_ranks_within_seconds(prefix: int) -> None:
    draw = random.Random(1)
    groups = [[0] * prefix + [draw.randrange(1000) for _ in range(20)] for _ in range(800)]
    samples = [
        sample(f"t{group}{member}", f"g{group}", [*ids, *([group, member] * draw.randrange(20, 60))])
        for group, ids in enumerate(groups)
        for member in range(6)
    ]
    begun = time.process_time()
    parts = deal(samples, range(4800), 100, share_prefixes=True)
    assert time.process_time() - begun < 4
    loads = [sum(len(samples[i].token_ids) for i in part) for part in parts]
    assert sorted(i for part in parts for i in part) == list(range(4800)) and max(loads) < 1.1 * min(loads)
