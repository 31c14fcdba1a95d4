"""Writes a policy for llama.cpp and programs built on it, by the ``gguf`` package: merged weights, or a LoRA adapter.
Numbers keep their type, but vectors become float32, as llama.cpp expects. What it would compute otherwise than
transformers is an error: it splits text only by rules compiled into it, and knows few layouts of the rotary embedding.
It does not normalize text, as Qwen's tokenizers do (NFC)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from emailrl.base.disk import naming
from emailrl.base.errors import UsageError
from emailrl.base.install import need

ARCHITECTURES: Final = ("llama", "qwen2", "qwen3")  # llama.cpp calls them so, too
_WORDS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS: Final = {_WORDS + r"\p{N}" + _REST: "qwen2", _WORDS + r"\p{N}{1,3}" + _REST: "llama-bpe"}
"""llama.cpp's names for patterns that split text before byte-level BPE."""
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # ggml's token types
_HINT: Final = "Use --format merged, or adapter."


def check_gguf(config: Any, tokenizer: Any) -> None:
    """Raise EmailRLError without the package ``gguf``, UsageError for a model that llama.cpp would not run as
    transformers does, whole or under an adapter."""
    need("gguf", "Writing GGUF")
    kind, rope = config.model_type, config.rope_parameters["rope_type"]
    rule = _rule_of(json.loads(tokenizer.backend_tokenizer.to_str()))
    wrong = {
        f"the architecture {kind}": kind not in ARCHITECTURES,
        f"the rotary embedding {rope}": rope != "default" and (kind, rope) != ("llama", "llama3"),
        f"the activation {config.hidden_act}": config.hidden_act != "silu",
        "sliding windows": getattr(config, "use_sliding_window", False),
        "the rules by which the model's tokenizer splits text": rule is None,
    }
    if found := [what for what, is_wrong in wrong.items() if is_wrong]:
        raise UsageError(f"GGUF is not written for {' and '.join(found)}.", _HINT)


def write_model(model: Any, tokenizer: Any, path: Path, name: str) -> None:
    """Write a bare model that ``check_gguf`` passes, and its tokenizer, to ``path``."""
    import torch

    config = model.config
    writer, naming_of = _writer(config, "model", name)
    writer.add_file_type({torch.float32: 0, torch.float16: 1, torch.bfloat16: 32}[model.dtype])
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    theta = config.rope_parameters["rope_theta"]
    facts = {"vocab_size": config.vocab_size, "context_length": config.max_position_embeddings}
    facts |= {"embedding_length": config.hidden_size, "block_count": config.num_hidden_layers}
    facts |= {"feed_forward_length": config.intermediate_size, "head_count": config.num_attention_heads}
    facts |= {"head_count_kv": config.num_key_value_heads, "key_length": width, "value_length": width}
    facts |= {"rope_dimension_count": width, "rope_freq_base": theta, "layer_norm_rms_eps": config.rms_norm_eps}
    for fact, value in facts.items():
        getattr(writer, f"add_{fact}")(value)
    _write_tokenizer(writer, tokenizer, config.vocab_size)
    ends = model.generation_config.eos_token_id
    if others := [end for end in (ends if isinstance(ends, list) else []) if end != tokenizer.eos_token_id]:
        writer.add_eot_token_id(others[0])

    tensors = {}
    for key, value in model.state_dict().items():
        if key != "lm_head.weight" or not config.tie_word_embeddings:
            value = _reordered(config, key.rpartition(".")[0], value)
            tensors[naming_of(key)] = value.float() if value.ndim == 1 else value
    if config.rope_parameters["rope_type"] != "default":
        plain = theta ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
        tensors["rope_freqs.weight"] = plain / model.model.rotary_emb.inv_freq.float()
    _write(writer, path, tensors)


def write_adapter(lora: Any, config: Any, path: Path, name: str) -> None:
    """Write a ``PlainLora`` of a model with this ``config``, which ``check_gguf`` passes. Raises UsageError for a layer
    that llama.cpp cannot adapt."""
    writer, naming_of = _writer(config, "adapter", name)
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", lora.scale * lora.rank)
    tensors = {}
    for layer, (lora_a, lora_b) in sorted(lora.pairs.items()):
        if layer == "lm_head" and config.tie_word_embeddings:
            raise UsageError("llama.cpp cannot adapt an output layer that is also the input embedding.", _HINT)
        target = naming_of(f"{layer}.weight")
        tensors[f"{target}.lora_a"] = lora_a.float()
        tensors[f"{target}.lora_b"] = _reordered(config, layer, lora_b).float()
    _write(writer, path, tensors)


def _reordered(config: Any, layer: str, value: Any) -> Any:
    """A tensor with its rows as llama.cpp orders them: for the architecture ``llama`` it rotates neighbours of a query
    or key, transformers the two halves of a head."""
    part = layer.rpartition(".")[2]
    if config.model_type != "llama" or part not in ("q_proj", "k_proj"):
        return value
    heads = config.num_attention_heads if part == "q_proj" else config.num_key_value_heads
    return value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)


def _writer(config: Any, kind: str, name: str) -> tuple[Any, Callable[[str], str]]:
    """A writer with the first facts in it, and what it calls a model's tensor."""
    import gguf

    arch = next(arch for arch, word in gguf.MODEL_ARCH_NAMES.items() if word == config.model_type)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    writer = gguf.GGUFWriter(None, config.model_type)
    writer.add_type(kind)
    writer.add_name(name)

    def naming_of(key: str) -> str:
        found = names.get_name(key, (".weight", ".bias"))
        if found is None:
            raise UsageError(f"llama.cpp's {config.model_type} has no tensor for {key}.", _HINT)
        return found

    return writer, naming_of


def _write(writer: Any, path: Path, tensors: Mapping[str, Any]) -> None:
    import gguf
    import torch

    for name, tensor in tensors.items():
        whole, raw = tensor.detach().cpu().contiguous(), None
        if whole.dtype == torch.bfloat16:  # which numpy lacks
            whole, raw = whole.view(torch.uint16), gguf.GGMLQuantizationType.BF16
        writer.add_tensor(name, whole.numpy(), raw_dtype=raw)
    with naming(path):
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _write_tokenizer(writer: Any, tokenizer: Any, size: int) -> None:
    """Write vocabulary (padded to ``size``, as the embedding is), merges, special tokens and chat template."""
    whole = json.loads(tokenizer.backend_tokenizer.to_str())
    words = whole["model"]
    texts, kinds = [f"[PAD{number}]" for number in range(size)], [_UNUSED] * size
    for text, number in words["vocab"].items():
        texts[number], kinds[number] = text, _NORMAL
    for added in whole["added_tokens"]:
        texts[added["id"]] = added["content"]
        kinds[added["id"]] = _CONTROL if added["special"] else _USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_rule_of(whole))
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in words["merges"]])
    for role in ("bos", "eos", "pad"):
        if (number := getattr(tokenizer, f"{role}_token_id")) is not None:
            getattr(writer, f"add_{role}_token_id")(number)
    writer.add_add_bos_token(bool(tokenizer("")["input_ids"]))
    writer.add_chat_template(tokenizer.chat_template)


def _rule_of(whole: Mapping[str, Any]) -> str | None:
    """llama.cpp's name for how a byte-level BPE splits text; None for any other tokenizer."""
    match whole["model"]["type"], (whole["pre_tokenizer"] or {}).get("pretokenizers"):
        case "BPE", [{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel", "use_regex": True}]:
            return "smollm"
        case "BPE", [
            {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "use_regex": False},
        ]:
            return _SPLITS.get(pattern)
    return None
