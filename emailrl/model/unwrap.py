"""The transformers model inside a PEFT model."""

from __future__ import annotations

from typing import Any


def causal_lm(model: Any) -> Any:
    """Return the transformers model in ``model`` (PEFT or bare); LoRA layers stay in it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
