"""LoRA adapters on a model: fresh ones, and those read from a folder. That is untrusted: PEFT and torch broadcast a
one-element matrix to any shape, leave missing weights at their initial values, allocate whatever rank is written, and
ignore unknown keys. So it is checked before loading: plain LoRA, on the base model's own linear layers, complete."""

from __future__ import annotations

import errno
import hashlib
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from emailrl.base.disk import naming
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.plain import first_line
from emailrl.checkpoints import WEIGHTS, read_adapter_config
from emailrl.model.layout import named_targets
from emailrl.settings import LoraSettings


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file; OSError, with ``path`` as its ``filename``, on failure."""
    with writing_tensors(path):
        whole = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        save_file(whole, path, metadata={"format": "pt"})


def checksum(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


@contextmanager
def writing_tensors(path: Path) -> Iterator[None]:
    """Turn the errors of safetensors and torch on a full disk into an OSError with ``path`` as its ``filename``."""
    try:
        with naming(path):
            yield
    except (SafetensorError, RuntimeError) as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:  # torch says no more than that a write failed
            raise OSError(errno.EIO, "write failed; is the disk full?", str(path)) from error
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


MOST_ALPHA = 1e6  # far above any trained value, and far below what makes a merged weight infinite
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Config keys that are checked individually, and those that do not affect what the adapter computes.
_READ = {"peft_type", "task_type", "r", "lora_alpha", "target_modules", "use_rslora", "init_lora_weights"}
_DEFAULTS = LoraConfig().to_dict()
_ASIDE = {"base_model_name_or_path", "inference_mode", "lora_dropout", "peft_version", "revision", "auto_mapping"}


@dataclass(frozen=True, slots=True)
class PlainLora:
    """A plain LoRA adapter: it adds ``scale * B @ A`` to each layer in ``pairs``."""

    pairs: dict[str, tuple[Tensor, Tensor]]  # module name → (A [rank, in], B [out, rank])
    rank: int
    scale: float


def causal_lm(model: Any) -> Any:
    """Return the transformers model in ``model`` (PEFT or bare); LoRA layers stay in it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def backbone(model: Any) -> Any:
    """The language model's layers in ``model`` (PEFT or bare), from embedding to final norm, without a vision tower."""
    return causal_lm(model).get_decoder()


def has_full_attention(model: Any) -> bool:
    """Whether keys and values of all tokens are all that ``model`` (PEFT or bare) remembers, and a softmax over them
    all that its layers do with them: no windows, linear attention, convolutions, sinks or soft caps. Packed rows and
    the engine's blocks need that. Read from the cache that transformers would make, and the model's class."""
    base = causal_lm(model)
    config = base.config.get_text_config()
    plain = base._supports_attention_backend and base._supports_sdpa and not base._is_stateful
    if not plain or getattr(config, "attn_logit_softcapping", None):
        return False
    layers = DynamicCache(config=config).layers
    return len(layers) == config.num_hidden_layers and all(type(layer) is DynamicLayer for layer in layers)


def with_fresh_adapter(model: Any, lora: LoraSettings, *, seed: int) -> Any:
    """A PEFT model around ``model`` with an adapter determined by the seed that changes nothing yet (B = 0)."""
    config = LoraConfig(
        r=lora.lora_rank, lora_alpha=lora.lora_alpha, lora_dropout=lora.lora_dropout,
        target_modules=lora_targets(model, lora.target_modules), bias="none", task_type="CAUSAL_LM",
    )  # fmt: skip
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        return get_peft_model(model, config)


def with_adapter(model: Any, lora: LoraSettings, folder: Path, *, trainable: bool) -> Any:
    """A PEFT model around ``model`` with the adapter in ``folder``. Raises EmailRLError for an adapter that does not
    fit, UsageError if a LoRA setting differs from one to train."""
    read_plain_lora(folder, model)
    if trainable:
        config = read_adapter_config(folder)
        own = {"lora_rank": config["r"], "lora_alpha": config["lora_alpha"]}
        own["lora_dropout"] = config.get("lora_dropout", 0.0)
        own["target_modules"] = ",".join(sorted(config["target_modules"]))
        given = lora.model_dump(include=lora.model_fields_set)
        if "target_modules" in given:
            given["target_modules"] = ",".join(sorted(lora_targets(model, lora.target_modules)))
        for name in sorted(name for name in own.keys() & given.keys() if given[name] != own[name]):
            hint = f"Unset {name.upper()}: an adapter keeps its own value."
            raise UsageError(f"{name.upper()} is {given[name]}, but the adapter in {folder} has {own[name]}.", hint)
    try:
        # By default PEFT reads it on "cuda", which is GPU 0 to safetensors, whichever GPU the model is on.
        return PeftModel.from_pretrained(model, str(folder), is_trainable=trainable, torch_device="cpu")
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        hint = "Use the adapter's own base model."
        raise EmailRLError(f"The adapter in {folder} does not fit the base model: {first_line(error)}", hint) from error


def lora_facts(model: Any) -> dict[str, Any]:
    """Rank, alpha, dropout and target modules of the adapter on ``model``; empty for a bare one."""
    if not hasattr(model, "peft_config"):
        return {}
    config = model.peft_config["default"]
    facts = {"rank": config.r, "alpha": config.lora_alpha, "dropout": config.lora_dropout}
    return facts | {"target_modules": sorted(config.target_modules)}


def lora_targets(model: Any, wanted: str) -> list[str]:
    """Read the setting ``target_modules``; raises UsageError for a name that no linear layer of the model ends in.
    ``all-linear`` becomes the names of the layers (q_proj, ...), the output embedding left out: PEFT would write every
    layer's full path into the adapter's config. Left out too: gates of one number, which vLLM does not adapt, Mamba's
    output projections, which its kernels read around an adapter, and MLPs that PEFT takes for experts. Paths are
    written in full only where a vision tower has layers of the same names."""
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    inside = {id(module) for module in backbone(model).modules()}
    own = {name for name, module in linear.items() if id(module) in inside}
    if wanted == "all-linear":
        mixers = {name for name, module in model.named_modules() if "Mamba" in type(module).__name__}
        mamba = {f"{name}.out_proj" for name in mixers}
        names = sorted({name.rsplit(".", 1)[-1] for name in own - mamba if linear[name].out_features > 1})
        names = [name for name in names if name in _kept_linear(model, names)]
    else:
        names = named_targets(wanted, {name.rsplit(".", 1)[-1] for name in own})
        if lost := [name for name in names if name not in _kept_linear(model, names)]:
            hint = "Experts stay frozen: leave them out, or use all-linear."
            raise UsageError(f"TARGET_MODULES: PEFT would adapt experts for {', '.join(lost)}.", hint)
    endings = tuple(f".{name}" for name in names)
    if any(name.endswith(endings) for name in linear.keys() - own):
        return sorted(name for name in own if f".{name}".endswith(endings))
    return names


def _kept_linear(model: Any, names: list[str]) -> Iterable[str]:
    """The names that mean linear layers to PEFT too. In models with experts it takes those of their MLPs for tensors
    of all experts, whose adapters are no plain LoRA."""
    config = LoraConfig(target_modules=names)
    try:
        convert_peft_config_for_transformers(config, model, conversions=None)
    except ValueError:  # gate without up, or up without gate
        return [name for name in names if name.rsplit(".", 1)[-1] not in ("gate_proj", "up_proj", "w1", "w3")]
    return config.target_modules or ()


def read_plain_lora(folder: Path, base: nn.Module | None) -> PlainLora:
    """Return the adapter in ``folder``, checked against ``base``; None skips the checks that need the base model.
    ``base`` may be on the meta device and may already have adapters. Raises EmailRLError for anything but finite LoRA
    matrices, one pair per linear layer named by the config, with the shapes that layer and rank require."""
    rank, scale, targets = _plain(folder, read_adapter_config(folder))
    lora = PlainLora(_read_pairs(folder, rank), rank, scale)
    if base is None:
        return lora
    endings = tuple(f".{target}" for target in targets)
    layers = {name: layer for name, layer in _linear_layers(base) if f".{name}".endswith(endings)}
    for name, (lora_a, lora_b) in lora.pairs.items():
        layer = layers.get(name)
        if layer is None:
            raise _refused(folder, f"it changes {name}, which is not a targeted linear layer of the base model")
        found, needed = (lora_b.shape[0], lora_a.shape[1]), (layer.out_features, layer.in_features)
        if found != needed:
            sizes = f"have size {_sizes(*found)}, but the layer is {_sizes(*needed)}"
            raise _refused(folder, f"its matrices for {name} {sizes}")
    if missing := layers.keys() - lora.pairs.keys():
        raise _refused(folder, f"the matrices of {min(missing)} are missing ({len(missing)} of {len(layers)} layers)")
    return lora


def _plain(folder: Path, config: dict[str, Any]) -> tuple[int, float, list[str]]:
    """Rank, scale and target modules of a config that asks for LoRA and nothing else."""
    if config.get("peft_type") != "LORA":
        raise _refused(folder, f"its peft_type is {config.get('peft_type')!r}, not 'LORA'")
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise _refused(folder, f"its task_type is {config['task_type']!r}, not 'CAUSAL_LM'")
    for key, value in config.items():
        if key not in _READ | _ASIDE and value and value != _DEFAULTS.get(key):
            raise _refused(folder, f"it uses {key}; only plain LoRA is supported")
    if config.get("init_lora_weights", True) not in (True, False, "gaussian"):  # others change the base on loading
        raise _refused(folder, f"it uses init_lora_weights={config['init_lora_weights']!r}")
    rank, alpha, targets = (config.get(key) for key in ("r", "lora_alpha", "target_modules"))
    if type(rank) is not int or rank < 1:
        raise _refused(folder, f"its rank r is {rank!r}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= MOST_ALPHA:
        raise _refused(folder, f"its lora_alpha is {alpha!r}")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise _refused(folder, "its target_modules is not a list of names")
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank), targets


def _read_pairs(folder: Path, rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    try:
        tensors = load((folder / WEIGHTS).read_bytes())  # load_file of safetensors 0.8 leaks 57 bytes a tensor
    except (OSError, SafetensorError) as error:
        raise _refused(folder, f"{WEIGHTS} cannot be read ({error})") from None
    matrices: dict[str, dict[str, Tensor]] = {}
    for key, tensor in sorted(tensors.items()):
        name, dot, kind = key.removeprefix("base_model.model.").rpartition(".lora_")
        if not dot or kind not in ("A.weight", "B.weight"):
            raise _refused(folder, f"it contains {key}, which is not a LoRA matrix")
        if tensor.dtype not in DTYPES:
            raise _refused(folder, f"{key} is of type {tensor.dtype}")
        if tensor.ndim != 2 or tensor.shape[0 if kind == "A.weight" else 1] != rank:
            raise _refused(folder, f"{key} is {_sizes(*tensor.shape)}, but the rank is {rank}")
        if tensor.numel() and not all(map(math.isfinite, (extreme.item() for extreme in tensor.aminmax()))):
            raise _refused(folder, f"{key} contains non-finite values")
        matrices.setdefault(name, {})[kind[0]] = tensor
    if not matrices:
        raise _refused(folder, "it contains no matrices")
    if single := [name for name, pair in matrices.items() if len(pair) != 2]:
        raise _refused(folder, f"one of the two matrices of {single[0]} is missing")
    return {name: (pair["A"], pair["B"]) for name, pair in matrices.items()}


def _linear_layers(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Linear]]:
    """The base model's linear layers by name, seen through the adapters they may carry."""
    for name, child in causal_lm(module).named_children():
        layer = child.get_base_layer() if isinstance(child, BaseTunerLayer) else child
        if isinstance(layer, nn.Linear):
            yield prefix + name, layer
        else:
            yield from _linear_layers(layer, f"{prefix}{name}.")


def _sizes(*shape: int) -> str:
    return " × ".join(map(str, shape))


def _refused(folder: Path, reason: str) -> EmailRLError:
    return EmailRLError(f"The adapter in {folder} was rejected: {reason}.", "Choose another: emailrl checkpoints list")
