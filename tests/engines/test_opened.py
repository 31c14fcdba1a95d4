"""A policy is put together in one place: model, engine, adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import make_checkpoint, make_model, settings_of

from emailrl.base.errors import EmailRLError
from emailrl.engines import open_policy
from emailrl.engines.local.engine import TransformersEngine
from emailrl.engines.local.weights import adapter_sha256


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Any, Path]:
    model = make_model(tmp_path / "model")
    checkpoint = make_checkpoint(tmp_path / "run_masked/final", model)
    return settings_of(tmp_path, model_name=str(model), max_tokens=None), checkpoint.path


def test_it_plays_the_adapter_on_the_bare_base(parts: tuple[Any, Path]) -> None:
    settings, adapter = parts
    opened = open_policy(settings, adapter)
    assert (opened.engine.version, opened.engine.adapter_sha256) == (str(adapter), adapter_sha256(adapter))
    assert not opened.policy.trainable
    opened.close()


def test_the_models_own_limit_holds(parts: tuple[Any, Path]) -> None:
    config = Path(parts[0].model.name) / "generation_config.json"
    config.write_text('{"max_new_tokens": 7}')
    settings, adapter = parts
    assert open_policy(settings, adapter).settings.agent.max_tokens == 7


def test_an_adapter_that_cannot_be_had_leaves_no_engine_open(
    parts: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []
    monkeypatch.setattr(TransformersEngine, "close", lambda engine: closed.append(engine))
    (parts[1] / "adapter_model.safetensors").write_bytes(b"broken")
    with pytest.raises(EmailRLError):
        open_policy(*parts)
    assert len(closed) == 1
