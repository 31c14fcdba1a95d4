"""Creates a new LoRA adapter: its target modules and initial weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from emailrl.errors import UsageError
from emailrl.model.adapter import read_adapter_config
from emailrl.model.logprobs import output_embeddings
from emailrl.settings import LoraSettings, Settings


def with_fresh_adapter(model: Any, settings: Settings) -> Any:
    """A PEFT model around ``model`` with an adapter determined by the seed that changes nothing yet (B = 0)."""
    from peft import LoraConfig, get_peft_model

    lora = settings.lora
    targets = lora_targets(model, lora.target_modules)
    config = LoraConfig(
        r=lora.lora_rank,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=targets,
        bias="none",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(settings.training.seed)
        return get_peft_model(model, config)


def check_lora(lora: LoraSettings, adapter: Path, model: Any) -> None:
    """Raise UsageError if an explicit LoRA setting differs from the adapter in a folder."""
    config = read_adapter_config(adapter)
    own: dict[str, Any] = {"lora_rank": config["r"], "lora_alpha": config["lora_alpha"]}
    own |= {"lora_dropout": config.get("lora_dropout", 0.0), "target_modules": sorted(config["target_modules"])}
    for name in sorted(own.keys() & lora.model_fields_set):
        given = getattr(lora, name)
        if (sorted(lora_targets(model, given)) if name == "target_modules" else given) != own[name]:
            raise UsageError(
                f"{name.upper()} is {given}, but the adapter in {adapter} has {_plain(own[name])}.",
                f"Unset {name.upper()}: an adapter keeps its own value.",
            )


def _plain(value: Any) -> str:
    return ",".join(value) if isinstance(value, list) else str(value)


def lora_targets(model: Any, wanted: str) -> list[str]:
    """Read the setting ``target_modules``; raises UsageError for a name that no linear layer of the model ends in.

    ``all-linear`` becomes the names of the layers (q_proj, ...), the output embedding left out: PEFT would write every
    layer's full path into the adapter's config.
    """
    linear = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    known = {name.rsplit(".", 1)[-1] for name, _ in linear}
    if wanted == "all-linear":
        head = output_embeddings(model)
        return sorted({name.rsplit(".", 1)[-1] for name, module in linear if module is not head})
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    unknown = [name for name in names if name.rsplit(".", 1)[-1] not in known]
    if unknown or not names:
        raise UsageError(
            f"TARGET_MODULES matches no layer of this model: {', '.join(unknown) or 'empty'}.",
            f"It has {', '.join(sorted(known))}; or use all-linear.",
        )
    return names
