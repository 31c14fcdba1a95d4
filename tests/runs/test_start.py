"""Where a run's weights begin: what an adapter's folder says of its past, and which settings must agree with it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_checkpoint, make_model

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.checkpoints import METADATA, find_checkpoint, sha256_of
from emailrl.model.load import load_policy
from emailrl.model.policy import Policy
from emailrl.runs.start import find_start, with_lora
from emailrl.settings import Settings, load_settings


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of rank 4 on a tiny model, step 7 of the run ``grpo_masked``."""
    folder = tmp_path_factory.mktemp("adapter")
    return make_checkpoint(folder / "checkpoint-7", make_model(folder / "model")).path


def settings(folder: Path, **changes: Any) -> Settings:
    return load_settings({"adapter": folder} | changes, environ={}, cwd=folder.parent)


def test_a_checkpoints_weights_are_known_by_run_and_step(adapter: Path) -> None:
    start = find_start(settings(adapter))
    assert (start.adapter, start.parent) == (adapter, "grpo_masked:7")
    assert start.settings.model.name == str(adapter.parent / "model")
    assert "the adapter's base" in start.notes[1]
    named = find_start(settings(adapter, model_name="nano"))
    assert named.settings.model.name == "nano"  # load_policy refuses it: another base


def test_another_programs_adapter_is_known_by_path_and_hash(adapter: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (plain / name).write_bytes((adapter / name).read_bytes())
    assert find_start(settings(plain)).parent == f"{plain} sha256:{sha256_of(plain / 'adapter_model.safetensors')}"


def test_a_model_that_a_run_made_is_the_parent_too(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / METADATA).write_text(json.dumps(json.loads((adapter / METADATA).read_text()) | {"files": {}}))
    assert find_start(load_settings({"model_name": str(tmp_path)}, environ={}, cwd=tmp_path)).parent == "grpo_masked:7"
    with pytest.raises(UsageError, match="is a model, not an adapter"):
        find_start(settings(tmp_path))


def test_what_is_no_adapter_or_damaged_is_refused(adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No checkpoint at"):
        find_start(settings(tmp_path / "gone"))
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in adapter.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(EmailRLError, match="is damaged"):
        find_start(settings(copy))


def test_resuming_keeps_the_parent(adapter: Path) -> None:
    found = find_checkpoint(adapter, adapter)
    checkpoint = replace(found, metadata=replace(found.metadata, parent="sft-1:200"))
    start = find_start(settings(adapter), checkpoint)
    assert (start.adapter, start.parent) == (adapter, "sft-1:200")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lora_rank": 8}, "LORA_RANK is 8, but the adapter in .* has 4"),
        ({"lora_alpha": 8}, "LORA_ALPHA is 8, but the adapter in .* has 32"),
        ({"lora_dropout": 0.1}, "LORA_DROPOUT is 0.1, but the adapter in .* has 0.0"),
        ({"target_modules": "q_proj"}, "TARGET_MODULES is q_proj, but the adapter in .* has down_proj,gate_proj"),
    ],
)
def test_a_setting_that_says_otherwise_than_the_adapter_is_an_error(
    adapter: Path, given: dict[str, Any], said: str
) -> None:
    start = find_start(settings(adapter, **given))
    with pytest.raises(UsageError, match=said) as refused:
        load_policy(start.settings, adapter=start.adapter, trainable=True)
    assert "an adapter keeps its own" in refused.value.hint


def test_settings_that_agree_are_taken_and_the_adapters_own_recorded(adapter: Path) -> None:
    start = find_start(settings(adapter, lora_rank=4, target_modules="all-linear"))
    policy = load_policy(start.settings, adapter=start.adapter, trainable=True)
    lora = with_lora(find_start(settings(adapter)).settings, policy.lora).lora
    assert (lora.lora_rank, lora.lora_alpha) == (4, 32)
    assert lora.target_modules == "down_proj,gate_proj,k_proj,o_proj,q_proj,up_proj,v_proj"


def test_the_reference_is_the_adapter_one_starts_from(adapter: Path) -> None:
    def reference(**given: Any) -> str:
        return find_start(settings(adapter, **given)).settings.algorithm.reference

    assert reference(beta=0.01) == "start" and reference(reference="base", beta=0.01) == "base"
    assert reference(beta=0.0) == find_start(Settings()).settings.algorithm.reference == "base"


def test_the_reference_is_the_base_or_the_start_and_the_adapter_comes_back(adapter: Path) -> None:
    base, policy = (
        load_policy(find_start(settings(adapter, reference=which)).settings, adapter=adapter, trainable=True)
        for which in ("base", "start")
    )
    ids = torch.tensor([[5, 6, 7, 8]])

    def logits(one: Policy = policy) -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = one.model(input_ids=ids).logits
        return result

    begun = logits()
    with base.reference():
        assert base.start is None and not torch.allclose(begun, logits(base), atol=1e-3)
    parameters = [parameter for _, parameter in policy.trainable_parameters()]
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(0.05)
    moved = logits()
    with policy.reference():
        assert torch.equal(logits(), begun)
    assert torch.equal(logits(), moved) and not torch.allclose(moved, begun, atol=1e-3)
    with pytest.raises(ZeroDivisionError), policy.reference():
        raise ZeroDivisionError
    assert torch.equal(logits(), moved)
    assert [parameter for _, parameter in policy.trainable_parameters()] == parameters
