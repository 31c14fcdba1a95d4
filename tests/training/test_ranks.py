"""An update by several ranks equals one process's: gradients, weights, metrics, tokens; and so do its decisions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.processes import in_ranks
from torch import Tensor
from training.updaters import Memory, follow, make_updater

from emailrl.base.errors import EmailRLError
from emailrl.model.fused import enable_fused
from emailrl.ranks import Place, RankGroup, joined
from emailrl.settings import TrainingSettings
from emailrl.training import forward
from emailrl.training.batch import TrainingSample, micro_batches
from emailrl.training.update import Updater

OF_RANKS = ("rank_tokens_mean", "rank_tokens_max", "all_reduce_seconds")


@dataclass(frozen=True, slots=True)
class Trained:
    """What a rank came to."""

    gradients: list[Tensor]
    """After the first step."""
    weights: list[Tensor]
    metrics: list[dict[str, float]]
    tokens: list[Any]
    kl_coef: float
    start: list[Tensor]


def trajectories(count: int) -> list[TrainingSample]:
    """Groups of three that begin alike; the second trajectory is in two samples."""
    draw = torch.Generator().manual_seed(3)
    made = []
    for n in range(count):
        ids = [n // 3 + 1] * 4 + torch.randint(1, 257, (5 + 3 * (n % 4),), generator=draw).tolist()
        for part in range(1 + (n == 1)):
            mask = [int(t > 3 and t % 4 != 0) for t in range(len(ids) - 1)] + [1]
            logprobs = [-5.5 if trained else None for trained in mask]
            made.append(TrainingSample(f"t{n}", f"g{n // 3}", ids[part:], mask[part:], logprobs[part:]))
    return made


def earned(count: int) -> dict[str, float]:
    return {f"t{n}": math.sin(n + 1.0) for n in range(count)}


def train(
    make: Callable[..., Updater], count: int, steps: int, paid: Mapping[str, float], options: Mapping[str, Any]
) -> Any:
    """Train so many steps with the ranks that are there; each its result."""
    with joined(TrainingSettings(rank_timeout=300)) as ranks:
        # Only rank 0 has the adapter that is to be trained; the others get it from it.
        updater = make(ranks=ranks, moved=ranks.is_first, **options)
        updater.synchronize()
        if isinstance(ranks, RankGroup):
            ranks.started()
        start = [p.detach().clone() for p in (*updater.parameters, *updater.critic)]
        gradients: list[list[Tensor]] = []
        metrics, tokens = [], []

        def note(_: object = None) -> None:
            gradients.append([p.grad.clone() for p in (*updater.parameters, *updater.critic) if p.grad is not None])

        if isinstance(ranks, RankGroup) and not ranks.is_first:
            ranks.follow(lambda: note(follow(updater, ranks)))
        else:
            for step in range(1, steps + 1):
                result = updater.train(trajectories(count), paid, step=step)
                note()
                metrics.append(result.metrics)
                tokens = [(row.old_logprobs, row.logprobs, row.advantages) for row in result.tokens]
        weights = [p.detach().clone() for p in (*updater.parameters, *updater.critic)]
        return Trained(gradients[0] if gradients else [], weights, metrics, tokens, updater.kl.coef, start)


@pytest.fixture
def compare(tiny_model: Path, tmp_path: Path) -> Callable[..., tuple[Trained, list[Trained]]]:
    """Train with one process, and with ranks; settings by name."""

    def run(world: int, count: int, paid: Mapping[str, float] | None = None, *, steps: int = 3, **options: Any) -> Any:
        given = {"learning_rate": 1e-3, "warmup_steps": 0, "beta": 0.1, "max_tokens_per_micro_batch": 30} | options
        work = partial(train, partial(make_updater, tiny_model), count, steps, paid or earned(count))
        alone = {name: value for name, value in given.items() if name != "shard"}
        return work(alone), in_ranks(world, partial(work, given), tmp_path)

    return run


def assert_equal(one: Trained, ranks: list[Trained]) -> None:
    for rank in ranks:
        for summed, whole in zip(rank.gradients, one.gradients, strict=True):
            assert float((summed - whole).norm()) <= 5e-5 * float(whole.norm())  # 1.1e-5 was seen
        for mine, other in zip(rank.weights, one.weights, strict=True):
            torch.testing.assert_close(mine, other, atol=5e-6, rtol=0)  # Adam divides rounding by its own size
        assert all(map(torch.equal, rank.weights, ranks[0].weights))
        assert rank.kl_coef == ranks[0].kl_coef == pytest.approx(one.kl_coef, rel=1e-5)
    first = ranks[0]
    for mine, other in zip(first.metrics, one.metrics, strict=True):
        several = {name: mine.pop(name) for name in OF_RANKS}
        assert several["rank_tokens_max"] >= several["rank_tokens_mean"] > 0 < several["all_reduce_seconds"]
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-5)
    for row, other in zip(first.tokens, one.tokens, strict=True):
        for values, wanted in zip(row, other, strict=True):
            assert values == pytest.approx(wanted, rel=1e-4, abs=1e-5)


SHARDED = {
    "shard": "host", "engine": "vllm", "vllm_urls": "http://127.0.0.1:1",
    "vllm_probe_tolerance": 1.0,  # the log-probabilities are made up
}  # fmt: skip


@pytest.mark.parametrize(("world", "count"), [(3, 7), (4, 3)])
def test_ranks_give_the_gradients_and_weights_of_one(world: int, count: int, compare: Callable[..., Any]) -> None:
    one, ranks = compare(world, count)
    moved = [(now - then).abs().max() for now, then in zip(one.weights, one.start, strict=True)]
    assert min(moved) > 1e-3
    assert_equal(one, ranks)


@pytest.mark.parametrize(
    ("world", "count", "options"),
    [
        (2, 5, {"algorithm": "ppo", "num_mini_batches": 2, "update_epochs": 2}),
        (2, 5, {"algorithm": "reinforce_pp", "kl_target": 0.05}),
        (2, 5, {"algorithm": "gspo", "num_mini_batches": 3}),
        (2, 5, {"max_grad_norm": 0.01, "reference": "start", "prefix_sharing": False, "packing": False}),
        (2, 5, {"algorithm": "ppo", "critic_warmup_steps": 3, "weight_decay": 0.1}),
        (3, 2, SHARDED | {"algorithm": "opd"}),
        (3, 2, SHARDED | {"packing": False, "gradient_checkpointing": "on"}),  # one rank has nothing to train
        (2, 4, SHARDED | {"algorithm": "ppo", "num_mini_batches": 2, "update_epochs": 2, "critic_warmup_steps": 1}),
    ],
)
def test_whatever_the_algorithm_and_wherever_the_base_lies(
    world: int, count: int, options: dict[str, Any], compare: Callable[..., Any]
) -> None:
    assert_equal(*compare(world, count, **options))


def scored(make: Callable[..., Updater]) -> Tensor:
    """Fused log-probabilities after the adapter came from rank 0; they were computed once before."""
    with joined(TrainingSettings(rank_timeout=300)) as ranks:
        updater = make(ranks=ranks, moved=ranks.is_first)
        assert enable_fused(updater.policy.model, "off") is None
        (batch,) = micro_batches(trajectories(1), updater.forward.layout())
        updater.forward.score(batch)
        updater.synchronize()
        logprobs = updater.forward.score(batch).old_logprobs
        assert logprobs is not None
        if isinstance(ranks, RankGroup) and not ranks.is_first:
            ranks.follow(lambda: None)
        return logprobs


def test_fused_layers_follow_the_adapter_that_comes_from_rank_0(tiny_model: Path, tmp_path: Path) -> None:
    first, second = in_ranks(2, partial(scored, partial(make_updater, tiny_model)), tmp_path)
    torch.testing.assert_close(first, second)


def test_an_update_that_is_not_finite_on_one_rank_is_skipped_by_all(compare: Callable[..., Any]) -> None:
    paid = earned(4) | {"t2": math.nan}
    one, ranks = compare(2, 4, paid, steps=2)
    assert all(map(torch.equal, one.start, ranks[1].weights))
    assert ranks[0].metrics[0]["updates_skipped"] == one.metrics[0]["updates_skipped"] == 1


@pytest.mark.parametrize("when_training", [False, True])
def test_memory_that_runs_out_on_one_rank_halves_its_micro_batches_with_the_same_result(
    when_training: bool, compare: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "token_logprobs", Memory(25, rank=1, training=when_training))
    one, ranks = compare(2, 6, steps=2, max_tokens_per_micro_batch=60, packing=False)
    halved = [[step.pop("micro_batches_halved") for step in trained.metrics] for trained in (one, ranks[0])]
    assert halved[0] == [0, 0] and halved[1][0] > 0 == halved[1][1]  # both ranks have learned what fits
    assert_equal(one, ranks)


@pytest.mark.parametrize(
    ("where", "said"),
    [("sample", "Out of memory on a single sample of"), ("optimizer", "Out of memory while updating the adapter")],
)
def test_what_does_not_fit_on_one_rank_ends_all_with_one_error(
    where: str, said: str, compare: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = torch.optim.AdamW.step

    def step(optimizer: torch.optim.AdamW) -> None:
        if Place.here().rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        honest(optimizer)

    if where == "sample":
        monkeypatch.setattr(forward, "token_logprobs", Memory(5, rank=1, training=True))
    else:
        monkeypatch.setattr(torch.optim.AdamW, "step", step)
    _, (zero, one) = compare(2, 4)
    assert isinstance(zero, EmailRLError) and zero.message.startswith(f"Rank 1: {said}")
    assert isinstance(one, Trained)  # it left the error to rank 0


def test_out_of_memory_ends_a_sharded_run(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any, **named: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(forward, "token_logprobs", full)
    work = partial(train, partial(make_updater, tiny_model), 4, 1, earned(4), SHARDED)
    for error in in_ranks(2, work, tmp_path):
        assert isinstance(error, EmailRLError)
        assert error.message.startswith("Out of memory on a micro-batch of")
        assert "MAX_TOKENS_PER_MICRO_BATCH" in error.hint
