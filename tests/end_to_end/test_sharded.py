"""Whole runs with a sharded base, sampled by a server: the run with a whole one, or one clear error."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from end_to_end.conftest import SettingsAt
from end_to_end.test_ranks import assert_close, metrics, rank, sampled
from engines.vllm_stub import VllmStub
from ranks.processes import in_ranks

from emailrl.base.errors import UsageError
from emailrl.training.loop import train

SHARDED = {"shard": "host", "per_device_train_batch_size": 1}


@pytest.fixture
def served_at(settings_at: SettingsAt, stub: VllmStub) -> SettingsAt:
    """The same, on the server."""
    return partial(settings_at, engine="vllm", vllm_urls=stub.url, max_staleness=0, beta=0.1)


@pytest.mark.parametrize("lag", [0, 1])
def test_two_ranks_with_a_sharded_base_make_the_run_of_one(
    lag: int, served_at: SettingsAt, stub: VllmStub, tmp_path: Path
) -> None:
    """Rank 0 proves to itself with each adapter that the server samples from it, between updates."""
    one = train(served_at("one", per_device_train_batch_size=2, max_staleness=lag))
    proofs = stub.calls.count("/v1/load_lora_adapter")
    settings = served_at("two", **SHARDED, max_staleness=lag)
    result, _ = in_ranks(2, partial(rank, settings, tmp_path / "two"), tmp_path)
    assert result.steps == 3 and stub.calls.count("/v1/load_lora_adapter") == 2 * proofs
    assert_close(result.run_dir, one.run_dir)
    assert sampled(result.run_dir) == sampled(one.run_dir)
    for mine, other in zip(metrics(result.run_dir), metrics(one.run_dir), strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-3, abs=1e-5)
        assert mine["kl"] == pytest.approx(other["kl"], rel=1e-3, abs=1e-6)
    assert "is sharded over the 2 ranks of a host" in (result.run_dir / "training.log").read_text()


def test_a_sharded_base_without_servers_is_refused_by_all_ranks(served_at: SettingsAt, tmp_path: Path) -> None:
    settings = served_at("two", **SHARDED | {"engine": "transformers", "vllm_urls": "", "max_staleness": None})
    first, second = in_ranks(2, partial(rank, settings, tmp_path / "two"), tmp_path)
    assert isinstance(first, UsageError) and "cannot sample from a sharded base model" in first.message
    assert "VLLM_URLS" in first.hint and second is not None
    assert not (tmp_path / "two").exists() or not list((tmp_path / "two").rglob("metrics.jsonl"))


def test_one_process_has_nobody_to_share_a_base_with(served_at: SettingsAt) -> None:
    with pytest.raises(UsageError, match="SHARD=host needs at least two ranks") as error:
        train(served_at("one", **SHARDED))
    assert "--nproc" in error.value.hint
