"""The policy: a frozen base model, an optional LoRA adapter, a tokenizer, and a critic if its algorithm has one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from emailrl.base.disk import share_files
from emailrl.base.errors import EmailRLError
from emailrl.base.plain import first_line
from emailrl.checkpoints import CONFIG, WEIGHTS
from emailrl.model.lora import write_tensors, writing_tensors
from emailrl.model.resolve import base_name

VALUE_HEAD_FILE = "value_head.safetensors"


class ValueHead(nn.Module):
    """The critic of PPO: maps hidden states ``(P, hidden)`` to values ``(P,)``, in float32 (float64 for such a model).
    It starts at zero: the first advantages equal plain returns, and no additional random numbers are drawn."""

    def __init__(self, model: Any, adapter: Path | None = None) -> None:
        """For a model's hidden states: as saved beside ``adapter``, or a new one. Raises EmailRLError for a saved one
        that is damaged or does not fit."""
        super().__init__()
        size, embedding = model.config.get_text_config().hidden_size, model.get_output_embeddings().weight
        dtype = torch.float64 if embedding.dtype == torch.float64 else torch.float32
        self.weight = nn.Parameter(torch.zeros(size, device=embedding.device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros((), device=embedding.device, dtype=dtype))
        if adapter is not None and (path := adapter / VALUE_HEAD_FILE).is_file():
            try:
                self.load_state_dict(load_file(path))
            except (OSError, SafetensorError, RuntimeError) as error:
                hint = "Resume from a checkpoint of a run with a critic (--algorithm ppo)."
                raise EmailRLError(f"{path} does not fit this policy's critic: {first_line(error)}", hint) from None

    def forward(self, hidden: Tensor) -> Tensor:
        """Score each hidden state."""
        return hidden.to(self.weight.dtype) @ self.weight + self.bias


@dataclass(frozen=True, eq=False)
class Policy:
    """A model that samples and, when ``trainable``, learns through its adapter; the base never changes."""

    model: Any  # a transformers model, or the PEFT model around it
    tokenizer: PreTrainedTokenizerBase
    base_model: str  # the user's name for it (`nano`, a folder, a hub name); recorded in adapters and metadata
    path: str | Path  # where the base came from
    device: torch.device
    dtype: torch.dtype
    trainable: bool = False
    lora: dict[str, Any] = field(default_factory=dict)  # as of ``lora_facts``; empty for a bare base model
    value_head: ValueHead | None = None  # the critic, if the algorithm uses one
    start: list[Tensor] | None = None  # the run's initial adapter, as ``trainable_parameters``, if it is the reference
    notes: list[str] = field(default_factory=list)  # why it trains more slowly than configured, whether it is sharded
    sharded: bool = False  # whether the base is spread over several ranks: all take part in every forward pass
    accompanied: Callable[[], AbstractContextManager[None]] = nullcontext  # for a forward pass only this rank needs

    @property
    def vocabulary(self) -> int:
        """Number of token ids that the model can embed."""
        rows = self.model.get_input_embeddings().num_embeddings
        assert isinstance(rows, int)
        return rows

    def trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """List the adapter's parameters by name, in the model's order."""
        return [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]

    @contextmanager
    def reference(self) -> Iterator[Any]:
        """Make the model the reference policy inside the block: adapter switched off, or as it was at the ``start``."""
        if self.start is None:
            with self.model.disable_adapter() if self.lora else nullcontext():
                yield self.model
            return
        parameters = [parameter for _, parameter in self.trainable_parameters()]
        own = [parameter.data for parameter in parameters]
        try:
            for parameter, value in zip(parameters, self.start, strict=True):
                parameter.data = value  # without copying; it stays the same object to its optimizer
            yield self.model
        finally:
            for parameter, value in zip(parameters, own, strict=True):
                parameter.data = value

    def save_adapter(self, directory: Path, *, with_tokenizer: bool = True) -> None:
        """Write the adapter, a critic and the tokenizer files into ``directory``, which PEFT, Unsloth and vLLM load as
        it is. Its base is named as the user named it (a local folder by its absolute path), so that `nano` is found
        wherever the package is installed."""
        directory.mkdir(parents=True, exist_ok=True)
        # Not PeftModel.save_pretrained: it asks the hub whether the vocabulary grew, and writes a model card.
        write_tensors(directory / WEIGHTS, get_peft_model_state_dict(self.model, save_embedding_layers=False))
        if self.value_head is not None:
            write_tensors(directory / VALUE_HEAD_FILE, self.value_head.state_dict())
        config = self.model.peft_config["default"].to_dict()
        config |= {"base_model_name_or_path": base_name(self.base_model), "inference_mode": True}
        plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
        (directory / CONFIG).write_text(json.dumps(plain, indent=2, sort_keys=True) + "\n")
        if with_tokenizer:
            self.tokenizer.save_pretrained(directory)
        share_files(directory)

    def save_model(self, directory: Path) -> None:
        """Write the weights themselves and the tokenizer's files into ``directory``, as a folder for ``--model``."""
        directory.mkdir(parents=True, exist_ok=True)
        with writing_tensors(directory):
            self.model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)
        share_files(directory)
