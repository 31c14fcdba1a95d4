"""Loading and saving policies, and adapters that are refused."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import peft_model

from emailrl.errors import EmailRLError, UsageError
from emailrl.model import load, resolve
from emailrl.model.load import load_policy
from emailrl.model.resolve import same_base
from emailrl.settings import Settings


def settings_for(model: Path | str, /, **sections: dict[str, Any]) -> Settings:
    model_section = {"name": str(model), **sections.pop("model", {})}
    return Settings.model_validate({"model": model_section, **sections})


def test_fresh_adapter_trains_alone_and_changes_nothing_yet(tiny_model: Path) -> None:
    base = load_policy(settings_for(tiny_model))
    policy = load_policy(settings_for(tiny_model, lora={"lora_rank": 4, "lora_alpha": 8}), trainable=True)
    ids = torch.arange(1, 9)[None]
    assert torch.equal(policy.model(input_ids=ids).logits, base.model(input_ids=ids).logits)
    names = [name for name, _ in policy.trainable_parameters()]
    assert len(names) == 2 * 7 * 2 and all("lora_" in name for name in names)
    assert base.trainable_parameters() == [] and base.lora == {} and not base.model.training
    assert policy.lora["rank"] == 4 and policy.lora["alpha"] == 8 and policy.lora["dropout"] == 0
    assert policy.lora["target_modules"] == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    assert (policy.device.type, policy.dtype) == ("cpu", torch.float32)
    assert policy.tokenizer.pad_token_id is not None


def test_an_offload_without_shards_is_noted(tiny_model: Path) -> None:
    for model, count in (({"shard_offload": True}, 1), ({}, 0), ({"shard_offload": True, "shard": "off"}, 0)):
        notes = load_policy(settings_for(tiny_model, model=model), trainable=True).notes
        assert sum(note.startswith("SHARD_OFFLOAD has no effect: SHARD=auto") for note in notes) == count


def test_the_seed_alone_decides_a_fresh_adapter(tiny_model: Path) -> None:
    def adapter(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(int(time.time_ns() % 1000))
        settings = settings_for(tiny_model, training={"seed": seed})
        before = torch.random.get_rng_state()
        parameters = [parameter for _, parameter in load_policy(settings, trainable=True).trainable_parameters()]
        assert torch.equal(torch.random.get_rng_state(), before)
        return parameters

    first, again, other = adapter(1), adapter(1), adapter(2)
    assert all(map(torch.equal, first, again))
    assert not all(map(torch.equal, first, other))


def moved(tiny_model: Path, **sections: dict[str, Any]) -> load.Policy:
    policy = load_policy(settings_for(tiny_model, **sections), trainable=True)
    generator = torch.Generator().manual_seed(5)
    for _, parameter in policy.trainable_parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return policy


def test_save_and_load_are_exact(tiny_model: Path, tmp_path: Path) -> None:
    policy = moved(tiny_model)
    policy.save_adapter(tmp_path / "adapter")
    files = {file.name for file in (tmp_path / "adapter").iterdir()}
    assert files == {
        "adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "tokenizer_config.json"
    }  # fmt: skip
    for trainable in (True, False):
        again = load_policy(settings_for(tiny_model), adapter=tmp_path / "adapter", trainable=trainable)
        ids = torch.arange(1, 9)[None]
        assert torch.equal(again.model(input_ids=ids).logits, policy.model(input_ids=ids).logits)
        assert bool(again.trainable_parameters()) == trainable
    resumed = load_policy(settings_for(tiny_model), adapter=tmp_path / "adapter", trainable=True)
    for (name, value), (other_name, other) in zip(
        policy.trainable_parameters(), resumed.trainable_parameters(), strict=True
    ):
        assert name == other_name and torch.equal(value, other)


def test_an_adapter_is_not_read_on_the_first_gpu(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where PEFT puts it by default: every rank of a host would take memory there."""
    moved(tiny_model).save_adapter(tmp_path)
    monkeypatch.setattr(peft_model, "infer_device", lambda: "cuda")
    assert load_policy(settings_for(tiny_model), adapter=tmp_path, trainable=True).trainable_parameters()


def test_peft_loads_what_was_saved(tiny_model: Path, tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM

    policy = moved(tiny_model)
    policy.save_adapter(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tiny_model.resolve())
    assert config["target_modules"] == sorted(config["target_modules"]) and config["inference_mode"] is True
    model = AutoPeftModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(1, 9)[None]
    assert torch.equal(model(input_ids=ids).logits, policy.model(input_ids=ids).logits)


def test_reference_is_the_base_and_the_adapter_comes_back(tiny_model: Path) -> None:
    policy, base = moved(tiny_model), load_policy(settings_for(tiny_model))
    ids = torch.arange(1, 9)[None]
    before = policy.model(input_ids=ids).logits
    with policy.reference() as model:
        assert torch.equal(model(input_ids=ids).logits, base.model(input_ids=ids).logits)
    assert torch.equal(policy.model(input_ids=ids).logits, before)
    assert not torch.equal(before, base.model(input_ids=ids).logits)
    assert policy.trainable_parameters()
    with base.reference() as model:
        assert model is base.model


def test_the_name_nano_survives_being_moved(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "NANO_DIR", tiny_model)
    policy = load_policy(settings_for("nano"), trainable=True)
    policy.save_adapter(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == "nano"
    load_policy(settings_for("nano"), adapter=tmp_path)
    load_policy(settings_for(tiny_model), adapter=tmp_path)  # the packaged folder, named by its path
    assert same_base("nano", "nano") and not same_base("nano", "Qwen/Qwen3-0.6B")


def test_an_adapter_of_another_base_is_refused_by_both_names(tiny_model: Path, tmp_path: Path) -> None:
    moved(tiny_model).save_adapter(tmp_path)
    with pytest.raises(UsageError) as caught:
        load_policy(settings_for("Qwen/Qwen3-0.6B"), adapter=tmp_path)
    assert str(tiny_model) in str(caught.value) and "'Qwen/Qwen3-0.6B'" in str(caught.value)


@pytest.mark.parametrize("damage", ["no config", "no weights", "broken config", "wrong shape"])
def test_a_damaged_adapter_is_one_clear_line(tiny_model: Path, tmp_path: Path, damage: str) -> None:
    moved(tiny_model).save_adapter(tmp_path)
    config = tmp_path / "adapter_config.json"
    if damage == "no config":
        config.unlink()
    elif damage == "no weights":
        (tmp_path / "adapter_model.safetensors").unlink()
    elif damage == "broken config":
        config.write_text("{")
    else:
        config.write_text(json.dumps(json.loads(config.read_text()) | {"r": 3}))
    with pytest.raises(EmailRLError, match=str(tmp_path)) as caught:
        load_policy(settings_for(tiny_model), adapter=tmp_path)
    assert "\n" not in str(caught.value)


def test_target_modules(tiny_model: Path) -> None:
    policy = load_policy(settings_for(tiny_model, lora={"target_modules": "q_proj, v_proj"}), trainable=True)
    assert policy.lora["target_modules"] == ["q_proj", "v_proj"]
    with pytest.raises(UsageError, match=r"no layer of this model: qproj\. It has down_proj, gate_proj"):
        load_policy(settings_for(tiny_model, lora={"target_modules": "qproj,v_proj"}), trainable=True)


def test_gradient_checkpointing_gives_the_same_gradient(tiny_model: Path) -> None:
    gradients = []
    for checkpointing in ("off", "on"):
        policy = load_policy(
            settings_for(tiny_model, training={"gradient_checkpointing": checkpointing}), trainable=True
        )
        assert not policy.model.training and policy.model.get_base_model().is_gradient_checkpointing == (
            checkpointing == "on"
        )
        policy.model.train()
        policy.model(input_ids=torch.arange(1, 9)[None]).logits.logsumexp(-1).sum().backward()
        gradients.append([parameter.grad for _, parameter in policy.trainable_parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed, atol=1e-6, rtol=0)


def test_packing_is_a_setting_and_nothing_is_fused_on_a_cpu(tiny_model: Path) -> None:
    from emailrl.model.fused.model import fused_backbone

    packed = load_policy(settings_for(tiny_model, model={"device": "cpu"}), trainable=True)
    assert packed.packs and fused_backbone(packed.model) is None
    assert not packed.model.get_base_model().is_gradient_checkpointing, "auto recomputes nothing on a CPU"
    padded = load_policy(settings_for(tiny_model, training={"packing": False}), trainable=True)
    assert not padded.packs and not load_policy(settings_for(tiny_model)).packs


@pytest.mark.parametrize(("given", "read"), [(True, "on"), ("true", "on"), ("0", "off"), ("selective", "selective")])
def test_gradient_checkpointing_as_it_may_be_written(given: object, read: str) -> None:
    settings = Settings.model_validate({"training": {"gradient_checkpointing": given}})
    assert settings.training.gradient_checkpointing == read
