"""What prevents a run from starting, regardless of memory: invalid settings, and what this machine lacks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

from emailrl.engines import engine_gpus, vllm_in_process
from emailrl.plan.gpus import Device, count_gpus
from emailrl.policy.shape import Shape
from emailrl.policy.size import GPU_SIZED
from emailrl.settings import Settings


@dataclass(frozen=True, slots=True)
class Obstacle:
    """One reason, and what to do about it."""

    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.reason} ({self.remedy})"


def find_obstacles(settings: Settings, shape: Shape, device: Device, *, here: bool) -> list[Obstacle]:
    """Everything ``emailrl train`` would reject before its first step; ``here`` also checks this machine."""
    found = [*_of_settings(settings, shape, device)]
    return [*found, *_of_this_machine(settings, device)] if here else found


def shared_obstacles(settings: Settings, per_host: int, *, sharded: bool) -> list[Obstacle]:
    """What else it would reject if each rank on the ``per_host`` GPUs samples; ``sharded``: the base is spread."""
    found, each = [], engine_gpus(settings)
    if per_host % each:
        reason = f"{per_host} ranks on a host cannot be divided into engines of VLLM_TENSOR_PARALLEL_SIZE={each}"
        found.append(Obstacle(reason, f"--num-gpus a multiple of {each}, or VLLM_URLS"))
    if sharded:
        found.append(Obstacle("a sharded base model needs vLLM servers", "VLLM_URLS, or SHARD=off"))
    return found


def sharding_obstacles(settings: Settings, per_host: int) -> list[Obstacle]:
    """What else it would reject about SHARD with ``per_host`` GPUs on each host."""
    if settings.model.shard != "host" or per_host > 1:
        return []
    return [Obstacle("SHARD=host needs at least two ranks per host", "--num-gpus 2 or more, or unset SHARD")]


def _of_settings(settings: Settings, shape: Shape, device: Device) -> Iterator[Obstacle]:
    model = settings.model
    if settings.agent.engine == "openai":
        yield Obstacle("the openai engine cannot train", "--engine transformers or vllm")
    if model.backend == "unsloth" and not device.is_gpu:
        yield Obstacle("the unsloth backend needs a CUDA GPU", "--backend transformers")
    if model.load_in_4bit and not device.is_gpu:
        yield Obstacle("LOAD_IN_4BIT needs a CUDA GPU", "unset it")
    if shape.parameters > GPU_SIZED and not device.is_gpu and model.device == "auto":
        billions = f"{shape.parameters / 1e9:.0f} billion parameters"
        yield Obstacle(
            f"{billions} are too slow to train on a CPU", "--model nano, a GPU, or EMAILRL_DEVICE=cpu to do it anyway"
        )


def _of_this_machine(settings: Settings, device: Device) -> Iterator[Obstacle]:
    model, vllm = settings.model, settings.vllm
    if vllm_in_process(settings):
        if find_spec("vllm") is None:
            yield Obstacle(
                "vllm is not installed here",
                "in the clone: pip install -e '.[vllm]'; VLLM_URLS, or --engine transformers",
            )
        if device.is_gpu and vllm.vllm_tensor_parallel_size > (gpus := count_gpus()):
            yield Obstacle(
                f"VLLM_TENSOR_PARALLEL_SIZE is {vllm.vllm_tensor_parallel_size}, but this machine has {gpus} GPU"
                f"{'s' if gpus != 1 else ''}", "lower it",
            )  # fmt: skip
    if device.is_gpu and model.backend == "unsloth" and find_spec("unsloth") is None:
        yield Obstacle(
            "unsloth is not installed here", "in the clone: pip install -e '.[unsloth]'; or --backend transformers"
        )
    if device.is_gpu and model.load_in_4bit and find_spec("bitsandbytes") is None:
        yield Obstacle("bitsandbytes, which LOAD_IN_4BIT needs, is not installed here", "pip install bitsandbytes")
    if model.device.startswith("cuda") and not device.is_gpu:
        yield Obstacle(f"EMAILRL_DEVICE is {model.device}, but this machine has no GPU", "EMAILRL_DEVICE=auto")
    build = metadata.version("torch").partition("+")[2]
    if device.is_gpu and build == "cpu":
        yield Obstacle("the torch installed here is built for CPUs", "install a CUDA build: pytorch.org/get-started")
