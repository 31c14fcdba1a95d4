"""Loading and saving policies; hostile models, and what is no model, does not fit or needs a GPU."""

from __future__ import annotations

import json
import shutil
import socket
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from emailrl.agent.play import check_template
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.engines import open_policy
from emailrl.model import policy as load
from emailrl.model import resolve, shape
from emailrl.model.fused import fused_backbone
from emailrl.model.packing import takes_packed
from emailrl.model.policy import Policy, choose_dtype, load_policy
from emailrl.model.resolve import resolve_model, same_base, with_own_settings, with_token_limit
from emailrl.runs.resume import find_start
from emailrl.settings import AgentSettings, Settings

IDS = torch.arange(1, 9)[None]


def loaded(model: Path | str, /, *, adapter: Path | None = None, trainable: bool = False, **sections: Any) -> Policy:
    critic, model_section = sections.pop("critic", False), {"name": str(model), **sections.pop("model", {})}
    settings = Settings.model_validate({"model": model_section, **sections})
    return load_policy(settings, adapter=adapter, trainable=trainable, critic=critic)


def logits_of(policy: Policy) -> torch.Tensor:
    logits: torch.Tensor = policy.model(input_ids=IDS).logits
    return logits


def test_fresh_adapter_trains_alone_and_changes_nothing_yet(tiny_model: Path) -> None:
    base = loaded(tiny_model)
    policy = loaded(tiny_model, lora={"lora_rank": 4, "lora_alpha": 8}, trainable=True)
    assert torch.equal(logits_of(policy), logits_of(base))
    names = [name for name, _ in policy.trainable_parameters()]
    assert len(names) == 2 * 7 * 2 and all("lora_" in name for name in names)
    assert base.trainable_parameters() == [] and base.lora == {} and not base.model.training
    modules = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert policy.lora == {"rank": 4, "alpha": 8, "dropout": 0, "target_modules": modules}
    assert (policy.device.type, policy.dtype) == ("cpu", torch.float32)
    assert policy.tokenizer.pad_token_id is not None
    policy = loaded(tiny_model, algorithm={"reference": "start"}, trainable=True, critic=True)
    assert policy.value_head is not None and policy.start is not None
    assert all(map(torch.equal, policy.start, (one for _, one in policy.trainable_parameters())))
    bare = loaded(tiny_model, algorithm={"reference": "start"})
    assert bare.value_head is bare.start is None and bare.accompanied is nullcontext


def test_the_seed_alone_decides_a_fresh_adapter(tiny_model: Path) -> None:
    def adapter(seed: int) -> torch.Tensor:
        torch.rand(seed)  # moves the generator, which loading leaves as it is
        before = torch.random.get_rng_state()
        policy = loaded(tiny_model, training={"seed": seed}, trainable=True)
        assert torch.equal(torch.random.get_rng_state(), before)
        return torch.cat([parameter.flatten() for _, parameter in policy.trainable_parameters()])

    assert torch.equal(adapter(1), adapter(1)) and not torch.equal(adapter(1), adapter(2))


def moved(tiny_model: Path, **sections: dict[str, Any]) -> Policy:
    policy = loaded(tiny_model, trainable=True, **sections)
    generator = torch.Generator().manual_seed(5)
    for _, parameter in policy.trainable_parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return policy


def test_save_and_load_are_exact(tiny_model: Path, tmp_path: Path) -> None:
    policy = moved(tiny_model)
    policy.save_adapter(tmp_path / "adapter")
    assert {file.name for file in (tmp_path / "adapter").iterdir()} == {
        "adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "tokenizer_config.json"
    }  # fmt: skip
    for trainable in (True, False):
        again = loaded(tiny_model, adapter=tmp_path / "adapter", trainable=trainable)
        assert torch.equal(logits_of(again), logits_of(policy))
        assert len(again.trainable_parameters()) == trainable * len(policy.trainable_parameters())


def test_reference_is_the_base_and_the_adapter_comes_back(tiny_model: Path) -> None:
    policy, base = moved(tiny_model), loaded(tiny_model)
    before = logits_of(policy)
    with policy.reference():
        assert torch.equal(logits_of(policy), logits_of(base))
    assert torch.equal(logits_of(policy), before) and not torch.equal(before, logits_of(base))
    assert policy.trainable_parameters()
    with base.reference() as model:
        assert model is base.model


def test_the_name_nano_survives_being_moved(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "NANO_DIR", tiny_model)
    loaded("nano", trainable=True).save_adapter(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == "nano"
    loaded("nano", adapter=tmp_path)
    loaded(tiny_model, adapter=tmp_path)  # the packaged folder, named by its path
    assert same_base("nano", "nano") and not same_base("nano", "Qwen/Qwen3-0.6B")


def test_an_adapter_that_is_damaged_or_of_another_base_is_one_clear_line(tiny_model: Path, tmp_path: Path) -> None:
    moved(tiny_model).save_adapter(tmp_path)
    with pytest.raises(UsageError, match=f"{tiny_model}.*'Qwen/Qwen3-0.6B'"):
        loaded("Qwen/Qwen3-0.6B", adapter=tmp_path)
    config, weights = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"
    for damage in (lambda: config.write_text('{"peft_type": "LORA", "r": 3}'), weights.unlink):
        damage()
        with pytest.raises(EmailRLError, match=str(tmp_path)) as caught:
            loaded(tiny_model, adapter=tmp_path)
        assert "\n" not in str(caught.value)


def test_packing_and_recomputing_are_settings_and_nothing_is_fused_on_a_cpu(tiny_model: Path) -> None:
    packed = loaded(tiny_model, model={"device": "cpu"}, trainable=True)
    assert takes_packed(packed.model) and fused_backbone(packed.model) is None
    assert not packed.model.get_base_model().is_gradient_checkpointing, "auto recomputes nothing on a CPU"
    other = loaded(tiny_model, training={"packing": False, "gradient_checkpointing": "on"}, trainable=True)
    assert not takes_packed(other.model) and not takes_packed(loaded(tiny_model).model)
    assert other.model.get_base_model().is_gradient_checkpointing and not other.model.training


def test_the_model_s_own_limit_holds_where_none_is_given() -> None:
    for given, own, limit in (({}, 96, 96), ({}, None, 4096), ({}, 8192, 4096), ({"max_tokens": 4096}, 96, 4096)):
        model = SimpleNamespace(generation_config=SimpleNamespace(max_new_tokens=own))
        assert with_token_limit(AgentSettings(**given), model).max_tokens == limit


# -- refused ----------------------------------------------------------------------------------------------------------


def test_smol_is_played_with_its_own_settings_and_trained_with_them_unless_others_are_given() -> None:
    given = Settings(model={"name": "smol"}, agent={"show_names": False})
    played, notes = with_own_settings(given, "smol")
    own = played.agent
    assert own.show_names and own.short_message_ids and own.count_matches and own.mailbox_in_question
    assert len(notes) == 1 and "SHOW_NAMES" in notes[0]
    trained = find_start(given)
    assert not trained.settings.agent.show_names and trained.settings.agent.count_matches
    assert trained.notes and "SHOW_NAMES" in trained.notes[0]
    for other in ("smol-base", "./smol", Path("smol")):  # a folder of this name is another model
        assert with_own_settings(given, other) == (given, [])


@pytest.fixture
def copy(tiny_model: Path, tmp_path: Path) -> Path:
    """The model in a folder of its own."""
    return shutil.copytree(tiny_model, tmp_path / "model")


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_code_in_a_models_folder_never_runs_and_nobody_is_asked(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder's own architecture is refused; for a known one the library's own code is taken."""
    change(copy, auto_map={"AutoConfig": "pwn.Config", "AutoModelForCausalLM": "pwn.Model"})
    (copy / "pwn.py").write_text(f"open({str(tmp_path / 'PWNED')!r}, 'w')\nclass Model: ...\nclass Config: ...\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    loaded(copy)
    change(copy, model_type="theirs")
    with pytest.raises(EmailRLError, match="failed to load"):
        loaded(copy)
    assert not (tmp_path / "PWNED").exists()


def test_an_attention_that_is_not_installed_is_answered_with_the_one_that_is(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(*_: Any, **__: Any) -> Any:
        raise ImportError("FlashAttention2 has been toggled on, but it cannot be used.")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", absent)
    with pytest.raises(EmailRLError, match="Set ATTN_IMPLEMENTATION=sdpa, or install the package for flash_attention"):
        loaded(tiny_model, model={"attn_implementation": "flash_attention_2"})


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
        shape.load_config("someone/mail", "someone/mail")


def test_kernels_that_a_models_config_names_are_not_asked_for(copy: Path) -> None:
    change(copy, attn_implementation="stranger/kernel", _attn_implementation="stranger/kernel")
    assert loaded(copy).model.config._attn_implementation == "sdpa"


def test_weights_that_are_truncated_or_in_a_pickle_are_not_loaded(copy: Path) -> None:
    weights = copy / "model.safetensors"
    torch.save(load_file(weights), copy / "pytorch_model.bin")
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(EmailRLError, match=r"failed to load: [^\n]*[^.]\. Check the model's files, or choose another"):
        loaded(copy)
    weights.unlink()
    with pytest.raises(EmailRLError, match=r"failed to load: .*safetensors"):
        loaded(copy)


def test_a_template_without_tools_is_refused_before_the_weights_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plain.jinja").write_text("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    settings = Settings.model_validate({"model": {"name": "nano", "chat_template": tmp_path / "plain.jinja"}})
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights"))
    for opened in (load_policy, open_policy):
        with pytest.raises(UsageError, match="shows the model no tools"):
            opened(settings, check=partial(check_template, settings))


def test_what_a_name_can_be(tiny_model: Path, tmp_path: Path) -> None:
    for name in ("no/such/folder", "./missing", "two words", ""):
        with pytest.raises(UsageError, match="neither a folder nor a hub name"):
            resolve_model(name)
    with pytest.raises(UsageError, match=r"Unknown model 'nanno'\. Did you mean nano\?"):
        resolve_model("nanno")
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
        loaded(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*address: object, **options: object) -> None:
        raise socket.gaierror("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


def test_a_gpu_sized_model_on_a_cpu_is_refused_at_once(no_network: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "available_memory", lambda: int(500e9))
    monkeypatch.setattr(load, "computes_bf16", lambda: False)
    with pytest.raises(EmailRLError, match=r"14\.77 billion parameters, 59 GB\) needs a GPU") as caught:
        load_policy(Settings())
    assert "--model nano" in caught.value.hint and "EMAILRL_DEVICE=cpu" in caught.value.hint
    # DEVICE=cpu insists; then memory alone decides, and after it the network.
    with pytest.raises(EmailRLError, match="the hub cannot be reached"):
        loaded("OpenPipe/Qwen3-14B-Instruct", model={"device": "cpu"})
    monkeypatch.setattr(load, "available_memory", lambda: int(20e9))
    monkeypatch.setattr(load, "total_memory", lambda: int(64e9))
    with pytest.raises(EmailRLError, match="this machine has 20 GB of 64 GB of memory free"):
        loaded("OpenPipe/Qwen3-14B-Instruct", model={"device": "cpu"})


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "gpt2"])
def test_no_network_is_said_without_half_a_minute_of_retries(no_network: None, name: str) -> None:
    began = time.monotonic()
    with pytest.raises(EmailRLError, match=r"not on this machine, and the hub cannot be reached.*nano") as caught:
        loaded(name)
    assert time.monotonic() - began < 25 and caught.value.exit_code == 1


def test_the_size_of_a_folder_comes_from_its_config(tiny_model: Path, tmp_path: Path) -> None:
    stored = sum(tensor.numel() for tensor in load_file(tiny_model / "model.safetensors").values())
    assert shape.parameters_of("tiny", tiny_model) == stored
    shutil.copy(tiny_model / "config.json", tmp_path)  # no weights beside it: they must not be asked for
    change(tmp_path, hidden_size=65536, intermediate_size=65536)
    with pytest.raises(EmailRLError, match="needs a GPU"):
        loaded(tmp_path)


def test_larger_models_sample_in_bf16_on_a_cpu_that_computes_in_it(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for smallest, computes, sampled in (
        (10**8, True, torch.float32), (1000, True, torch.bfloat16), (1000, False, torch.float32),
    ):  # fmt: skip
        monkeypatch.setattr(load, "computes_bf16", lambda computes=computes: computes)
        monkeypatch.setattr(load.layout, "LARGE_FROM", smallest)
        for trainable, dtype in ((False, sampled), (True, torch.float32)):
            policy = loaded(tiny_model, model={"device": "cpu"}, trainable=trainable)
            assert policy.model.dtype == policy.dtype == dtype
    assert choose_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert choose_dtype("fp16", torch.device("cpu")) == torch.float16


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
def test_what_needs_a_gpu_says_so(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for changes, complaint in (
        ({"device": "mps"}, "EMAILRL_DEVICE=mps is not supported"),
        ({"device": "cuda"}, r"this machine has 0 usable CUDA GPUs.*Use EMAILRL_DEVICE=auto\."),
        ({"load_in_4bit": True}, "LOAD_IN_4BIT needs a CUDA GPU"),
        ({"backend": "unsloth"}, "unsloth backend needs a CUDA GPU"),
    ):
        with pytest.raises(EmailRLError, match=complaint):
            loaded(tiny_model, model=changes)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("emailrl.base.install.find_spec", lambda name: name == "pip" or None)
    with pytest.raises(EmailRLError, match="pip install unsloth"):
        loaded(tiny_model, model={"backend": "unsloth"})
