"""Policies opened in one place: model, engine, adapter; and what the in-process engine takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import make_checkpoint, make_model, settings_of

from emailrl.base.errors import EmailRLError
from emailrl.checkpoints import WEIGHTS, sha256_of
from emailrl.engines import open_policy
from emailrl.engines.budget import merges, most_requests, most_rows, rows_per_server
from emailrl.engines.local.engine import TransformersEngine
from emailrl.settings import AgentSettings


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Any, Path]:
    model = make_model(tmp_path / "model")
    checkpoint = make_checkpoint(tmp_path / "run_masked/final", model)
    return settings_of(tmp_path, model_name=str(model), max_tokens=None), checkpoint.path


def test_it_plays_the_adapter_on_the_bare_base_within_the_models_own_limit(parts: tuple[Any, Path]) -> None:
    settings, adapter = parts
    (Path(settings.model.name) / "generation_config.json").write_text('{"max_new_tokens": 7}')
    settings, policy, engine = open_policy(settings, adapter)
    assert (engine.version, engine.adapter_sha256) == (str(adapter), sha256_of(adapter / WEIGHTS))
    assert not policy.trainable and settings.agent.max_tokens == 7


def test_an_adapter_that_cannot_be_had_leaves_no_engine_open(
    parts: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []
    monkeypatch.setattr(TransformersEngine, "close", lambda engine: closed.append(engine))
    (parts[1] / "adapter_model.safetensors").write_bytes(b"broken")
    with pytest.raises(EmailRLError):
        open_policy(*parts)
    assert len(closed) == 1


def test_servers_take_more_conversations_at_once_unless_told_and_small_models_are_merged() -> None:
    few = AgentSettings(max_batch_trajectories=8)
    assert (rows_per_server(AgentSettings()), rows_per_server(few)) == (256, 8)
    assert (most_requests(AgentSettings(), 3), most_requests(few, 3)) == (768, 24)
    assert most_requests(AgentSettings(rollout_concurrency=10), 3) == 10
    assert merges(10**9, quantized=False)
    assert not merges(10**9 + 1, quantized=False) and not merges(1, quantized=True)


@pytest.mark.parametrize(
    ("given", "parameters", "on_gpu", "rows"),
    [
        ({}, 50_000_000, False, 16),
        ({}, 49_999_999, False, 64),
        ({}, 50_000_000, True, 64),
        ({"max_batch_trajectories": 48}, 50_000_000, False, 48),
        ({"max_batch_trajectories": 8}, 50_000_000, False, 8),
    ],
)
def test_a_cpu_holds_fewer_conversations_of_a_larger_model_unless_told(
    given: dict[str, int], parameters: int, on_gpu: bool, rows: int
) -> None:
    assert most_rows(AgentSettings(**given), parameters, on_gpu=on_gpu) == rows
