"""The policy: a frozen base model, an optional LoRA adapter, and a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedTokenizerBase

from emailrl.disk import share_files
from emailrl.errors import EmailRLError, UsageError
from emailrl.model.adapter import read_base
from emailrl.model.base import load_base
from emailrl.model.fresh import check_lora, with_fresh_adapter
from emailrl.model.logprobs import check_projection
from emailrl.model.packing import takes_packed
from emailrl.model.plain_lora import read_plain_lora
from emailrl.model.prepare import prepare_training, train_whole
from emailrl.model.resolve import base_name, same_base
from emailrl.model.shard import shard_base
from emailrl.model.tensors import write_tensors, writing_tensors
from emailrl.model.unsloth_backend import prepare_unsloth
from emailrl.model.value_head import ValueHead, load_value_head
from emailrl.plain import first_line
from emailrl.settings import Settings


@dataclass
class Policy:
    """A model that samples and, when ``trainable``, learns through its adapter; the base never changes."""

    model: Any
    """A transformers model, or the PEFT model around it."""
    tokenizer: PreTrainedTokenizerBase
    base_model: str
    """The user's name for it (`nano`, `smol`, `smol-base`, a folder, a hub name); recorded in adapters and metadata."""
    path: str | Path
    """Where the base came from."""
    device: torch.device
    dtype: torch.dtype
    trainable: bool = False
    lora: dict[str, Any] = field(default_factory=dict)
    """Rank, alpha, dropout and target modules; empty for a bare base model."""
    value_head: ValueHead | None = None
    """The critic, if the algorithm uses one."""
    start: list[Tensor] | None = None
    """The run's initial adapter, in the order of ``trainable_parameters``, if it is the reference."""
    notes: list[str] = field(default_factory=list)
    """Notes on why it trains more slowly than configured, and whether it is sharded."""
    sharded: bool = False
    """Whether the base is spread over several ranks: every forward pass then involves all of them."""
    accompanied: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context for a forward pass that only this rank needs."""

    @property
    def vocabulary(self) -> int:
        """Number of token ids that the model can embed."""
        rows = self.model.get_input_embeddings().num_embeddings
        assert isinstance(rows, int)
        return rows

    def trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """List the adapter's parameters by name, in the model's order."""
        return [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]

    @property
    def packs(self) -> bool:
        """Whether batches are trained without their padding."""
        return takes_packed(self.model)

    @contextmanager
    def reference(self) -> Iterator[Any]:
        """Make the model the reference policy inside the block: adapter switched off, or as it was at the ``start``."""
        if self.start is not None:
            parameters = [parameter for _, parameter in self.trainable_parameters()]
            own = [parameter.data for parameter in parameters]
            try:
                _point_to(parameters, self.start)
                yield self.model
            finally:
                _point_to(parameters, own)
        elif self.lora:
            with self.model.disable_adapter():
                yield self.model
        else:
            yield self.model

    def keep_start(self) -> None:
        """Set the reference to the current adapter."""
        self.start = [parameter.detach().clone() for _, parameter in self.trainable_parameters()]

    def save_adapter(self, directory: Path, *, with_tokenizer: bool = True) -> None:
        """Write ``adapter_model.safetensors``, ``adapter_config.json`` and the tokenizer's files into ``directory``.

        PEFT, Unsloth and vLLM load the directory as it is. Its base is named as the user named it (a local folder by
        its absolute path), so that `nano` is found wherever the package is installed. A critic is written
        next to the adapter.
        """
        if not self.lora:
            raise EmailRLError("This policy has no adapter to save.", "Load it with trainable=True.")
        from peft import get_peft_model_state_dict

        directory.mkdir(parents=True, exist_ok=True)
        # Not PeftModel.save_pretrained: it asks the hub whether the vocabulary grew, and writes a model card.
        state = {
            name: value.detach().cpu().contiguous()
            for name, value in get_peft_model_state_dict(self.model, save_embedding_layers=False).items()
        }
        write_tensors(directory / "adapter_model.safetensors", state)
        if self.value_head is not None:
            self.value_head.save(directory)
        config = self.model.peft_config["default"].to_dict()
        config |= {
            "base_model_name_or_path": base_name(self.base_model),
            "inference_mode": True,
            "target_modules": sorted(config["target_modules"]),
        }
        plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
        (directory / "adapter_config.json").write_text(json.dumps(plain, indent=2, sort_keys=True) + "\n")
        if with_tokenizer:
            self.tokenizer.save_pretrained(directory)
        share_files(directory)

    def save_model(self, directory: Path) -> None:
        """Write the weights themselves and the tokenizer's files into ``directory``, as a folder for ``--model``."""
        if self.lora:
            raise EmailRLError("This policy trains an adapter.", "Use save_adapter.")
        directory.mkdir(parents=True, exist_ok=True)
        with writing_tensors(directory):
            self.model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)
        share_files(directory)


def _point_to(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    """Swap parameter data without copying; each parameter stays the same object to its optimizer."""
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data = value


def load_policy(
    settings: Settings,
    *,
    adapter: Path | None = None,
    trainable: bool = False,
    full: bool = False,
    mesh: DeviceMesh | None = None,
) -> Policy:
    """Load the base that ``settings.model`` names, with the adapter in ``adapter``, or a fresh one to train.

    Without ``adapter`` and ``trainable``, it is the bare base. A fresh adapter depends only on
    ``settings.training.seed``, and changes nothing until it is trained (B = 0). ``full`` trains the base's own weights
    instead of an adapter. ``mesh`` holds this host's ranks, over which the base is spread if SHARD is on. Raises
    UsageError for an unknown model or an adapter of another base, EmailRLError if the model is unavailable or does not
    fit.
    """
    if full and (settings.model.backend == "unsloth" or settings.model.load_in_4bit):
        raise UsageError(
            "Full fine-tuning needs BACKEND=transformers without LOAD_IN_4BIT.", "Change those, or train an adapter."
        )
    if adapter is not None:
        check_adapter(adapter, settings.model.name)
    base = load_base(settings, cards=1 if mesh is None else mesh.size(), trainable=trainable)
    dtype = base.model.dtype  # before float32 adapters
    model = _adapted(base.model, settings, adapter, trainable=trainable, full=full)
    if mesh is not None and base.sharded:
        shard_base(model, mesh, offload=settings.model.shard_offload)
    model.eval()  # only the updater enables dropout
    notes: list[str] = []
    if trainable:
        check_projection(model)
        if settings.model.backend == "unsloth":
            model = prepare_unsloth(model, settings)
        else:
            notes = train_whole(model, settings) if full else prepare_training(model, settings, base.device)
    notes += _shard_notes(settings, mesh if base.sharded else None)
    return Policy(
        model=model,
        tokenizer=base.tokenizer,
        base_model=settings.model.name,
        path=base.path,
        device=base.device,
        dtype=dtype,
        trainable=trainable,
        lora=_lora_facts(model),
        value_head=load_value_head(model, adapter) if trainable and adapter else None,
        notes=notes,
        sharded=base.sharded,
    )


def check_adapter(adapter: Path, model_name: str) -> None:
    """Raise UsageError unless ``adapter`` is a PEFT adapter of the base model named."""
    base = read_base(adapter)
    if not same_base(base, model_name):
        raise UsageError(
            f"The adapter in {adapter} was trained on '{base}', but the base model here is '{model_name}'.",
            f"Use --model {base}, or another adapter.",
        )


def _shard_notes(settings: Settings, mesh: DeviceMesh | None) -> list[str]:
    """Whether the base is sharded, over ``mesh``, or a setting for that has no effect."""
    if mesh is not None:
        return [f"{settings.model.name} is sharded over the {mesh.size()} ranks of a host"]
    if settings.model.shard_offload and settings.model.shard == "auto":
        return ["SHARD_OFFLOAD has no effect: SHARD=auto does not shard this base model, which fits unsharded"]
    return []


def _adapted(model: Any, settings: Settings, adapter: Path | None, *, trainable: bool, full: bool) -> Any:
    """The model with the adapter in ``adapter`` or a fresh one on it; bare for full fine-tuning or no training."""
    from peft import PeftModel

    if adapter is None:
        return with_fresh_adapter(model, settings) if trainable and not full else model
    read_plain_lora(adapter, model)
    if trainable:
        check_lora(settings.lora, adapter, model)

    try:
        # By default PEFT reads it on "cuda", which is GPU 0 to safetensors, whichever GPU the model is on.
        return PeftModel.from_pretrained(model, str(adapter), is_trainable=trainable, torch_device="cpu")
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        raise EmailRLError(
            f"The adapter in {adapter} does not fit the base model: {first_line(error)}",
            "Use the adapter's own base model.",
        ) from error


def _lora_facts(model: Any) -> dict[str, Any]:
    if not hasattr(model, "peft_config"):
        return {}
    config = model.peft_config["default"]
    return {
        "rank": config.r,
        "alpha": config.lora_alpha,
        "dropout": config.lora_dropout,
        "target_modules": sorted(config.target_modules),
    }
