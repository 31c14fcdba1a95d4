"""What to do about a plan: obstacles to starting the run, changes that make it fit, and engines that make it faster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from typing import Final, NamedTuple

from emailrl.base.plain import counted
from emailrl.model.layout import GPU_SIZED
from emailrl.model.shape import KNOWN, find_shape
from emailrl.plan.devices import DEVICES, driver_gpus
from emailrl.plan.memory import Memory
from emailrl.plan.time import whole_of
from emailrl.plan.tokens import Job
from emailrl.settings.names import by_name

SMALLEST_BATCH: Final = 1024
WINDOW_STEP: Final = 1024
SHARES: Final = tuple(percent / 100 for percent in range(20, 95, 5))  # Share of the GPU's memory for vLLM.
QWEN3: Final = ("32B", "14B", "8B", "4B", "1.7B", "0.6B")
CLEARLY: Final = 0.8  # Maximum share of the planned time at which another engine is worth suggesting.
CLONE: Final = "in the clone: pip install -e"
_FLAGS: Final = {"engine": "--engine", "model_name": "--model"}
"""Advised as flags, because the command that gets the advice often has them, and a flag overrides the environment."""


class Obstacle(NamedTuple):
    """One reason that prevents a run from starting, and what to do about it."""

    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.reason} ({self.remedy})"


class Way(NamedTuple):
    """What to change, and the run's resulting needs."""

    text: str  # Settings as environment variables, or command-line options.
    peak: int  # Bytes.
    run_seconds: float


def find_obstacles(job: Job, *, sharded: bool, here: bool) -> Iterator[Obstacle]:
    """Everything that ``emailrl train`` would reject before its first step; ``here``: what this machine lacks, too."""
    settings, model, on_gpu, per_host = job.settings, job.settings.model, job.on_gpu, job.cluster.per_host
    each, shared = settings.engine_gpus, job.cluster.gpus > 1 and not settings.has_servers
    if model.shard == "host" and per_host == 1:
        yield Obstacle("SHARD=host needs at least two ranks per host", "--num-gpus 2 or more, or unset SHARD")
    if shared and per_host % each:
        reason = f"{per_host} ranks on a host cannot be divided into engines of VLLM_TENSOR_PARALLEL_SIZE={each}"
        yield Obstacle(reason, f"--num-gpus a multiple of {each}, or VLLM_URLS")
    if shared and sharded:
        yield Obstacle("a sharded base model needs vLLM servers", "VLLM_URLS, or SHARD=off")
    if settings.agent.engine == "openai":
        yield Obstacle("the openai engine cannot train", "--engine transformers or vllm")
    if model.backend == "unsloth" and not on_gpu:
        yield Obstacle("the unsloth backend needs a CUDA GPU", "--backend transformers")
    if model.load_in_4bit and not on_gpu:
        yield Obstacle("LOAD_IN_4BIT needs a CUDA GPU", "unset it")
    if job.shape.parameters > GPU_SIZED and not on_gpu and model.device == "auto":
        reason = f"{job.shape.parameters / 1e9:.0f} billion parameters are too slow to train on a CPU"
        yield Obstacle(reason, "--model nano, a GPU, or EMAILRL_DEVICE=cpu to do it anyway")
    if not here:
        return
    if settings.vllm_in_process and find_spec("vllm") is None:
        yield Obstacle("vllm is not installed here", f"{CLONE} '.[vllm]'; VLLM_URLS, or --engine transformers")
    if on_gpu and each > 1 and each > (found := len(driver_gpus())):
        yield Obstacle(f"VLLM_TENSOR_PARALLEL_SIZE is {each}, but this machine has {counted(found, 'GPU')}", "lower it")
    if on_gpu and model.backend == "unsloth" and find_spec("unsloth") is None:
        yield Obstacle("unsloth is not installed here", f"{CLONE} '.[unsloth]'; or --backend transformers")
    if on_gpu and model.load_in_4bit and find_spec("bitsandbytes") is None:
        yield Obstacle("bitsandbytes, which LOAD_IN_4BIT needs, is not installed here", "pip install bitsandbytes")
    if model.device.startswith("cuda") and not on_gpu:
        yield Obstacle(f"EMAILRL_DEVICE is {model.device}, but this machine has no GPU", "EMAILRL_DEVICE=auto")
    if on_gpu and metadata.version("torch").endswith("+cpu"):
        yield Obstacle("the torch installed here is built for CPUs", "install a CUDA build: pytorch.org/get-started")


def ways_to_fit(job: Job) -> list[Way]:
    """Each of a few changes that suffices alone, else the strongest together; a smaller Qwen3; a larger GPU."""
    memory, vllm, per_host = whole_of(job).memory, job.settings.vllm_in_process, job.cluster.per_host
    on_gpu, own = memory.layout.on_gpu, job.settings.vllm.vllm_gpu_memory_utilization
    batch, least = memory.micro_batch_tokens, max(job.tokens().longest, SMALLEST_BATCH)
    smaller = [batch >> times for times in range(1, batch.bit_length()) if batch >> times >= least]
    cache = job.settings.agent.kv_cache_gib if job.samples_in_process else None
    sizes = range(job.settings.engine_gpus + 1, per_host + 1)
    tries: dict[str, Iterable[object]] = {
        "max_tokens_per_micro_batch": smaller,
        "gradient_checkpointing": ["selective", "on"] if memory.layout.layers == "fused" else ["on"],
        "vllm_tensor_parallel_size": [size for size in sizes if vllm and per_host % size == 0],
        "vllm_enable_sleep": ["on"] * vllm,
        "vllm_gpu_memory_utilization": sorted(SHARES, key=lambda share: (round(abs(share - own), 2), share)) * vllm,
        "max_model_len": filter(None, [_window(job, memory) if vllm else None]),
        "kv_cache_gib": [cache * factor for factor in (2, 0.5, 4, 0.25, 8, 0.125)] if cache else [],
        "load_in_4bit": [True] * on_gpu,
        "engine": ["transformers"] * vllm,  # one copy of the weights instead of two
    }
    found = [way for key, values in tries.items() for way in _first_that_fits(job, ({key: one} for one in values))]
    if not found:
        together: dict[str, object] = {"load_in_4bit": True} if on_gpu else {"gradient_checkpointing": "on"}
        together |= {"max_tokens_per_micro_batch": smaller[-1]} if smaller else {}
        found = _first_that_fits(job, [together | ({"engine": "transformers"} if vllm else {})])
    if job.shape.family == "qwen3":
        fewer = [size for size in QWEN3 if KNOWN[f"qwen3-{size.lower()}"].parameters < job.shape.parameters]
        found += _first_that_fits(job, ({"model_name": f"Qwen/Qwen3-{size}"} for size in fewer))
    device = job.cluster.device
    for card in sorted((one for one in DEVICES.values() if one.is_gpu), key=lambda one: one.gib):
        larger = replace(job, cluster=replace(job.cluster, device=card))
        if (card.gib > device.gib or not device.is_gpu) and (way := _way(f"--gpu {card.name}", larger)):
            return [*found, way]
    return found


def faster_ways(job: Job) -> list[Way]:
    """vLLM in this process, if the run fits with it and is clearly faster."""
    if not (job.on_gpu and job.samples_in_process):
        return []
    with_vllm, text = job.with_settings(engine="vllm", vllm_urls=""), "--engine vllm"
    if window := _window(with_vllm, whole_of(with_vllm).memory):
        with_vllm, text = with_vllm.with_settings(max_model_len=window), f"MAX_MODEL_LEN={window} {text}"
    way = _way(f"vLLM in the same process ({text})", with_vllm)
    return [way] if way and way.run_seconds < CLEARLY * whole_of(job).run else []


def _window(job: Job, memory: Memory) -> int | None:
    """The largest context window that fits vLLM's cache, if it is too small but holds every typical trajectory."""
    window = (memory.cache_tokens or 0) // WINDOW_STEP * WINDOW_STEP
    return window if job.tokens().longest <= window < memory.cache_needs else None


def _first_that_fits(job: Job, tries: Iterable[dict[str, object]]) -> list[Way]:
    for values in tries:
        tried, written = job.with_settings(**values), []
        if "model_name" in values:
            tried = replace(tried, shape=find_shape(tried.settings.model.name))
        for key, value in values.items():
            shown = f"{value:g}" if isinstance(value, float) else str(value).lower()
            written.append(f"{_FLAGS[key]} {value}" if key in _FLAGS else f"{by_name()[key].env_names[0]}={shown}")
        if way := _way(" ".join(written), tried):
            return [way]
    return []


def _way(text: str, job: Job) -> Way | None:
    whole = whole_of(job)
    return Way(text, whole.memory.peak, whole.run) if whole.memory.fits else None
