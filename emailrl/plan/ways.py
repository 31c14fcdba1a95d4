"""Other ways to make the same run, each planned whole: changed settings, a larger GPU, servers that sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from emailrl.plan.advice import Knob, windows
from emailrl.plan.gpus import Device
from emailrl.plan.memory import Memory
from emailrl.plan.time import Seconds
from emailrl.policy.shape import KNOWN, Shape
from emailrl.settings import Settings

SIZES = ("32B", "14B", "8B", "4B", "1.7B", "0.6B")
CLEARLY = 0.8
"""Of the time as planned: what takes more of it is not worth another engine."""
Planned = Callable[[Settings, Device], tuple[Memory, Seconds]]


@dataclass(frozen=True, slots=True)
class Way:
    """What to do, and what the run then needs."""

    text: str
    """Settings as they stand in the environment, or a GPU."""
    peak: int
    """Bytes."""
    run_seconds: float


def ways_to_fit(
    settings: Settings, device: Device, shape: Shape, knobs: list[Knob], larger: Device | None, plan: Planned
) -> list[Way]:
    """Each knob that is enough alone, or all of them together; then a smaller model, last the larger GPU."""
    found = []
    if knobs and not knobs[0].enough:
        text = " ".join(f"{knob.name}={knob.after}" for knob in knobs)
        found.append(_way(text, plan(knobs[-1].settings, device)))
    else:
        found += [_way(f"{knob.name}={knob.after}", plan(knob.settings, device)) for knob in knobs]
    found += [way for way in [_smaller_model(settings, device, shape, plan)] if way]
    if larger is not None:
        found.append(_way(f"--gpu {larger.name}", plan(settings, larger)))
    return found


def _smaller_model(settings: Settings, device: Device, shape: Shape, plan: Planned) -> Way | None:
    """The largest smaller Qwen3 that fits with the settings as they are; None for other families."""
    if shape.family != "qwen3":
        return None
    for size in SIZES:
        name = f"Qwen/Qwen3-{size}"
        changed = settings.model_copy(update={"model": settings.model.model_copy(update={"name": name})})
        if KNOWN[f"qwen3-{size.lower()}"].parameters < shape.parameters and (planned := plan(changed, device))[0].fits:
            return _way(f"--model {name}", planned)
    return None


def with_servers(settings: Settings, device: Device, num_gpus: int, plan: Planned) -> Way | None:
    """vLLM servers on all GPUs but the trainer's; None where there are none, or they are planned for already."""
    if num_gpus == 1 or settings.vllm.vllm_urls:
        return None
    agent = settings.agent.model_copy(update={"engine": "vllm"})
    vllm = settings.vllm.model_copy(update={"vllm_urls": "http://other-gpus"})
    return _way("VLLM_URLS", plan(settings.model_copy(update={"agent": agent, "vllm": vllm}), device))


def with_vllm(settings: Settings, device: Device, longest: int, plan: Planned) -> Way | None:
    """vLLM in the same process, in the window that its cache holds; None where it does not fit or gains little.

    ``longest``: tokens of the longest typical trajectory, which the window must hold.
    """
    if not device.is_gpu or settings.agent.engine not in ("auto", "transformers"):
        return None
    agent = settings.agent.model_copy(update={"engine": "vllm"})
    vllm = settings.vllm.model_copy(update={"vllm_urls": ""})
    changed, text = settings.model_copy(update={"agent": agent, "vllm": vllm}), "--engine vllm"
    now, planned = plan(settings, device), plan(changed, device)
    for window in windows(planned[0], longest):
        model = settings.model.model_copy(update={"max_model_len": window})
        text = f"MAX_MODEL_LEN={window} and {text}"
        planned = plan(changed.model_copy(update={"model": model}), device)
    faster = planned[1].run < CLEARLY * now[1].run
    return _way(text, planned) if planned[0].fits and faster else None


def _way(text: str, planned: tuple[Memory, Seconds]) -> Way:
    memory, seconds = planned
    return Way(text, memory.peak, seconds.run)
