"""A backbone of fused layers: when they are used, and how much they keep for the backward."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from emailrl.model.fused.layer import LayerWeights, adapter_of, linear_of
from emailrl.model.layout import Checkpointing, Keep, choose_keep, free_memory, numbers_for
from emailrl.model.lora import causal_lm
from emailrl.model.packing import PackedRow
from emailrl.model.shard import class_name, gathering

LAYERS = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
"""transformers' decoder layers with the structure that ``FusedLayer`` implements."""


class FusedBackbone:
    """Runs packed rows through a transformers model's layers, with their current adapters at each call."""

    def __init__(self, backbone: Any, checkpointing: Checkpointing) -> None:
        """For a model that ``why_not_fused`` does not reject."""
        self.backbone, self.checkpointing = backbone, checkpointing
        self.layers = [LayerWeights(layer) for layer in backbone.layers]
        self._run = gathering(backbone, self._forward)
        self._run_layers = [gathering(weights.layer, weights.forward) for weights in self.layers]

    def __call__(self, packed: PackedRow) -> Tensor:
        """Hidden states after the final norm where a trained token is predicted, ``(num_trained, hidden)``."""
        return self._run(packed)

    def _forward(self, packed: PackedRow) -> Tensor:
        states = self.backbone.embed_tokens(packed.token_ids)[0]
        cos, sin = (one[0] for one in self.backbone.rotary_emb(states[None], packed.position_ids))
        keep = self.keep_for(len(states), states.device)
        for run in self._run_layers:
            states = run(states, (cos, sin), packed.segments, keep)
        return self.backbone.norm(states.index_select(0, packed.gather))

    def keep_for(self, num_tokens: int, device: torch.device) -> Keep:
        """What each layer keeps of a row of ``num_tokens``: as set, or with ``auto`` the most that memory holds."""
        limited = self.checkpointing == "auto" and device.type == "cuda"
        free = free_memory(device) if limited else math.inf
        return choose_keep(self.checkpointing, free, {keep: self.bytes_for(num_tokens, keep) for keep in Keep})

    def bytes_for(self, num_tokens: int, keep: Keep) -> int:
        """Bytes of what the layers keep for the backward of ``num_tokens``, and of one active layer."""
        itemsize = linear_of(self.layers[0].modules[0]).weight.dtype.itemsize
        return num_tokens * itemsize * numbers_for(keep, layers=len(self.layers), **self.widths)

    @property
    def widths(self) -> dict[str, int]:
        """The widths that ``numbers_for`` takes."""
        sizes = [linear_of(module).weight.shape for module in self.layers[0].modules]
        return {"hidden": sizes[0][1], "queries": sizes[0][0], "keys": sizes[1][0], "ffn": sizes[4][0]}


def why_not_fused(backbone: Any) -> str | None:
    """Why a transformers backbone with LoRA cannot run as fused layers; None if it can."""
    layers = list(getattr(backbone, "layers", []))
    names = {class_name(layer) for layer in layers}
    if not names or not names <= LAYERS:
        return f"its layers are {', '.join(sorted(names)) or 'not found'}"
    if backbone.config.hidden_act != "silu":
        return f"its activation is {backbone.config.hidden_act}"
    if getattr(backbone.config, "attention_dropout", 0.0):
        return "its attention has dropout"
    if any(one.requires_grad for name, one in backbone.layers.named_parameters() if "lora_" not in name):
        return "not only its adapter is trained"
    for layer in layers:
        for module in LayerWeights(layer).modules:
            linear = linear_of(module)
            if type(linear) is not nn.Linear:
                return f"a layer is {type(linear).__name__} (quantized?)"
            if not hasattr(module, "lora_A"):
                continue
            if module.merged or len(module.active_adapters) != 1:
                return "its adapters are merged, or several are active"
            (name,) = module.active_adapters
            if getattr(module, "use_dora", {}).get(name) or getattr(module, "lora_variant", {}).get(name):
                return "its adapter is not plain LoRA"
            if not isinstance(module.lora_dropout[name], nn.Identity):
                return "its LoRA has dropout"
            if (
                adapter_of(module) is None
                or module.lora_A[name].bias is not None
                or module.lora_B[name].bias is not None
            ):
                return "its LoRA has biases"
    return None


def enable_fused(model: Any, checkpointing: Checkpointing) -> str | None:
    """Let ``token_logprobs`` run packed rows of ``model`` through fused layers; returns the reason if it cannot."""
    base = causal_lm(model)
    reason = why_not_fused(base.base_model)
    if reason is None:
        base.emailrl_fused = FusedBackbone(base.base_model, checkpointing)
    return reason


def disable_fused(model: Any) -> None:
    """Remove the fused layers: a copy of a model must not compute with those of its original."""
    base = causal_lm(model)
    if hasattr(base, "emailrl_fused"):
        del base.emailrl_fused


def fused_backbone(model: Any) -> FusedBackbone | None:
    """The fused layers of ``model``, if ``enable_fused`` added them."""
    return getattr(causal_lm(model), "emailrl_fused", None)
