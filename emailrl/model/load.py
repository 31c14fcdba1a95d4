"""Loads a policy: the base from files or the hub, an adapter on it, and the model made ready for training batches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.plain import first_line
from emailrl.model.device import check_fits, choose_device, choose_dtype, sampling_dtype
from emailrl.model.fused import enable_fused
from emailrl.model.layout import recomputes, wants_fused
from emailrl.model.logprobs import check_projection
from emailrl.model.lora import lora_facts, with_adapter, with_fresh_adapter
from emailrl.model.packing import enable_packing
from emailrl.model.policy import Policy, ValueHead
from emailrl.model.resolve import read_base, read_chat_template, resolve_model, same_base
from emailrl.model.shape import load_config, remedy_for
from emailrl.model.shard import check_shardable, shard_base
from emailrl.model.unsloth_backend import check_unsloth, load_unsloth, prepare_unsloth
from emailrl.settings import ModelSettings, PolicySettings, TrainingSettings


def load_policy(
    settings: PolicySettings,
    *,
    adapter: Path | None = None,
    trainable: bool = False,
    full: bool = False,
    critic: bool = False,
    mesh: DeviceMesh | None = None,
    accompanied: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Policy:
    """Load the base that ``settings.model`` names, with the adapter in ``adapter``, or a fresh one to train.

    A fresh adapter depends only on ``settings.training.seed``, and changes nothing until it is trained (B = 0).
    ``full`` trains the base's own weights instead; ``critic`` adds the one saved beside ``adapter``, or a new one. With
    REFERENCE=start, the policy keeps the adapter as loaded. ``mesh`` holds this host's ranks, over which the base is
    spread if SHARD is on; ``accompanied`` then makes them take part in a forward pass that only this rank needs. Raises
    UsageError for an unknown model or an adapter of another base, EmailRLError if it is unavailable or too large.
    """
    wanted, training, notes = settings.model, settings.training, list[str]()
    if full and (wanted.backend == "unsloth" or wanted.load_in_4bit):
        hint = "Change those, or train an adapter."
        raise UsageError("Full fine-tuning needs BACKEND=transformers without LOAD_IN_4BIT.", hint)
    if adapter is not None and not same_base(trained_on := read_base(adapter), wanted.name):
        raise UsageError(
            f"The adapter in {adapter} was trained on '{trained_on}', but the base model here is '{wanted.name}'.",
            f"Use --model {trained_on}, or another adapter.",
        )
    if wanted.backend == "unsloth":
        check_unsloth(wanted)
    path, device = resolve_model(wanted.name, wanted.smol_base), choose_device(wanted.device)
    dtype = choose_dtype(wanted.dtype, device) if trainable else sampling_dtype(wanted)
    sharded = check_fits(wanted, path, device, dtype, cards=1 if mesh is None else mesh.size())
    if sharded:
        check_shardable(wanted, settings.agent, settings.vllm)
    # A base to be sharded stays on the CPU, memory-mapped from files that all ranks share.
    base, tokenizer = _load_base(wanted, path, device, dtype, move=not sharded)
    if adapter is not None:
        model = with_adapter(base, settings.lora, adapter, trainable=trainable)
    elif trainable and not full:
        model = with_fresh_adapter(base, settings.lora, seed=training.seed)
    else:
        model = base
    if mesh is not None and sharded:
        shard_base(model, mesh, offload=wanted.shard_offload)
        notes.append(f"{wanted.name} is sharded over the {mesh.size()} ranks of a host")
    elif wanted.shard_offload and wanted.shard == "auto":
        notes.append("SHARD_OFFLOAD has no effect: SHARD=auto does not shard this base model, which fits unsharded")
    model.eval()  # only the updater enables dropout
    if trainable:
        check_projection(model)
        if wanted.backend == "unsloth":
            model = prepare_unsloth(model, wanted.name, training.gradient_checkpointing)
        else:
            notes = prepare_training(model, training, wanted.name, device, full=full) + notes
    keeps_start = trainable and not full and settings.algorithm.reference == "start"
    return Policy(
        model, tokenizer, wanted.name, path, device, dtype,
        trainable=trainable,
        lora=lora_facts(model),
        value_head=ValueHead(model, adapter) if critic else None,
        start=[one.detach().clone() for one in model.parameters() if one.requires_grad] if keeps_start else None,
        notes=notes,
        sharded=sharded,
        accompanied=accompanied if sharded else nullcontext,
    )  # fmt: skip


def _load_base(
    wanted: ModelSettings, path: str | Path, device: torch.device, dtype: torch.dtype, *, move: bool
) -> tuple[Any, Any]:
    """The frozen base, moved to ``device`` or left on the CPU, and its tokenizer."""
    disable_progress_bar()  # a progress bar for local tensors is noise
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        # Loaded separately from the weights: its own `_attn_implementation` would override ours.
        config = load_config(wanted.name, path)
        if wanted.backend == "unsloth":
            model = load_unsloth(wanted, path, config, dtype)
        else:
            options = _four_bit(device) if wanted.load_in_4bit else {}
            options |= {"config": config, "dtype": dtype, "attn_implementation": wanted.attn_implementation}
            model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False, use_safetensors=True, **options)
    except (OSError, ValueError, ImportError, KeyError, SafetensorError) as error:
        hint = remedy_for(wanted.name, path, "the model's files")
        if (attention := wanted.attn_implementation).startswith("flash") and isinstance(error, ImportError):
            hint = f"Set ATTN_IMPLEMENTATION=sdpa, or install the package for {attention}."
        said = f"The model '{wanted.name}' failed to load: {first_line(error).removesuffix('.')}."
        raise EmailRLError(said, hint) from error
    model.requires_grad_(False)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if wanted.chat_template is not None:
        tokenizer.chat_template = read_chat_template(wanted.chat_template)
    return (model.to(device) if move and not wanted.load_in_4bit else model), tokenizer


def _four_bit(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda" or find_spec("bitsandbytes") is None:
        hint = "Run: pip install bitsandbytes, or unset it."
        raise EmailRLError("LOAD_IN_4BIT needs a CUDA GPU and the package bitsandbytes.", hint)
    from transformers import BitsAndBytesConfig

    nf4: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    four_bit = BitsAndBytesConfig(**nf4, bnb_4bit_compute_dtype=torch.bfloat16)
    return {"quantization_config": four_bit, "device_map": {"": device}}


def prepare_training(
    model: Any, training: TrainingSettings, name: str, device: torch.device, *, full: bool = False
) -> list[str]:
    """Choose how batches run through the model: padded or packed, its own layers or fused ones, what is recomputed.
    ``full`` makes every weight trainable; what GRADIENT_CHECKPOINTING=auto then recomputes is left to the trainer.
    Returns why PACKING or FUSED_LAYERS could not be enabled."""
    notes, packs, on_gpu = list[str](), training.packing, device.type == "cuda" and not full
    if full:
        model.requires_grad_(True)
    if packs and (unpacked := enable_packing(model)):
        packs = False
        notes.append(f"{name} trains with padding (slower): {unpacked}")
    if wants_fused(training, packs=packs, on_gpu=on_gpu):
        unfused = enable_fused(model, training.gradient_checkpointing)
        if unfused is None:
            return notes
        notes.append(f"{name} trains with transformers' own layers (slower): {unfused}")
    if recomputes(training.gradient_checkpointing, on_gpu=on_gpu):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return notes
