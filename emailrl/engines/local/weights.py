"""The weights the in-process engine samples from. Small models get a separate copy with merged weights, which decodes
faster than base plus adapter: every version is W₀ + scale · B·A recomputed from the frozen W₀, so errors do not
accumulate. Large models are used directly, with the version's adapter active while sampling."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from emailrl.checkpoints import WEIGHTS
from emailrl.engines.budget import merges
from emailrl.model.fused import disable_fused
from emailrl.model.lora import PlainLora, causal_lm, read_plain_lora
from emailrl.model.shard import is_sharded

SAMPLER = "sampler"  # the adapter besides the trainer's


def adapter_sha256(path: Path) -> str:
    """The adapter hash recorded on everything sampled from it."""
    return hashlib.sha256((path / WEIGHTS).read_bytes()).hexdigest()


class MergedWeights:
    """A model that shares the frozen base's tensors, except those an adapter changes."""

    def __init__(self, base: nn.Module) -> None:
        frozen = {id(tensor): tensor for tensor in (*base.parameters(), *base.buffers())}
        self.model: PreTrainedModel = copy.deepcopy(base, frozen)  # type: ignore[assignment]
        disable_fused(self.model)
        for name, module in list(self.model.named_modules()):
            module._forward_hooks.clear()  # gradient checkpointing hooks would require gradients here
            if isinstance(module, BaseTunerLayer):
                self.model.set_submodule(name, module.get_base_layer())
        self.model.eval()
        self._frozen: dict[str, Tensor] = {}

    def load(self, path: Path | None) -> None:
        """Compute the version's weights from the frozen ones in float32, rounded once."""
        frozen, merged = dict(self._frozen), {}
        if path is not None:
            lora = read_plain_lora(path, self.model)
            for name, (lora_a, lora_b) in lora.pairs.items():
                weight = frozen.setdefault(name, self.model.get_submodule(name).get_parameter("weight").detach())
                delta = lora.scale * (lora_b.to(weight.device).float() @ lora_a.to(weight.device).float())
                merged[name] = (weight.float() + delta).to(weight.dtype)
        self._frozen = frozen
        for name, weight in (frozen | merged).items():
            self.model.get_submodule(name).register_parameter("weight", nn.Parameter(weight, requires_grad=False))

    def active(self) -> AbstractContextManager[None]:
        return nullcontext()  # the engine owns the model


class SharedWeights:
    """The trainer's own model, with the version's adapter next to the one in training."""

    def __init__(self, model: nn.Module) -> None:
        self.model: PreTrainedModel = model  # type: ignore[assignment]
        self._bare = True

    def load(self, path: Path | None) -> None:
        """Load the version's adapter under a separate name; the trainer's is untouched."""
        if path is not None and not self._overwrite(read_plain_lora(path, self.model)):
            if isinstance(self.model, PeftModel):
                training = self.model.training  # PEFT switches to evaluation when it loads
                if SAMPLER in self.model.peft_config:
                    self.model.delete_adapter(SAMPLER)
                # On the CPU: else it loads on GPU 0, as in policy.load.
                self.model.load_adapter(str(path), adapter_name=SAMPLER, torch_device="cpu")
                self.model.train(training)
            else:
                wrapped = PeftModel.from_pretrained(self.model, str(path), adapter_name=SAMPLER, torch_device="cpu")
                self.model = wrapped  # type: ignore[assignment]
        self._bare = path is None

    def _overwrite(self, lora: PlainLora) -> bool:
        """Copy ``lora`` into the sampler's adapter, if the model has one of the same rank on the same layers. PEFT
        takes a second to build a new one, whatever its size: it creates, initializes and deletes hundreds of
        modules."""
        modules = ((name.removeprefix("base_model.model."), module) for name, module in self.model.named_modules())
        layers = {name: one for name, one in modules if isinstance(one, LoraLayer) and SAMPLER in one.lora_A}
        if layers.keys() != lora.pairs.keys() or any(one.r[SAMPLER] != lora.rank for one in layers.values()):
            return False
        with torch.no_grad():
            for name, (lora_a, lora_b) in lora.pairs.items():
                layers[name].lora_A[SAMPLER].get_parameter("weight").copy_(lora_a)
                layers[name].lora_B[SAMPLER].get_parameter("weight").copy_(lora_b)
                layers[name].scaling[SAMPLER] = lora.scale
        return True

    @contextmanager
    def active(self) -> Iterator[None]:
        """Switch to evaluation mode and the version's adapter; restore both afterwards."""
        model, training, own = self.model, self.model.training, None
        if training:  # thousands of modules, most often in evaluation mode already
            model.eval()
        try:
            if isinstance(model, PeftModel) and not self._bare:
                own = model.active_adapter
                model.set_adapter(SAMPLER, inference_mode=True)
            with model.disable_adapter() if isinstance(model, PeftModel) and self._bare else nullcontext():
                yield
        finally:
            if own is not None:
                model.set_adapter(own)
            if training:
                model.train()


Weights = MergedWeights | SharedWeights
"""A model with one version's weights, unchanged if ``load`` fails; in evaluation mode in the context ``active``."""


def sampling_weights(model: nn.Module) -> Weights:
    """Separate merged weights for a small model, the model itself for a large, quantized or sharded one."""
    base = causal_lm(model)
    quantized = getattr(base, "quantization_method", None) is not None
    merged = merges(sum(parameter.numel() for parameter in base.parameters()), quantized=quantized)
    return MergedWeights(base) if merged and not is_sharded(base) else SharedWeights(model)


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's inputs."""
    return next(model.parameters()).device
