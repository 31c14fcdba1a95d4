"""Small random models of the families that people train, each with all kinds of layers that its family has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer

from emailrl.model.shape import auto_class

Sizes = dict[str, Any]
WINDOW = 8  # tokens that a sliding layer of a tiny model sees; of a wide one 64


def _of(name: str, **own: Any) -> Callable[[Sizes, bool], Any]:
    return lambda sizes, wide: getattr(transformers, f"{name}Config")(**sizes | own)


def _sliding(name: str, layer_types: list[str] | None, **own: Any) -> Callable[[Sizes, bool], Any]:
    kinds = {} if layer_types is None else {"layer_types": layer_types}
    return lambda sizes, wide: _of(name, **kinds, **own, sliding_window=64 if wide else WINDOW)(sizes, wide)


def _linear(wide: bool) -> Sizes:
    width = 128 if wide else 8
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    return heads | {"linear_key_head_dim": width, "linear_value_head_dim": width}


def _qwen3_5(sizes: Sizes, wide: bool) -> Any:
    """As published: the language model beside a vision tower, which nothing here uses."""
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "num_position_embeddings": 16}
    vision |= {"out_hidden_size": sizes["hidden_size"]}
    return transformers.Qwen3_5Config(text_config=sizes | _linear(wide), vision_config=vision)


def _gemma3(sizes: Sizes, wide: bool) -> Any:
    """The sizes from 4B: the language model beside a vision tower, whose layers have the same names."""
    kinds = {"layer_types": [SLIDING, SLIDING, SLIDING, FULL], "sliding_window": 64 if wide else WINDOW}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    return transformers.Gemma3Config(text_config=sizes | kinds, vision_config=vision, mm_tokens_per_image=1)


def _qwen3_next(sizes: Sizes, wide: bool) -> Any:
    """The wide one without experts, whose kernels the GPU tests do not have."""
    dense = {"mlp_only_layers": [0, 1, 2, 3]} if wide else {}
    return transformers.Qwen3NextConfig(**sizes, **_linear(wide), **MOE, **dense, num_experts=4)


def _nemotron_h(sizes: Sizes, wide: bool) -> Any:
    kinds = ["linear_attention", "mlp", "full_attention", "mlp" if wide else "moe"]
    mamba = {"ssm_state_size": 128 if wide else 8, "mamba_num_heads": 4, "mamba_head_dim": 64 if wide else 16}
    experts = {"n_routed_experts": 4, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 24}
    sizes = {name: size for name, size in sizes.items() if name != "num_hidden_layers"}
    chunk = 128 if wide else 8
    return transformers.NemotronHConfig(
        **sizes, **mamba, **experts, layers_block_type=kinds, n_groups=2, chunk_size=chunk
    )


FULL, SLIDING = "full_attention", "sliding_attention"
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
FAMILIES: dict[str, Callable[[Sizes, bool], Any]] = {
    "Qwen3.5": _qwen3_5,
    "Qwen3-Next": _qwen3_next,
    "Gemma 3": _sliding("Gemma3Text", [SLIDING, SLIDING, SLIDING, FULL]),
    "LFM2": _of("Lfm2", layer_types=["conv", "conv", FULL, "conv"], block_auto_adjust_ff_dim=False),
    "Llama 3": _of("Llama"),
    "Mistral": _sliding("Mistral", None),
    "Qwen3": _of("Qwen3"),
    "Gemma 3 with vision": _gemma3,
    "Qwen3-MoE": _of("Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "gpt-oss": _sliding("GptOss", [SLIDING, FULL, SLIDING, FULL], num_local_experts=4, num_experts_per_tok=2),
    "GLM4-MoE": _of(
        "Glm4Moe", n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=32,
        first_k_dense_replace=1,
    ),
    "Nemotron-H": _nemotron_h,
}  # fmt: skip


def make_family(family: str, tokenizer: Path | str, folder: Path, *, wide: bool = False, seed: int = 0) -> Path:
    """Save a float32 model of ``family`` that knows the tokenizer's ids, ``wide`` enough for a GPU's kernels; logits
    of several nats, so that a wrong layer shows."""
    kept = AutoTokenizer.from_pretrained(tokenizer)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64} if wide else {
        "hidden_size": 32, "intermediate_size": 48, "head_dim": 16}  # fmt: skip
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
    sizes |= {"max_position_embeddings": 4096, "vocab_size": -(-len(kept) // 64) * 64}
    sizes |= {"bos_token_id": None, "eos_token_id": kept.eos_token_id, "pad_token_id": kept.pad_token_id}
    config = FAMILIES[family](sizes, wide)
    for one in (config, config.get_text_config()):
        one.initializer_range = 0.06
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto_class(config).from_config(config).float()
    model.save_pretrained(folder)
    kept.save_pretrained(folder)
    return folder
