"""Ranks that share a base train as one process that has all of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.processes import in_ranks
from training.test_ranks import assert_equal, earned, train, trajectories
from training.updaters import follow, make_updater

from emailrl.base.errors import EmailRLError
from emailrl.engines.vllm.probe import Probe
from emailrl.ranks import RankGroup, joined
from emailrl.settings import TrainingSettings

GIVEN = {
    "learning_rate": 1e-3, "warmup_steps": 0, "beta": 0.1, "max_tokens_per_micro_batch": 30, "engine": "vllm",
    "vllm_urls": "http://127.0.0.1:1", "vllm_probe_tolerance": 1.0,  # the log-probabilities are made up
}  # fmt: skip
SHARDED = {"shard": "host"}


@pytest.mark.parametrize(
    ("world", "count", "options"),
    [
        (2, 5, {}),
        (3, 2, {"packing": False, "gradient_checkpointing": "on"}),  # one rank has nothing to train
        (2, 4, {"algorithm": "ppo", "num_mini_batches": 2, "update_epochs": 2, "critic_warmup_steps": 1}),
    ],
    ids=["uneven", "an empty rank", "critic"],
)
def test_ranks_with_a_sharded_base_train_as_one_process(
    world: int, count: int, options: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    given = GIVEN | options
    one = train(partial(make_updater, tiny_model), count, 2, earned(count), given)
    work = partial(train, partial(make_updater, tiny_model), count, 2, earned(count), given | SHARDED)
    assert_equal(one, in_ranks(world, work, tmp_path))


def probed(model: Path, adapter: Path) -> Any:
    """What rank 0 alone, playing, thinks of the probe's text before and after a step, and the weights afterwards."""
    with joined(TrainingSettings(rank_timeout=60)) as ranks:
        updater = make_updater(model, ranks=ranks, **GIVEN, **SHARDED)
        updater.synchronize()
        if isinstance(ranks, RankGroup):
            ranks.started()
        if isinstance(ranks, RankGroup) and not ranks.is_first:
            ranks.follow(lambda: follow(updater, ranks))
            return []
        probe, found = Probe(updater.policy, temperature=0.7), []
        if ranks.is_first and not adapter.exists():
            updater.policy.save_adapter(adapter)
        for step in (1, 2):
            probe.load(adapter if step == 2 else None)
            found.append(probe.score(probe.ids))
            updater.train(trajectories(4), earned(4), step=step)
        return [found, [p.detach().clone() for p in updater.parameters]]


def test_rank_0_alone_proves_an_adapter_between_updates(tiny_model: Path, tmp_path: Path) -> None:
    expected, weights = probed(tiny_model, tmp_path / "adapter")
    (found, moved), *others = in_ranks(2, partial(probed, tiny_model, tmp_path / "adapter"), tmp_path)
    assert expected[0] != expected[1] and others == [[]]
    for mine, wanted in zip(found, expected, strict=True):
        assert mine == pytest.approx(wanted, abs=1e-5)
    for one, other in zip(moved, weights, strict=True):
        torch.testing.assert_close(one, other, atol=5e-6, rtol=0)


def test_out_of_memory_ends_a_sharded_run(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any, **named: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("emailrl.training.forward.token_logprobs", full)
    work = partial(train, partial(make_updater, tiny_model), 4, 1, earned(4), GIVEN | SHARDED)
    for error in in_ranks(2, work, tmp_path):
        assert isinstance(error, EmailRLError)
        assert error.message.startswith("Out of memory on a micro-batch of")
        assert "MAX_TOKENS_PER_MICRO_BATCH" in error.hint
