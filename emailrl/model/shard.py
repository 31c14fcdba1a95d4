"""Shards a frozen base over the GPUs of one host with FSDP2; a layer is gathered while it runs. Adapters stay whole on
every rank, so that gradients, optimizer and checkpoints are the same as without sharding. Gathering is a collective:
every rank of the mesh must run the same forward and backward passes in the same order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh

from emailrl.base.errors import UsageError
from emailrl.model.lora import causal_lm
from emailrl.settings import AgentSettings, ModelSettings, VllmSettings

FORWARD: Final = "emailrl_forward"  # the attribute under which FSDP hooks a module's second forward method


def check_shardable(model: ModelSettings, agent: AgentSettings, vllm: VllmSettings) -> None:
    """Raise UsageError for settings that do not support a sharded base, with an alternative."""
    if model.backend == "unsloth" or model.load_in_4bit:
        which = "BACKEND=unsloth" if model.backend == "unsloth" else "LOAD_IN_4BIT"
        raise UsageError(f"SHARD does not work with {which}.", f"Unset {which}, or use SHARD=off.")
    if agent.engine != "vllm" or not vllm.vllm_urls:
        why = "The transformers engine cannot sample from a sharded base model: every token would gather every layer."
        if agent.engine == "vllm":
            why = "In-process vLLM needs the whole base model on one GPU, but SHARD spreads it over several."
        hint = "Start vLLM servers (emailrl serve) on other GPUs; use --engine vllm with VLLM_URLS"
        raise UsageError(why, f"{hint}; see docs/guides/scaling.md.")


def shard_base(model: Any, mesh: DeviceMesh, *, offload: bool = False) -> None:
    """Spread the frozen weights of ``model`` (PEFT or bare, on the CPU) over ``mesh``; trainable ones stay complete.
    Each layer is moved to this rank's device and sharded before the next one, so that only one is complete at a time.
    ``offload`` keeps the shards in host memory, from which a layer is copied whenever it is gathered."""
    base = causal_lm(model)
    backbone, embedding, head = base.base_model, base.get_input_embeddings(), base.get_output_embeddings()
    if not hasattr(backbone, "layers"):
        raise UsageError(f"{class_name(base)} cannot be sharded: its layers are not found.", "Use SHARD=off.")
    policy = fsdp.CPUOffloadPolicy() if offload else fsdp.OffloadPolicy()
    trained = {parameter for parameter in base.parameters() if parameter.requires_grad}
    # The head stays whole: it reads hidden states in chunks, of which ranks may have different numbers.
    parts = [*backbone.layers, *([] if embedding.weight is head.weight else [embedding])]
    for part in parts:
        fsdp.fully_shard(part, mesh=mesh, offload_policy=policy, ignored_params=trained)
    cut = {parameter for part in parts for parameter in part.parameters()}
    whole = trained | {parameter for parameter in base.parameters() if parameter not in cut}
    device = mesh.device_type if mesh.device_type == "cpu" else f"cuda:{torch.cuda.current_device()}"
    for parameter in whole:
        parameter.data = parameter.data.to(device)
    # The root manages nothing itself: it lets a layer be gathered while the one before it computes.
    fsdp.fully_shard(backbone, mesh=mesh, offload_policy=policy, ignored_params=whole)


def gathering(module: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``method`` with the parameters of a sharded ``module`` gathered for each call and its backward pass. FSDP
    itself does this only for ``module(...)``. The method of an unsharded module is returned unchanged."""
    if not isinstance(module, fsdp.FSDPModule):
        return method
    setattr(module, FORWARD, method)
    fsdp.register_fsdp_forward_method(module, FORWARD)
    return getattr(module, FORWARD)


def is_sharded(model: Any) -> bool:
    """Whether ``shard_base`` has spread the base of ``model``."""
    return isinstance(causal_lm(model).base_model, fsdp.FSDPModule)


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class before sharding."""
    return type(module).__name__.removeprefix("FSDP")
