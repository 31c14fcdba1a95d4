"""Models that are refused: hostile ones, and what is no model, does not fit or needs a GPU."""

from __future__ import annotations

import json
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from emailrl.errors import EmailRLError, UsageError
from emailrl.model import base, device, size, unsloth_backend
from emailrl.model.device import choose_device, choose_dtype
from emailrl.model.load import load_policy
from emailrl.model.resolve import resolve_model
from emailrl.settings import Settings


def settings_for(model: Path | str, /, **sections: dict[str, Any]) -> Settings:
    model_section = {"name": str(model), **sections.pop("model", {})}
    return Settings.model_validate({"model": model_section, **sections})


def test_code_in_a_models_folder_never_runs_and_nobody_is_asked(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder's own architecture is refused; for a known one the library's own code is taken."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "pwn.py").write_text(f"open({str(tmp_path / 'PWNED')!r}, 'w')\nclass Model: ...\nclass Config: ...\n")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "pwn.Config", "AutoModelForCausalLM": "pwn.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    load_policy(settings_for(folder))
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "theirs"}))
    with pytest.raises(EmailRLError, match="failed to load"):
        load_policy(settings_for(folder))
    assert not (tmp_path / "PWNED").exists()


def test_an_attention_that_is_not_installed_is_answered_with_the_one_that_is(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(*_: Any, **__: Any) -> Any:
        raise ImportError("FlashAttention2 has been toggled on, but it cannot be used.")

    monkeypatch.setattr(base.AutoModelForCausalLM, "from_pretrained", absent)
    with pytest.raises(EmailRLError) as raised:
        load_policy(settings_for(tiny_model, model={"attn_implementation": "flash_attention_2"}))
    assert raised.value.hint == "Set ATTN_IMPLEMENTATION=sdpa, or install the package for flash_attention_2."


def test_an_adapter_inside_a_models_folder_is_not_put_on_it_unseen(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    load_policy(settings_for(tiny_model), trainable=True).save_adapter(tmp_path / "adapter")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copyfile(tmp_path / "adapter" / name, folder / name)
    with pytest.raises(UsageError, match="model is an adapter, not a model"):
        load_policy(settings_for(folder))


def test_an_adapter_inside_a_hubs_model_is_not_put_on_it_unseen(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A download as the hub's cache keeps it, with no network."""
    cached = tmp_path / "models--someone--mail" / "snapshots" / ("0" * 40)
    shutil.copytree(tiny_model, cached)
    (cached / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1}))
    (tmp_path / "models--someone--mail" / "refs").mkdir()
    (tmp_path / "models--someone--mail" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match="someone/mail' is an adapter"):
        size.load_config("someone/mail", "someone/mail")


def test_an_error_without_text_is_named_by_its_type(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", fail)
    with pytest.raises(EmailRLError, match="failed to load: OSError"):
        size.load_config("tiny", tiny_model)


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_kernels_that_a_models_config_names_are_not_asked_for(tiny_model: Path, tmp_path: Path, key: str) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {key: "stranger/kernel"}
    (folder / "config.json").write_text(json.dumps(config))
    assert load_policy(settings_for(folder)).model.config._attn_implementation == "sdpa"


def test_weights_in_a_pickle_are_not_opened(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    weights = load_policy(settings_for(folder)).model.state_dict()
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(EmailRLError, match=r"failed to load: .*safetensors"):
        load_policy(settings_for(folder))


@pytest.mark.parametrize("converted", [False, True])
def test_truncated_weights(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, converted: bool) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    if converted:
        monkeypatch.setattr(base, "SMOL", str(folder))
    hint = f"Delete {folder}: the next run converts the model again." if converted else "Check the model's files."
    with pytest.raises(EmailRLError, match=r"failed to load: [^\n]*[^.]\. ") as caught:
        load_policy(settings_for(folder))
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("nanno", r"Unknown model 'nanno'\. Did you mean nano\?"),
        ("no/such/folder", r"neither a folder nor a hub name"),
        ("./missing", r"neither a folder nor a hub name"),
        ("two words", r"neither a folder nor a hub name"),
        ("", r"neither a folder nor a hub name"),
    ],
)
def test_what_cannot_be_a_model(name: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        resolve_model(name)


def test_folders(tiny_model: Path, tmp_path: Path) -> None:
    assert resolve_model(str(tiny_model)) == tiny_model.resolve()
    assert resolve_model("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    with pytest.raises(UsageError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UsageError, match="is an adapter, not a model"):
        resolve_model(str(tmp_path))
    (tmp_path / "adapter_config.json").unlink()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EmailRLError, match="failed to load") as caught:
        load_policy(settings_for(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*address: object, **options: object) -> None:
        raise socket.gaierror("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


def test_a_gpu_sized_model_on_a_cpu_is_refused_at_once(no_network: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size, "available_memory", lambda: int(500e9))
    monkeypatch.setattr(device, "computes_bf16", lambda: False)
    with pytest.raises(EmailRLError, match=r"14\.77 billion parameters, 59 GB\) needs a GPU") as caught:
        load_policy(Settings())
    assert (
        caught.value.exit_code == 1
        and "--model nano" in caught.value.hint
        and "EMAILRL_DEVICE=cpu" in caught.value.hint
        and "\n" not in str(caught.value)
    )
    # DEVICE=cpu insists; then memory alone decides, and after it the network.
    with pytest.raises(EmailRLError, match="the hub cannot be reached"):
        load_policy(settings_for("OpenPipe/Qwen3-14B-Instruct", model={"device": "cpu"}))
    monkeypatch.setattr(size, "available_memory", lambda: int(20e9))
    monkeypatch.setattr(size, "total_memory", lambda: int(64e9))
    with pytest.raises(EmailRLError, match="this machine has 20 GB of 64 GB of memory free"):
        load_policy(settings_for("OpenPipe/Qwen3-14B-Instruct", model={"device": "cpu"}))


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "someone/mail-model", "gpt2"])
def test_no_network_is_said_without_half_a_minute_of_retries(no_network: None, name: str) -> None:
    began = time.monotonic()
    with pytest.raises(EmailRLError, match="not on this machine, and the hub cannot be reached") as caught:
        load_policy(settings_for(name))
    assert time.monotonic() - began < 5 and caught.value.exit_code == 1 and "nano" in caught.value.hint


def test_the_size_of_a_folder_comes_from_its_config(tiny_model: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    config = size.load_config("tiny", tiny_model)
    with safe_open(tiny_model / "model.safetensors", "pt") as weights:
        stored = sum(weights.get_tensor(name).numel() for name in weights.keys())  # noqa: SIM118
    assert size.count_parameters(config) == stored
    large = json.loads((tiny_model / "config.json").read_text()) | {"hidden_size": 65536, "intermediate_size": 65536}
    (tmp_path / "config.json").write_text(json.dumps(large))  # no weights beside it: they must not be asked for
    with pytest.raises(EmailRLError, match="needs a GPU"):
        load_policy(settings_for(tmp_path))


def test_devices() -> None:
    for name in ("gpu", "meta", "mps"):
        with pytest.raises(UsageError, match=f"EMAILRL_DEVICE={name} is not supported"):
            choose_device(name)
    with pytest.raises(EmailRLError, match=r"this machine has \d+ usable CUDA GPU"):
        choose_device("cuda:99")
    assert choose_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert choose_dtype("fp16", torch.device("cpu")) == torch.float16


def test_larger_models_sample_in_bf16_on_a_cpu_that_computes_in_it(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dtypes() -> tuple[torch.dtype, torch.dtype]:
        loaded = [load_policy(settings_for(tiny_model, model={"device": "cpu"}), trainable=on) for on in (False, True)]
        assert [each.model.dtype for each in loaded] == [each.dtype for each in loaded]
        return loaded[0].dtype, loaded[1].dtype

    monkeypatch.setattr(device, "computes_bf16", lambda: True)
    assert dtypes() == (torch.float32, torch.float32)  # too small to gain
    monkeypatch.setattr(device, "BF16_FROM", 1000)
    assert dtypes() == (torch.bfloat16, torch.float32)
    monkeypatch.setattr(device, "computes_bf16", lambda: False)
    assert dtypes() == (torch.float32, torch.float32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
def test_what_needs_a_gpu_says_so(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EmailRLError, match=r"this machine has 0 usable CUDA GPUs.*Use EMAILRL_DEVICE=auto\."):
        load_policy(settings_for(tiny_model, model={"device": "cuda"}))
    with pytest.raises(EmailRLError, match="LOAD_IN_4BIT needs a CUDA GPU"):
        load_policy(settings_for(tiny_model, model={"load_in_4bit": True}))
    with pytest.raises(EmailRLError, match="unsloth backend needs a CUDA GPU"):
        load_policy(settings_for(tiny_model, model={"backend": "unsloth"}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(unsloth_backend, "find_spec", lambda name: None)
    with pytest.raises(EmailRLError, match=r"pip install -e '\.\[unsloth\]'"):
        load_policy(settings_for(tiny_model, model={"backend": "unsloth"}))
