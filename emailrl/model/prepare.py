"""Sets how training batches run through the model: packed or padded, fused or not, what is recomputed."""

from __future__ import annotations

from typing import Any

import torch

from emailrl.model.fused.model import enable_fused
from emailrl.model.layout import recomputes, wants_fused
from emailrl.model.packing import enable_packing
from emailrl.settings import Settings


def train_whole(model: Any, settings: Settings) -> list[str]:
    """Make every weight of ``model`` trainable, with packed batches if possible; returns the reason if not.

    GRADIENT_CHECKPOINTING sets what is recomputed in the backward pass; auto leaves it to the trainer.
    """
    model.requires_grad_(True)
    _, notes = _pack(model, settings)
    if settings.training.gradient_checkpointing in ("on", "selective"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return notes


def prepare_training(model: Any, settings: Settings, device: torch.device) -> list[str]:
    """Choose how batches run through the model: padded or packed, its own layers or fused ones, what is recomputed.

    Returns why PACKING or FUSED_LAYERS could not be enabled.
    """
    training = settings.training
    packed, notes = _pack(model, settings)
    on_gpu = device.type == "cuda"
    if wants_fused(training, packs=packed, on_gpu=on_gpu):
        reason = enable_fused(model, training.gradient_checkpointing)
        if reason is None:
            return notes
        notes.append(f"{settings.model.name} trains with transformers' own layers (slower): {reason}")
    if recomputes(training.gradient_checkpointing, on_gpu=on_gpu):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return notes


def _pack(model: Any, settings: Settings) -> tuple[bool, list[str]]:
    """Enable packed rows if PACKING is on and the model supports them; returns whether, and why not."""
    if not settings.training.packing:
        return False, []
    unpacked = enable_packing(model)
    notes = [f"{settings.model.name} trains with padding (slower): {unpacked}"] if unpacked else []
    return not unpacked, notes
