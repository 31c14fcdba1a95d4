"""Alternatives to a run, each fully planned: changed settings, a smaller model, a larger GPU, another engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from emailrl.engines import vllm_in_process
from emailrl.plan.gpus import DEVICES, Device
from emailrl.plan.memory import Memory, rollout_pass, samples_in_process
from emailrl.plan.time import Seconds
from emailrl.policy.shape import KNOWN, Shape
from emailrl.settings import Settings
from emailrl.settings.names import by_name

SMALLEST_BATCH = 1024
SMALLEST_PASS = 256
WINDOW_STEP = 1024
SHARES = tuple(percent / 100 for percent in range(20, 95, 5))
"""Share of the GPU's memory for vLLM."""
QWEN3 = ("32B", "14B", "8B", "4B", "1.7B", "0.6B")
CLEARLY = 0.8
"""Maximum share of the planned time at which another engine is worth suggesting."""
_ENGINE = "--engine"
"""A flag, because the command that gets the advice often has it, and a flag overrides the environment."""
_DRASTIC = ("LOAD_IN_4BIT", _ENGINE)
Estimate = Callable[[Settings, Device], tuple[Memory, Seconds]]
"""Memory and time of a run with changed settings, or on another device."""


@dataclass(frozen=True, slots=True)
class Way:
    """What to change, and the run's resulting needs."""

    text: str
    """Settings as environment variables, or command-line options."""
    peak: int
    """Bytes."""
    run_seconds: float


@dataclass(frozen=True, slots=True)
class _Change:
    name: str
    value: object
    settings: Settings

    def __str__(self) -> str:
        value = f"{self.value:g}" if isinstance(self.value, float) else str(self.value).lower()
        return f"{self.name}{' ' if self.name == _ENGINE else '='}{value}"


def ways_to_fit(settings: Settings, device: Device, shape: Shape, longest: int, estimate: Estimate) -> list[Way]:
    """Each setting that suffices alone, else several together; a smaller Qwen3; a larger GPU without other changes.

    If only a quantized base or another engine suffices alone, a pair of other settings that does comes first.
    ``longest``: tokens of the longest typical trajectory, the minimum for micro-batches and context windows.
    """
    found = _alone(settings, device, longest, estimate)
    if all(way.text.startswith(_DRASTIC) for way in found):
        found = [*_pair(settings, device, longest, estimate), *found]
    found = found or _together(settings, device, longest, estimate)
    sizes = QWEN3 if shape.family == "qwen3" else ()
    names = [f"Qwen/Qwen3-{size}" for size in sizes if KNOWN[f"qwen3-{size.lower()}"].parameters < shape.parameters]
    least = device.gib if device.is_gpu else 0.0
    larger = sorted((one for one in DEVICES.values() if one.is_gpu and one.gib > least), key=lambda one: one.gib)
    smaller = ((f"--model {name}", _with(settings, "model_name", name), device) for name in names)
    found += _first_that_fits(smaller, estimate)
    found += _first_that_fits(((f"--gpu {one.name}", settings, one) for one in larger), estimate)
    return found


def wider_engines(settings: Settings, device: Device, ranks: int, estimate: Estimate) -> list[Way]:
    """The fewest neighbors of a host's ``ranks`` that fit if they share a vLLM engine, at a smaller share if needed."""
    if not vllm_in_process(settings):
        return []
    sizes = [size for size in range(settings.vllm.vllm_tensor_parallel_size + 1, ranks + 1) if ranks % size == 0]
    own = settings.vllm.vllm_gpu_memory_utilization
    tries = []
    for size in sizes:
        text, wider = f"VLLM_TENSOR_PARALLEL_SIZE={size}", _with(settings, "vllm_tensor_parallel_size", size)
        tries.append((text, wider, device))
        for share in (share for share in reversed(SHARES) if share < own):
            with_share = _with(wider, "vllm_gpu_memory_utilization", share)
            tries.append((f"{text} VLLM_GPU_MEMORY_UTILIZATION={share:g}", with_share, device))
    return _first_that_fits(tries, estimate)


def faster_ways(settings: Settings, device: Device, longest: int, estimate: Estimate) -> list[Way]:
    """Engines with which the run fits and is clearly faster: vLLM in this process."""
    found: list[Way] = []
    now, vllm = estimate(settings, device)[1].run, _with(settings, "engine", "vllm")
    if device.is_gpu and samples_in_process(settings):
        vllm, text = _with(vllm, "vllm_urls", ""), "--engine vllm"
        if window := _window(estimate(vllm, device)[0], longest):
            vllm, text = _with(vllm, "max_model_len", window), f"MAX_MODEL_LEN={window} {text}"
        found += _first_that_fits([(f"vLLM in the same process ({text})", vllm, device)], estimate)
    return [way for way in found if way.run_seconds < CLEARLY * now]


def _first_that_fits(tries: Iterable[tuple[str, Settings, Device]], estimate: Estimate) -> list[Way]:
    for text, settings, device in tries:
        memory, seconds = estimate(settings, device)
        if memory.fits:
            return [Way(text, memory.peak, seconds.run)]
    return []


def _alone(settings: Settings, device: Device, longest: int, estimate: Estimate) -> list[Way]:
    """Each setting that suffices alone, at the mildest value that does."""
    changes = list(_changes(settings, estimate(settings, device)[0], longest))
    found = []
    for name in dict.fromkeys(change.name for change in changes):
        tries = ((str(change), change.settings, device) for change in changes if change.name == name)
        found += _first_that_fits(tries, estimate)
    return found


def _pair(settings: Settings, device: Device, longest: int, estimate: Estimate) -> list[Way]:
    """The fastest of the pairs of settings, none of them drastic, that suffice together; the mildest of equal ones."""
    found: list[Way] = []
    for first in _mild(settings, estimate(settings, device)[0], longest):
        memory = estimate(first.settings, device)[0]
        seconds = [one for one in _mild(first.settings, memory, longest) if one.name != first.name]
        for name in dict.fromkeys(one.name for one in seconds):
            tries = ((f"{first} {one}", one.settings, device) for one in seconds if one.name == name)
            found += _first_that_fits(tries, estimate)
    return [min(found, key=lambda way: way.run_seconds)] if found else []


def _mild(settings: Settings, memory: Memory, longest: int) -> list[_Change]:
    return [change for change in _changes(settings, memory, longest) if not change.name.startswith(_DRASTIC)]


def _together(settings: Settings, device: Device, longest: int, estimate: Estimate) -> list[Way]:
    """A combination of settings: greedily add the change that suffices or saves most; none if stuck."""
    turned: dict[str, _Change] = {}
    memory = estimate(settings, device)[0]
    while not memory.fits:
        left = [change for change in _changes(settings, memory, longest) if change.name not in turned]
        tries = [(estimate(change.settings, device)[0], change) for change in left]
        better = [(then, change) for then, change in tries if then.fits or then.peak < memory.peak]
        if not better:
            return []
        memory, change = min(better, key=lambda one: (not one[0].fits, 0 if one[0].fits else one[0].peak))
        turned[change.name], settings = change, change.settings
    changes = sorted(turned.values(), key=lambda change: change.name == _ENGINE)  # variables come before the command
    return _first_that_fits([(" ".join(map(str, changes)), settings, device)], estimate)


def _changes(settings: Settings, memory: Memory, longest: int) -> Iterator[_Change]:
    """Every value to try for every setting that affects memory, mildest first."""
    for key, values in _values(settings, memory, longest):
        for value in values:
            name = _ENGINE if key == "engine" else by_name()[key].env_names[0]
            yield _Change(name, value, _with(settings, key, value))


def _values(settings: Settings, memory: Memory, longest: int) -> Iterator[tuple[str, Sequence[object]]]:
    """First changes that cost a little time, then those that limit or round what is learned, then another engine."""
    yield "max_tokens_per_micro_batch", _halves(memory.micro_batch_tokens, max(longest, SMALLEST_BATCH))
    yield "gradient_checkpointing", ["selective", "on"] if memory.layout.layers == "fused" else ["on"]
    if vllm_in_process(settings):
        share, window = settings.vllm.vllm_gpu_memory_utilization, _window(memory, longest)
        nearest = sorted(SHARES, key=lambda one: (round(abs(one - share), 2), one))
        yield "vllm_enable_sleep", ["on"]
        yield "vllm_gpu_memory_utilization", nearest
        yield "max_model_len", [window] if window else []
    elif samples_in_process(settings):
        yield "max_tokens_per_rollout_pass", _halves(rollout_pass(settings, memory.layout), SMALLEST_PASS)
        if cache := settings.agent.kv_cache_gib:
            yield "kv_cache_gib", [cache * factor for factor in (2, 0.5, 4, 0.25, 8, 0.125, 16, 0.0625)]
    if settings.lora.lora_rank > 8:
        yield "lora_rank", [max(settings.lora.lora_rank // 2, 8), 8]
    if memory.layout.on_gpu:
        yield "load_in_4bit", [True]
    if vllm_in_process(settings):
        yield "engine", ["transformers"]  # one copy of the weights instead of two


def _window(memory: Memory, longest: int) -> int | None:
    """The largest context window that fits vLLM's cache, if it is too small but holds every typical trajectory."""
    window = (memory.cache_tokens or 0) // WINDOW_STEP * WINDOW_STEP
    return window if longest <= window < memory.cache_needs else None


def _halves(value: int, least: int) -> list[int]:
    return [value >> times for times in range(1, value.bit_length()) if value >> times >= least]


def _with(settings: Settings, key: str, value: object) -> Settings:
    leaf = by_name()[key]
    section = getattr(settings, leaf.section).model_copy(update={leaf.field: value})
    return settings.model_copy(update={leaf.section: section})
