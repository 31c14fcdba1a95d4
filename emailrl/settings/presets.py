"""Size presets: named sets of settings that override only the defaults."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

PRESETS: Final[MappingProxyType[str, dict[str, Any]]] = MappingProxyType(
    {
        "quick": {
            "train_dataset_size": 10,
            "eval_dataset_size": 5,
            "per_device_train_batch_size": 2,
            "num_generations": 2,
            "max_turns": 5,
            "max_tokens": 512,
            "eval_steps": 1,
            "patience": 4,
            "num_train_epochs": 2,
            # Epochs do not limit masked mode, so two epochs are also given in steps: 10 questions / 2 per step * 2.
            "max_steps": 10,
            "warmup_steps": 2,
        },
        "small": {"train_dataset_size": 100, "eval_dataset_size": 20, "eval_steps": 5, "patience": 8},
        "medium": {"train_dataset_size": 1000, "eval_dataset_size": 50, "eval_steps": 20, "patience": 3},
        "full": {},
        "paper": {
            "model_name": "unsloth/Qwen3-14B-Base",
            "per_device_train_batch_size": 8,
            "num_generations": 6,
            "eval_steps": 30,
            "patience": 2,
            "max_turns": 4,
            "search_without_keywords": False,
        },
        "guide": {
            "train_dataset_size": 4000,
            "eval_dataset_size": 100,
            "per_device_train_batch_size": 8,
            "num_generations": 6,
            "eval_steps": 30,
            "patience": 10,
            "num_train_epochs": 4,
            # Epochs do not limit masked mode: 4000 questions / 8 per step * 4.
            "max_steps": 2000,
            "max_tokens": 2048,
        },
    }
)
"""Preset name → settings by their unique names; ``full`` is the defaults.

``patience`` is chosen for the number of evaluations and questions, so that a fall of accuracy ends a run before its
end. ``quick``, with five questions, notices only 31 to 52 % of falls (decision 0017)."""
