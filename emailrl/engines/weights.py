"""The weights the in-process engine samples from: the trainer's frozen base plus the adapter of one version.

Small models get merged weights in a model of their own, which decodes faster than base and adapter side by side: every
version is W₀ + scale · B·A computed afresh from the frozen W₀, so nothing drifts. Large models lend themselves to the
engine as they are, with the version's adapter switched on while it samples.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file
from torch import Tensor, nn

from emailrl.errors import EmailRLError
from emailrl.policy.fused.model import disable_fused

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from transformers import PreTrainedModel

MERGE_LIMIT = 1_000_000_000
"""Models of more parameters are not copied for sampling."""

ADAPTER_FILE = "adapter_model.safetensors"
SAMPLER_ADAPTERS = ("sampler-0", "sampler-1")
"""Names beside the trainer's: a version is read under one while the other still holds the last."""


class Weights(Protocol):
    """A model that computes with the weights of one version."""

    model: PreTrainedModel

    def load(self, path: Path | None) -> None:
        """Take the adapter in ``path``, or None: the bare base model. What fails leaves the weights as they were."""
        ...

    def active(self) -> AbstractContextManager[None]:
        """While inside, ``model`` is this version in evaluation mode."""
        ...


def sampling_weights(model: nn.Module) -> Weights:
    """Merged weights of its own for a small model, the model itself for a large or quantized one."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    parameters = sum(parameter.numel() for parameter in base.parameters())
    if parameters > MERGE_LIMIT or getattr(base, "quantization_method", None) is not None:
        return SharedWeights(model)
    return MergedWeights(base)


def adapter_sha256(path: Path) -> str:
    """The hash that names an adapter on everything sampled from it."""
    return hashlib.sha256((path / ADAPTER_FILE).read_bytes()).hexdigest()


class MergedWeights:
    """A model that shares the frozen base's tensors, save those an adapter changes."""

    def __init__(self, base: nn.Module) -> None:
        frozen = {id(tensor): tensor for tensor in (*base.parameters(), *base.buffers())}
        self.model: PreTrainedModel = copy.deepcopy(base, frozen)  # type: ignore[assignment]
        disable_fused(self.model)
        for name, module in list(self.model.named_modules()):
            module._forward_hooks.clear()  # hooks of gradient checkpointing: they would ask for gradients here
            if isinstance(module, BaseTunerLayer):
                self.model.set_submodule(name, module.get_base_layer())
        self.model.eval()
        self._frozen: dict[str, Tensor] = {}

    def load(self, path: Path | None) -> None:
        """Compute the version's weights from the frozen ones, in float32 then rounded once."""
        deltas = {} if path is None else read_deltas(path)
        frozen = {name: self._linear(name).weight.detach() for name in deltas} | self._frozen
        merged = dict(frozen)
        for name, (lora_a, lora_b, scale) in deltas.items():
            weight = frozen[name]
            delta = scale * (lora_b.to(weight.device).float() @ lora_a.to(weight.device).float())
            merged[name] = (weight.float() + delta).to(weight.dtype)
        self._frozen = frozen
        for name, weight in merged.items():
            self._linear(name).weight = nn.Parameter(weight, requires_grad=False)

    def active(self) -> AbstractContextManager[None]:
        """Nothing to switch: the model is the engine's own."""
        return nullcontext()

    def _linear(self, name: str) -> nn.Linear:
        try:
            module = self.model.get_submodule(name)
        except AttributeError as error:
            raise EmailRLError(f"The adapter changes {name}, which this base model does not have.") from error
        if not isinstance(module, nn.Linear):
            raise EmailRLError(f"The adapter changes {name}, a {type(module).__name__}: only linear layers can be.")
        return module


class SharedWeights:
    """The trainer's own model, with the version's adapter beside the one in training."""

    def __init__(self, model: nn.Module) -> None:
        self.model: PreTrainedModel = model  # type: ignore[assignment]
        self._adapter: str | None = None

    def load(self, path: Path | None) -> None:
        """Read the version's adapter under a name of its own; the trainer's stays untouched."""
        if path is None:
            self._adapter = None
            return
        name = next(name for name in SAMPLER_ADAPTERS if name != self._adapter)
        if isinstance(self.model, PeftModel):
            self._read(self.model, path, name)
        else:
            wrapped = PeftModel.from_pretrained(self.model, str(path), adapter_name=name)
            self.model = wrapped  # type: ignore[assignment]
        self._adapter = name

    def _read(self, model: PeftModel, path: Path, name: str) -> None:
        training = model.training  # PEFT switches to evaluation when it loads
        stale = name
        try:
            _delete(model, name)  # of a version before a bare one
            model.load_adapter(str(path), adapter_name=name)
            stale = next(other for other in SAMPLER_ADAPTERS if other != name)
        finally:
            _delete(model, stale)
            model.train(training)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Switch to evaluation and to the version's adapter; put everything back afterwards."""
        training = self.model.training
        self.model.eval()
        try:
            if not isinstance(self.model, PeftModel):
                yield
            elif self._adapter is None:
                with self.model.disable_adapter():
                    yield
            else:
                before = self.model.active_adapter
                self.model.set_adapter(self._adapter, inference_mode=True)
                try:
                    yield
                finally:
                    self.model.set_adapter(before)
        finally:
            self.model.train(training)


def _delete(model: PeftModel, adapter: str) -> None:
    if adapter in model.peft_config:
        model.delete_adapter(adapter)


def read_deltas(path: Path) -> dict[str, tuple[Tensor, Tensor, float]]:
    """An adapter in PEFT's files: module name → (A [rank, in], B [out, rank], scale).

    Raises EmailRLError where the files are missing, or hold more than plain LoRA on linear layers.
    """
    try:
        config: dict[str, Any] = json.loads((path / "adapter_config.json").read_text())
        tensors = load_file(path / ADAPTER_FILE)
    except (OSError, ValueError) as error:
        raise EmailRLError(f"{path} is not an adapter: {error}") from error
    for feature in ("use_dora", "alpha_pattern", "fan_in_fan_out", "modules_to_save"):
        if config.get(feature):
            raise EmailRLError(f"The adapter in {path} uses {feature}, which the in-process engine cannot merge.")
    matrices: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, dot, kind = key.removeprefix("base_model.model.").rpartition(".lora_")
        if not dot or kind not in ("A.weight", "B.weight"):
            raise EmailRLError(f"The adapter in {path} holds {key}, which is no LoRA matrix.")
        matrices.setdefault(name, {})[kind[0]] = tensor
    alpha = float(config["lora_alpha"])
    deltas = {}
    for name, pair in matrices.items():
        rank = pair["A"].shape[0]
        deltas[name] = (pair["A"], pair["B"], alpha / (rank**0.5 if config.get("use_rslora") else rank))
    return deltas


def check_full_attention(config: Any) -> None:
    """Raise EmailRLError for models that keep other state than keys and values of all tokens."""
    layer_types = getattr(config, "layer_types", None)
    sliding = getattr(config, "sliding_window", None) if layer_types is None else None
    if sliding or any(kind != "full_attention" for kind in layer_types or ()):
        raise EmailRLError(
            f"The in-process engine needs full attention in every layer; {config.model_type} has other layers.",
            "Use --engine vllm.",
        )


def device_of(model: nn.Module) -> torch.device:
    """Where the inputs of a model go."""
    return next(model.parameters()).device
