"""Which settings to change where a run does not fit: each is tried, and what it saves is what its own plan says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from emailrl.plan.gpus import DEVICES, GIB, Device
from emailrl.plan.memory import Memory, rollout_pass
from emailrl.policy.layout import Keep
from emailrl.settings import Settings

SMALLEST_BATCH = 1024
SMALLEST_SHARE = 0.2
SMALLEST_PASS = 256
WINDOW_STEP = 1024
Plan = Callable[[Settings, Device], Memory]


@dataclass(frozen=True, slots=True)
class Knob:
    """One change of the settings."""

    name: str
    """The setting as it stands in the environment."""
    before: str
    after: str
    saves: int
    """Bytes of the peak."""
    enough: bool
    """Whether the run fits with this change alone."""
    settings: Settings
    """With this change, and those before it where one alone is not enough."""

    def __str__(self) -> str:
        saves = f" (saves {self.saves / GIB:.1f} GiB)" if self.saves > GIB / 20 else ""
        return f"{self.name} from {self.before} to {self.after}{saves}"


def advise(settings: Settings, device: Device, memory: Memory, plan: Plan, longest: int) -> list[Knob]:
    """Changes that lower the peak: those that are enough alone, the gentlest first; without one, all, turned together.

    ``plan`` is the memory of changed settings; micro-batches smaller than ``longest`` change nothing.
    """
    alone = list(_try_all(settings, device, memory, plan, longest))
    if any(knob.enough for knob in alone):
        return [knob for knob in alone if knob.enough]
    return _together(settings, device, memory, plan, longest)


def larger_device(settings: Settings, device: Device, plan: Plan) -> Device | None:
    """The smallest GPU of the table, larger than ``device`` if that is one, on which the settings fit as they are."""
    least = device.gib if device.is_gpu else 0.0
    larger = sorted((one for one in DEVICES.values() if one.is_gpu and one.gib > least), key=lambda one: one.gib)
    return next((one for one in larger if plan(settings, one).fits), None)


def _try_all(settings: Settings, device: Device, memory: Memory, plan: Plan, longest: int) -> Iterator[Knob]:
    """Each setting at the gentlest value that is enough, else at the value that saves most."""
    for name, section, before, values in _candidates(settings, memory, longest):
        best: Knob | None = None
        for after in values:
            changed = _with(settings, section, name.lower().removeprefix("emailrl_"), after)
            then = plan(changed, device)
            saves = memory.peak - then.peak
            if saves <= 0 and not then.fits:
                continue
            knob = Knob(name, _text(before), _text(after), saves, then.fits, changed)
            if best is None or then.fits or saves > best.saves:
                best = knob
            if then.fits:
                break
        if best is not None:
            yield best


def _together(settings: Settings, device: Device, memory: Memory, plan: Plan, longest: int) -> list[Knob]:
    """Turn knob after knob until it fits; empty where turning all is not enough."""
    turned: list[Knob] = []
    while not memory.fits:
        left = [one for one in _try_all(settings, device, memory, plan, longest) if one.name not in _names(turned)]
        if not left:
            return []
        knob = max(left, key=lambda one: (one.enough, one.saves))
        turned.append(knob)
        settings, memory = knob.settings, plan(knob.settings, device)
    return turned


def _names(knobs: list[Knob]) -> set[str]:
    return {knob.name for knob in knobs}


def _candidates(settings: Settings, memory: Memory, longest: int) -> Iterator[tuple[str, str, object, list[object]]]:
    """Name, section, present value and other values, from the gentlest on.

    First what costs a little time, then what bounds or rounds what is learned, last another engine.
    """
    training, vllm, agent = settings.training, settings.vllm, settings.agent
    batches = _halves(memory.micro_batch_tokens, max(longest, SMALLEST_BATCH))
    yield "MAX_TOKENS_PER_MICRO_BATCH", "training", memory.micro_batch_tokens, batches
    order = {"off": ["selective", "on"], "selective": ["on"]}.get(training.gradient_checkpointing, [])
    if training.gradient_checkpointing == "auto" and memory.keep == Keep.ALL and memory.layout.layers != "fused":
        order = ["on"]  # auto recomputes nothing on a CPU
    yield "GRADIENT_CHECKPOINTING", "training", training.gradient_checkpointing, list(order)
    if agent.engine == "vllm" and not vllm.vllm_urls:
        if not vllm.vllm_enable_sleep:
            yield "VLLM_ENABLE_SLEEP", "vllm", False, [True]
        share = vllm.vllm_gpu_memory_utilization
        steps = [round(share + change / 20, 2) for change in (-1, 1, -2, 2, -3, 3, -4, 4, -5, 5, -6, 6, -7, 7, -8, 8)]
        yield "MAX_MODEL_LEN", "model", memory.cache_needs, list(windows(memory, longest))
        yield "VLLM_GPU_MEMORY_UTILIZATION", "vllm", share, [one for one in steps if SMALLEST_SHARE <= one <= 0.9]
    elif agent.engine in ("auto", "transformers"):
        tokens = rollout_pass(settings, memory.layout)
        yield "MAX_TOKENS_PER_ROLLOUT_PASS", "agent", tokens, _halves(tokens, SMALLEST_PASS)
        if agent.kv_cache_gib is not None:
            factors = [2.0**n for step in range(1, 5) for n in (step, -step)]
            yield "KV_CACHE_GIB", "agent", agent.kv_cache_gib, [agent.kv_cache_gib * factor for factor in factors]
    if settings.lora.lora_rank > 8:
        yield "LORA_RANK", "lora", settings.lora.lora_rank, [max(settings.lora.lora_rank // 2, 8), 8]
    if not settings.model.load_in_4bit and memory.layout.on_gpu:
        yield "LOAD_IN_4BIT", "model", False, [True]
    if agent.engine == "vllm" and not vllm.vllm_urls:
        yield "EMAILRL_ENGINE", "agent", "vllm", ["transformers"]  # one copy of the weights instead of two


def windows(memory: Memory, longest: int) -> Iterator[int]:
    """The largest context window that vLLM's cache holds, where one is needed and no typical trajectory outgrows it."""
    window = (memory.cache_tokens or 0) // WINDOW_STEP * WINDOW_STEP
    if longest <= window < memory.cache_needs:
        yield window


def _halves(value: int, least: int) -> list[object]:
    halves: list[object] = []
    while (value := value // 2) >= least:
        halves.append(value)
    return halves


def _with(settings: Settings, section: str, name: str, value: object) -> Settings:
    part = getattr(settings, section).model_copy(update={name: value})
    return settings.model_copy(update={section: part})


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower()
