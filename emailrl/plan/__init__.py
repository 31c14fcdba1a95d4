"""Memory, tokens, time and money of a run before it is launched, from the settings and a model's config alone.

No torch, no weights and, for the shapes that are built in, no network. What the arithmetic was checked against is in
``docs/gpu.md``.
"""

from __future__ import annotations

from dataclasses import dataclass

from emailrl.errors import UsageError
from emailrl.plan.advice import Knob, advise, larger_device
from emailrl.plan.gpus import GIB, Device, find_device, this_machine
from emailrl.plan.memory import Memory, plan_memory
from emailrl.plan.time import Seconds, plan_seconds
from emailrl.plan.tokens import Measured, Tokens, count_tokens, measure_run
from emailrl.policy.shape import Shape, find_shape
from emailrl.settings import Settings

__all__ = ["Measured", "Plan", "find_device", "make_plan", "measure_run", "this_machine"]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run needs on one device."""

    settings: Settings
    shape: Shape
    device: Device
    num_gpus: int
    tokens: Tokens
    memory: Memory
    worst: Memory
    """With trajectories as long as the settings allow."""
    seconds: Seconds
    price: float | None
    """Of one GPU for an hour."""
    knobs: list[Knob]
    """What to change where it does not fit."""
    larger: str | None
    """A GPU on which it fits as it is, where this one is too small."""
    measured: Measured | None = None

    @property
    def run_seconds(self) -> float:
        """Seconds of the run: as planned, or as many steps as planned by the seconds that a run's steps took."""
        if self.measured is None:
            return self.seconds.run
        return self.tokens.steps * self.measured.seconds["total"]

    @property
    def cost(self) -> float | None:
        """What the run costs at ``price``."""
        return None if self.price is None else self.price * self.num_gpus * self.run_seconds / 3600

    @property
    def verdict(self) -> str:
        """One line: whether it fits, and what to turn where it does not."""
        memory = self.memory
        amounts = f"{memory.peak / GIB:.1f} of {self.device.gib:.0f} GiB"
        if memory.fits:
            return f"fits: {amounts}"
        if memory.peak <= memory.usable:
            amounts = f"vLLM's share has room for {memory.vllm_cache_tokens:,} tokens of {memory.vllm_needs_tokens:,}"
        elif memory.peak <= self.device.gib * GIB:
            amounts += f", of which {memory.usable / GIB:.1f} can be used"
        return f"does not fit: {amounts}; {self._remedy()}"

    def _remedy(self) -> str:
        larger = f"a GPU with more memory ({self.larger})" if self.larger else ""
        if not self.knobs:
            return f"take {larger}" if larger else "choose a smaller model"
        link = ", or " if self.knobs[0].enough else ", and "
        turned = f"turn {link.join(map(str, self.knobs))}"
        return f"{turned}, or take {larger}" if larger else turned

    @property
    def notes(self) -> list[str]:
        """What the numbers rest on, and what they leave out."""
        notes = [*self.memory.notes, *([self.device.note] if self.device.note else [])]
        if self.memory.fits and not self.worst.fits:
            notes.append(
                f"one trajectory of {self.tokens.most_per_trajectory:,} tokens, as MAX_TURNS and MAX_TOKENS allow, "
                f"would need {self.worst.peak / GIB:.1f} GiB"
            )
        if self.num_gpus > 1 and not self.settings.vllm.vllm_urls:
            notes.append("training uses one GPU: more of them only cost, unless VLLM_URLS names servers on them")
        notes.append("the mailbox, the judge and saving are not in the times")
        return notes


def make_plan(
    settings: Settings,
    device: Device,
    *,
    num_gpus: int = 1,
    price: float | None = None,
    tokens_per_trajectory: int | None = None,
    trainable_share: float | None = None,
    utilization: float | None = None,
    measured: Measured | None = None,
    measured_seconds: bool = True,
) -> Plan:
    """Plan the run of ``settings`` on ``device``; ``measured_seconds`` False takes a run's tokens, but not its times.

    Raises UsageError or EmailRLError for a model whose shape cannot be had, and for settings that contradict another.
    """
    if utilization is not None and not 0 < utilization <= 1:
        raise UsageError("--mfu is a share of the device's FLOP/s.", "Name one above 0, at most 1.")
    shape = find_shape(settings.model.name)
    tokens = count_tokens(
        shape, settings, per_trajectory=tokens_per_trajectory, trainable_share=trainable_share, measured=measured
    )
    memory = plan_memory(shape, settings, device, tokens)
    seconds = plan_seconds(shape, settings, device, tokens, memory, utilization=utilization, num_gpus=num_gpus)

    def again(changed: Settings, other: Device) -> Memory:
        return plan_memory(shape, changed, other, tokens)

    return Plan(
        settings=settings,
        shape=shape,
        device=device,
        num_gpus=num_gpus,
        tokens=tokens,
        memory=memory,
        worst=plan_memory(shape, settings, device, tokens.at_worst()),
        seconds=seconds,
        price=price,
        knobs=[] if memory.fits else advise(settings, device, memory, again, tokens.longest),
        larger=None if memory.fits else larger_device(settings, device, again),
        measured=measured if measured_seconds else None,
    )
