"""Memory, tokens, time and money of a run before it is launched, from the settings and a model's config alone.

No torch, no weights and, for the shapes that are built in, no network. What the arithmetic was checked against is in
``docs/gpu.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial

from emailrl.errors import UsageError
from emailrl.plan.advice import Knob, advise, larger_device
from emailrl.plan.gpus import GIB, MEASURED, Device, find_device, this_machine
from emailrl.plan.memory import Memory, plan_memory
from emailrl.plan.obstacles import Obstacle, find_obstacles
from emailrl.plan.time import Seconds, plan_seconds
from emailrl.plan.tokens import Measured, Tokens, base_of, count_tokens, measure_run
from emailrl.plan.ways import Way, ways_to_fit, with_servers, with_vllm
from emailrl.policy.shape import Shape, find_shape
from emailrl.settings import Settings
from emailrl.training.run.tracking import duration

__all__ = ["Measured", "Plan", "base_of", "duration", "find_device", "make_plan", "measure_run", "this_machine"]


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
    larger: Device | None
    """A GPU on which it fits as it is, where this one is too small."""
    ways: list[Way]
    """What makes it fit, each planned whole."""
    servers: Way | None
    """The run with vLLM servers on the GPUs that do not train."""
    vllm: Way | None
    """The run with vLLM in the process that trains, where it fits and is clearly faster."""
    obstacles: list[Obstacle] = field(default_factory=list)
    """What keeps the run from starting, whatever its memory."""
    measured: Measured | None = None
    """Of a run of this model on this machine."""
    remarks: list[str] = field(default_factory=list)
    """On what was measured."""

    @property
    def runs(self) -> bool:
        """Whether it fits, and nothing keeps it from starting."""
        return self.memory.fits and not self.obstacles

    @property
    def run_seconds(self) -> float:
        """Seconds of the run: as planned, or as many steps as planned by the seconds that a run's steps took."""
        if self.measured is None:
            return self.seconds.run
        return self.tokens.steps * self.measured.seconds["total"]

    @property
    def cost(self) -> float | None:
        """What the run costs at ``price``."""
        return None if self.price is None else self._cost(self.run_seconds)

    def _cost(self, seconds: float) -> float:
        return (self.price or 0.0) * self.num_gpus * seconds / 3600

    @property
    def verdict(self) -> str:
        """One line: whether it can run and fits, and what to do where not."""
        if not self.obstacles:
            return self._memory_verdict()
        return f"cannot run: {'; '.join(map(str, self.obstacles))}; its memory {self._memory_verdict()}"

    def _memory_verdict(self) -> str:
        memory = self.memory
        amounts = f"{memory.peak / GIB:.1f} of {self.device.gib:.0f} GiB"
        if memory.fits:
            return f"fits: {amounts}"
        if memory.peak <= memory.usable:
            whose = "vLLM's share" if self.settings.agent.engine == "vllm" else "the key-value cache"
            amounts = f"{whose} has room for {memory.cache_tokens:,} tokens of {memory.cache_needs:,}"
        elif memory.peak <= self.device.gib * GIB:
            amounts += f", of which {memory.usable / GIB:.1f} can be used"
        return f"does not fit: {amounts}; {self._remedy()}"

    def _remedy(self) -> str:
        larger = ""
        if self.larger:
            larger = f"a GPU{' with more memory' if self.device.is_gpu else ''} ({self.larger.name})"
        if not self.knobs:
            return f"take {larger}" if larger else "choose a smaller model"
        link = ", or " if self.knobs[0].enough else ", and "
        turned = f"turn {link.join(map(str, self.knobs))}"
        return f"{turned}, or take {larger}" if larger else turned

    @property
    def notes(self) -> list[str]:
        """What the numbers rest on, and what they leave out."""
        notes = [*self.remarks, *self.memory.notes, *([self.device.note] if self.device.note else [])]
        if self.device.is_gpu and not self.device.note and self.device.name != MEASURED:
            notes.append(f"times were measured on an {MEASURED}: {self.device.name} is taken by its data sheet")
        worst = self.worst
        if self.memory.fits and not worst.fits:
            longest = f"a trajectory of {self.tokens.most_per_trajectory:,} tokens, as MAX_TURNS and MAX_TOKENS allow, "
            if worst.peak > worst.usable:
                notes.append(f"{longest}would need {worst.peak / GIB:.1f} GiB")
            else:
                notes.append(f"{longest}would be cut off at {worst.cache_tokens:,}, which the key-value cache holds")
        if self.vllm:
            notes.append(f"with vLLM in the same process ({self.vllm.text}) {self._instead(self.vllm)}")
        if self.servers:
            servers = "one GPU trains and samples; with vLLM servers on the others (VLLM_URLS)"
            notes.append(f"{servers} {self._instead(self.servers)}")
        notes.append("the mailbox, the judge and saving are not in the times")
        return notes

    def _instead(self, way: Way) -> str:
        then, now = way.run_seconds, self.seconds.run
        costs = "" if not self.price else f", and cost {self._cost(then):,.2f} instead of {self._cost(now):,.2f}"
        return f"the run would take {duration(then)} instead of {duration(now)}{costs}"


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
    here: bool = False,
) -> Plan:
    """Plan the run of ``settings`` on ``device``; ``measured`` is what a run like it took.

    ``here``: the device is this machine. What is not installed is then said, and the measured run's seconds count;
    elsewhere only its tokens do.

    Raises UsageError or EmailRLError for a model whose shape cannot be had, and for settings that contradict another.
    """
    if utilization is not None and not 0 < utilization <= 1:
        raise UsageError("--mfu is a share of the device's FLOP/s.", "Name one above 0, at most 1.")
    if price is not None and not 0 <= price < math.inf:
        raise UsageError("--price is that of one GPU for an hour.", "Name a number.")
    shape = find_shape(settings.model.name)
    tokens = count_tokens(
        shape, settings, per_trajectory=tokens_per_trajectory, trainable_share=trainable_share, measured=measured
    )

    again = partial(plan_memory, shape, tokens=tokens)

    def whole(changed: Settings, other: Device) -> tuple[Memory, Seconds]:
        its = shape if changed.model.name == settings.model.name else find_shape(changed.model.name)
        needed = plan_memory(its, changed, other, tokens)
        return needed, plan_seconds(its, changed, other, tokens, needed, utilization=utilization, num_gpus=num_gpus)

    memory, seconds = whole(settings, device)
    knobs = [] if memory.fits else advise(settings, device, memory, again, tokens.longest)
    larger = None if memory.fits else larger_device(settings, device, again)
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
        knobs=knobs,
        larger=larger,
        ways=[] if memory.fits else ways_to_fit(settings, device, shape, knobs, larger, whole),
        servers=with_servers(settings, device, num_gpus, whole),
        vllm=with_vllm(settings, device, tokens.longest, whole) if memory.fits else None,
        obstacles=find_obstacles(settings, shape, device, here=here),
        measured=measured if here and measured and measured.is_of(settings.model.name) else None,
        remarks=measured.remarks_on(settings.model.name) if measured else [],
    )
