"""The Unsloth backend: the same policy through Unsloth's faster kernels; needs a CUDA GPU and the extra ``unsloth``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from emailrl.errors import EmailRLError
from emailrl.policy.resolve import resolve_model
from emailrl.settings import Settings

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""What Unsloth patches; it does not know PEFT's ``all-linear``."""


def load_unsloth(settings: Settings, adapter: Path | None, trainable: bool) -> tuple[Any, Any, str | Path]:
    """Load base (and adapter) through ``unsloth.FastLanguageModel``; returns model, tokenizer and the base's place.

    Raises EmailRLError without a CUDA GPU or the package.
    """
    if not torch.cuda.is_available():
        raise EmailRLError(
            "The backend unsloth needs a CUDA GPU, and this machine has none.", "Use --backend transformers."
        )
    if find_spec("unsloth") is None:
        raise EmailRLError(
            "The backend unsloth is not installed.",
            "Run: pip install 'emailrl[unsloth]', or use --backend transformers.",
        )
    from unsloth import FastLanguageModel

    path = resolve_model(settings.model.name)
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=str(path),
        max_seq_length=settings.model.max_model_len or 32768,
        dtype=dtypes.get(settings.model.dtype),
        load_in_4bit=settings.model.load_in_4bit,
    )
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(adapter), is_trainable=trainable)
    elif trainable:
        wanted = settings.lora.target_modules
        model = FastLanguageModel.get_peft_model(
            model,
            r=settings.lora.lora_rank,
            lora_alpha=settings.lora.lora_alpha,
            lora_dropout=settings.lora.lora_dropout,
            target_modules=ALL_LINEAR if wanted == "all-linear" else [name.strip() for name in wanted.split(",")],
            bias="none",
            use_gradient_checkpointing=False if settings.training.gradient_checkpointing == "off" else "unsloth",
            random_state=settings.training.seed,
        )
    return model, tokenizer, path
