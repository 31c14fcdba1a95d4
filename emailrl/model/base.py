"""A base model and its tokenizer from files or the hub: on its device, in 4 bits, or on the CPU to be sharded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from emailrl.errors import EmailRLError
from emailrl.model.device import choose_device, choose_dtype, sampling_dtype
from emailrl.model.resolve import read_chat_template, resolve_model
from emailrl.model.shard import check_shardable
from emailrl.model.size import check_fits, load_config
from emailrl.model.smol_base import SMOL, SMOL_BASE
from emailrl.model.unsloth_backend import load_unsloth
from emailrl.plain import first_line
from emailrl.settings import Settings


@dataclass(frozen=True, slots=True)
class Base:
    """A loaded base model, frozen."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    path: str | Path
    """Where it came from."""
    device: torch.device
    """Where it computes."""
    sharded: bool
    """Whether it will be sharded. It is then on the CPU, memory-mapped from files that all ranks share."""


def load_base(settings: Settings, *, cards: int, trainable: bool) -> Base:
    """Load the base that ``settings.model`` names, to be sharded over ``cards`` ranks of this host if SHARD says so.

    Raises UsageError for an unknown model, or for settings that cannot be sharded, EmailRLError if the model is
    unavailable or does not fit.
    """
    sharded = False
    if settings.model.backend == "unsloth":
        model, tokenizer, path = load_unsloth(settings)
        device = next(model.parameters()).device
    else:
        path = resolve_model(settings.model.name, settings.model.smol_base)
        device = choose_device(settings.model.device)
        dtype = choose_dtype(settings.model.dtype, device) if trainable else sampling_dtype(settings.model)
        sharded = check_fits(settings.model, path, device, dtype, cards=cards)
        if sharded:
            check_shardable(settings)
        model, tokenizer = _load_plain(settings, path, device, dtype, move=not sharded)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if settings.model.chat_template is not None:
        tokenizer.chat_template = read_chat_template(settings.model.chat_template)
    return Base(model, tokenizer, path, device, sharded)


def _load_plain(
    settings: Settings, path: str | Path, device: torch.device, dtype: torch.dtype, *, move: bool
) -> tuple[Any, PreTrainedTokenizerBase]:
    """The base model, moved to ``device`` or left on the CPU, and its tokenizer."""
    options: dict[str, Any] = {
        "dtype": dtype,
        "attn_implementation": settings.model.attn_implementation,
        "trust_remote_code": False,
        "use_safetensors": True,
    }
    if settings.model.load_in_4bit:
        options["quantization_config"] = _four_bit(device)
        options["device_map"] = {"": device}
    disable_progress_bar()  # a progress bar for local tensors is noise
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        # Loaded separately from the weights: its own `_attn_implementation` would override ours.
        config = load_config(settings.model.name, path)
        model: Any = AutoModelForCausalLM.from_pretrained(path, config=config, **options)
    except (OSError, ValueError, ImportError, KeyError, SafetensorError) as error:
        converted = settings.model.name in (SMOL, SMOL_BASE)
        hint = f"Delete {path}: the next run converts the model again." if converted else "Check the model's files."
        if (attention := settings.model.attn_implementation).startswith("flash") and isinstance(error, ImportError):
            hint = f"Set ATTN_IMPLEMENTATION=sdpa, or install the package for {attention}."
        raise EmailRLError(
            f"The model '{settings.model.name}' failed to load: {first_line(error).removesuffix('.')}.", hint
        ) from error
    model.requires_grad_(False)
    return (model.to(device) if move and not settings.model.load_in_4bit else model), tokenizer


def _four_bit(device: torch.device) -> Any:
    from importlib.util import find_spec

    if device.type != "cuda" or find_spec("bitsandbytes") is None:
        raise EmailRLError(
            "LOAD_IN_4BIT needs a CUDA GPU and the package bitsandbytes.", "Run: pip install bitsandbytes, or unset it."
        )
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
