"""The critic of PPO: one linear layer on the policy's own hidden states, saved with the adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from emailrl.errors import EmailRLError
from emailrl.model.logprobs import output_embeddings
from emailrl.model.tensors import write_tensors

VALUE_HEAD_FILE = "value_head.safetensors"


class ValueHead(nn.Module):
    """Map hidden states ``(P, hidden)`` to values ``(P,)``, in float32 (float64 for a float64 model).

    It starts at zero: the first values are 0, the first advantages equal plain returns, and no additional random
    numbers are drawn.
    """

    def __init__(self, hidden_size: int, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros((), device=device, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """Score each hidden state."""
        return hidden.to(self.weight.dtype) @ self.weight + self.bias

    def save(self, directory: Path) -> None:
        """Write ``value_head.safetensors`` into ``directory``."""
        state = {name: value.detach().cpu().contiguous() for name, value in self.state_dict().items()}
        write_tensors(directory / VALUE_HEAD_FILE, state)

    def load(self, directory: Path) -> None:
        """Load weights written by ``save``; raises EmailRLError if they are missing, damaged or do not fit."""
        path = directory / VALUE_HEAD_FILE
        try:
            self.load_state_dict(load_file(path))
        except (OSError, SafetensorError, RuntimeError) as error:
            raise EmailRLError(
                f"{path} does not fit this policy's critic: {str(error).partition(chr(10))[0]}",
                "Resume from a checkpoint of a run with a critic (--algorithm ppo).",
            ) from None


def make_value_head(model: Any) -> ValueHead:
    """Make the critic for a model's hidden states, on its output embedding's device."""
    embedding = output_embeddings(model).weight
    wide = embedding.dtype == torch.float64
    size = model.config.get_text_config().hidden_size
    return ValueHead(size, device=embedding.device, dtype=torch.float64 if wide else torch.float32)


def load_value_head(model: Any, adapter: Path) -> ValueHead | None:
    """Load the critic saved with an adapter; None if its run had none, EmailRLError if it is damaged."""
    if not (adapter / VALUE_HEAD_FILE).is_file():
        return None
    head = make_value_head(model)
    head.load(adapter)
    return head
