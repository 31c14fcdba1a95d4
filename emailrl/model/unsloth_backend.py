"""The Unsloth backend: the same policy through Unsloth's faster kernels; needs a CUDA GPU and the extra ``unsloth``.
Adapter and tokenizer are emailrl's own: both backends begin with the same weights and ids. Unsloth replaces the
``forward`` of transformers' classes in place and drops key-value caches that are not its own: sampling in this process
uses ``unpatched``."""

from __future__ import annotations

import copy
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.install import need
from emailrl.base.plain import first_line
from emailrl.model.layout import Checkpointing
from emailrl.model.lora import causal_lm
from emailrl.model.shape import FAMILIES
from emailrl.settings import ModelSettings

ADDED = ("peft_config", "_saved_temp_tokenizer")  # attributes other than methods that both leave on a base model


def check_unsloth(model: ModelSettings) -> None:
    """Raise EmailRLError without a CUDA GPU or the package, UsageError for a device that Unsloth does not take."""
    if model.device not in ("auto", "cuda"):
        hint = "Use EMAILRL_DEVICE=auto, and CUDA_VISIBLE_DEVICES to choose the GPU."
        raise UsageError(f"The unsloth backend runs on the first visible GPU, not on '{model.device}'.", hint)
    if not torch.cuda.is_available():
        hint = "Use --backend transformers."
        raise EmailRLError("The unsloth backend needs a CUDA GPU, but this machine has none.", hint)
    need("unsloth", "--backend unsloth", ", or use --backend transformers.")


def load_unsloth(wanted: ModelSettings, path: str | Path, config: Any, dtype: torch.dtype) -> Any:
    """Load the base in ``path``, of this ``config``, through ``unsloth.FastLanguageModel``. Raises EmailRLError if it
    is unavailable or not of ``FAMILIES``."""
    if config.model_type not in FAMILIES:
        said = f"The unsloth backend supports Llama, Mistral, Qwen2 and Qwen3 models, not {config.model_type}."
        raise EmailRLError(said, "Use --backend transformers.")
    if "/" in str(config._attn_implementation):  # Unsloth reads the config anew, and transformers would fetch that code
        raise UsageError(f"The config of '{wanted.name}' names kernels on the hub.", "Choose another model.")
    with _unsloth(wanted.name) as fast:
        model, _ = fast.from_pretrained(
            model_name=str(path),
            use_exact_model_name=True,  # else it takes a mirror of its own, or one quantized beforehand
            # Beyond the model's context it would scale the positions, below it cut off what is longer.
            max_seq_length=config.max_position_embeddings,
            dtype=dtype,
            load_in_4bit=wanted.load_in_4bit,
            offload_embedding=False,
        )
    if model.get_input_embeddings().weight.shape[0] != config.vocab_size:  # to give its own tokenizer a padding token
        raise EmailRLError(f"Unsloth adds tokens to '{wanted.name}'.", "Use --backend transformers.")
    return model


def prepare_unsloth(model: Any, name: str, checkpointing: Checkpointing) -> Any:
    """Give a PEFT model around a base of ``load_unsloth`` Unsloth's LoRA kernels and gradient checkpointing. Anything
    but GRADIENT_CHECKPOINTING=off recomputes each layer from inputs kept in host memory."""
    with _unsloth(name) as fast:
        return fast.patch_peft_model(model, use_gradient_checkpointing=False if checkpointing == "off" else "unsloth")


@contextmanager
def _unsloth(name: str) -> Iterator[Any]:
    """``FastLanguageModel`` without telemetry and without a code cache in the working folder."""
    os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")
    os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", str(Path.home() / ".cache" / "unsloth_compiled_cache"))
    try:
        with redirect_stdout(sys.stderr):  # its banner; stdout belongs to results
            with warnings.catch_warnings():
                # What it patches at import are trainers that emailrl does not use.
                warnings.filterwarnings("ignore", message=".*should be imported before")
                from unsloth import FastLanguageModel
            yield FastLanguageModel
    except (OSError, ValueError, TypeError, ImportError, NotImplementedError, RuntimeError) as error:
        said = f"Unsloth failed to load '{name}': {first_line(error)}"
        raise EmailRLError(said, "Use --backend transformers.") from error


def unpatched(model: Any) -> Any:
    """Return the base of ``model`` without adapters, in transformers' own classes, with the same weight tensors. The
    classes are loaded again from transformers' source, and get the states of the modules."""
    base = causal_lm(model)
    name = type(base).__module__
    file = sys.modules[name].__file__
    spec = spec_from_file_location(name, file) if file else None
    if spec is None or spec.loader is None:
        raise EmailRLError(f"The source code of {name} was not found.", "Use --backend transformers, or --engine vllm.")
    again = module_from_spec(spec)  # executed without an entry in ``sys.modules``
    spec.loader.exec_module(again)
    return _twin(base, again, base.config)


def _twin(module: nn.Module, own: ModuleType, config: Any) -> nn.Module:
    if isinstance(module, BaseTunerLayer):
        module = module.get_base_layer()
    twin = copy.copy(module)
    # What Unsloth hangs on single modules: forwards with its kernels, methods bound to the patched model, notes.
    for key, value in list(vars(twin).items()):
        if isinstance(value, FunctionType | MethodType | partial) or key in ADDED or "unsloth" in key:
            del vars(twin)[key]
    for hooks in ("_forward_hooks", "_forward_pre_hooks"):
        vars(twin)[hooks] = type(vars(twin)[hooks])()
    vars(twin)["_modules"] = {}
    for name, child in module.named_children():
        if name == "rotary_emb":  # Unsloth puts one of another signature in its place
            kind = next(value for key, value in vars(own).items() if key.endswith("RotaryEmbedding"))
            twin.add_module(name, kind(config=config).to(next(module.parameters()).device))
        else:
            twin.add_module(name, _twin(child, own, config))
    if type(module).__module__ == own.__name__:
        twin.__class__ = getattr(own, type(module).__name__)
    return twin
