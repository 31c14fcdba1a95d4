"""Estimate a run's memory, tokens, time and cost before launch, from the settings and a model's config alone.

Needs no torch, no weights and, for built-in shapes, no network. ``docs/performance.md`` lists the measurements that
validate the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from emailrl.engines import has_servers, vllm_in_process
from emailrl.errors import UsageError
from emailrl.plan.cluster import Fabric, Split
from emailrl.plan.estimate import Estimator, on_several
from emailrl.plan.gpus import GIB, MEASURED, Device, find_device, this_machine
from emailrl.plan.memory import Memory, plan_memory
from emailrl.plan.obstacles import Obstacle, find_obstacles, sharding_obstacles, shared_obstacles
from emailrl.plan.questions import limit_to_questions
from emailrl.plan.time import Seconds
from emailrl.plan.tokens import Measured, Tokens, base_of, measure_run
from emailrl.plan.ways import Way, faster_ways, ways_to_fit, wider_engines
from emailrl.policy.shape import Shape, find_shape
from emailrl.settings import Settings, TrainingSettings
from emailrl.training.run.printing import duration

__all__ = ["Measured", "Plan", "base_of", "duration", "find_device", "make_plan", "measure_run", "this_machine"]

NETWORK: Final = 100.0
"""Default Gbit/s between hosts."""
MOST_GPUS: Final = 16_384
"""Maximum GPUs of a plan: every division into trainers and servers is tried, which takes seconds."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run needs on one device."""

    settings: Settings
    shape: Shape
    device: Device
    fabric: Fabric
    """The available GPUs."""
    tokens: Tokens
    memory: Memory
    """Of one trainer."""
    worst: Memory
    """With the longest trajectories that the settings allow."""
    seconds: Seconds
    """Of all GPUs, or if no split of several fits, of one with its own trajectories."""
    split: Split | None
    """With several GPUs that fit the run: which train and which serve, or that all do both."""
    alternative: Split | None
    """The same GPUs used the other way, if the run then fits."""
    price: float | None
    """Per GPU-hour."""
    ways: list[Way]
    """Changes that make the run fit on one GPU, if it does not."""
    faster: list[Way]
    """Engines that would make a fitting run clearly faster."""
    obstacles: list[Obstacle] = field(default_factory=list)
    """What prevents the run from starting, regardless of memory."""
    measured: Measured | None = None
    """From a run of this model on this machine."""
    remarks: list[str] = field(default_factory=list)
    """On what was measured, and on the questions."""

    @property
    def runs(self) -> bool:
        """Whether it fits and nothing prevents it from starting."""
        return self.fits and not self.obstacles

    @property
    def fits(self) -> bool:
        """Whether memory suffices: of one GPU, or of the trainers and servers on several."""
        return self.memory.fits and (self.split is not None or self.fabric.gpus == 1)

    @property
    def run_seconds(self) -> float:
        """Seconds of the run: as planned, or its steps and evaluations at a measured run's seconds for each."""
        measured, tokens = self.measured, self.tokens
        if measured is None:
            return self.seconds.run
        steps = tokens.steps * measured.seconds["total"]
        if measured.evaluation is None:
            return steps
        steps -= tokens.steps * measured.seconds["evaluation"]
        return steps + (tokens.evaluations + tokens.confirmed) * measured.evaluation

    @property
    def tokens_per_second(self) -> float:
        """Tokens of trajectories, including prompts and tool results."""
        return self.tokens.per_step / self.seconds.step

    @property
    def cost(self) -> float | None:
        """The run's cost at ``price``."""
        return self._cost(self.run_seconds)

    def _cost(self, seconds: float) -> float | None:
        return None if self.price is None else self.price * self.fabric.gpus * seconds / 3600

    @property
    def verdict(self) -> str:
        """One line: whether it can run and fits, or what to change."""
        if not self.obstacles:
            return self._memory_verdict()
        return f"cannot run: {'; '.join(map(str, self.obstacles))}; its memory {self._memory_verdict()}"

    def _memory_verdict(self) -> str:
        memory = self.memory
        amounts = f"{memory.peak / GIB:.1f} of {self.device.gib:.0f} GiB"
        if self.fits or (memory.fits and self.obstacles):
            return f"fits: {amounts}"
        if memory.fits:
            return f"does not fit: {self.fabric.gpus:,} GPUs are too few for a trainer and a server; use more"
        if memory.peak <= memory.usable:
            whose = "vLLM's share" if vllm_in_process(self.settings) else "the KV cache"
            amounts = f"{whose} has room for {memory.cache_tokens:,} tokens of {memory.cache_needs:,}"
        elif memory.peak <= self.device.gib * GIB:
            amounts += f", {memory.usable / GIB:.1f} of them usable"
        return f"does not fit: {amounts}; {f'try {self.ways[0].text}' if self.ways else 'choose a smaller model'}"

    @property
    def notes(self) -> list[str]:
        """What the numbers are based on, and what they exclude."""
        notes = [*self.remarks, *self.memory.notes, *([self.device.note] if self.device.note else [])]
        if self.device.is_gpu and not self.device.note and self.device.name != MEASURED:
            notes.append(f"times were measured on an {MEASURED} and scaled to the {self.device.name} by its data sheet")
        worst = self.worst
        if self.memory.fits and not worst.fits:
            longest = (
                f"a trajectory of {self.tokens.most_per_trajectory:,} tokens, the most MAX_TURNS and MAX_TOKENS allow, "
            )
            if worst.peak > worst.usable:
                notes.append(f"{longest}would need {worst.peak / GIB:.1f} GiB")
            else:
                notes.append(f"{longest}would be cut off at {worst.cache_tokens:,}, the size of the KV cache")
        if self.split is None and self.fabric.gpus > 1 and has_servers(self.settings):
            notes.append("memory and tokens are those of one trainer")
        if self.split is not None and self.split.trainers > 1:
            notes.append(
                f"a step has {self.tokens.trajectories:,} trajectories: PER_DEVICE_TRAIN_BATCH_SIZE is per rank; "
                "lower it to keep the batch"
            )
        if self.split is not None and self.split.rank_0_decides:
            notes.append("rank 0 runs all conversations with servers and is the bottleneck: more servers do not help")
        return [
            *notes,
            *self._other_use(),
            *map(self._comparison, self.faster),
            f"times exclude {'mailbox search, ' if self.split is None else ''}the judge, checkpoints and start-up",
        ]

    def _other_use(self) -> list[str]:
        """How the GPUs would do used the other way, if that may be better."""
        split, other = self.split, self.alternative
        if other is None:
            return []
        reached = other.tokens_per_second
        if split is None:
            return [f"{other} would fit, with {reached:,.0f} tokens/s"]
        if reached > split.tokens_per_second:
            return [f"{other} would reach {reached:,.0f} tokens/s instead of {split.tokens_per_second:,.0f}"]
        return [f"{other} would reach only {reached:,.0f} tokens/s"] * split.shared

    def _comparison(self, way: Way) -> str:
        now = self.run_seconds
        costs = f", and cost {self._cost(way.run_seconds):,.2f} instead of {self._cost(now):,.2f}" if self.price else ""
        return f"with {way.text} the run would take {duration(way.run_seconds)} instead of {duration(now)}{costs}"


def make_plan(
    settings: Settings,
    device: Device,
    *,
    num_gpus: int | None = None,
    nodes: int | None = None,
    network: float = NETWORK,
    price: float | None = None,
    tokens_per_trajectory: int | None = None,
    trainable_share: float | None = None,
    utilization: float | None = None,
    measured: Measured | None = None,
    here: bool = False,
) -> Plan:
    """Plan the run of ``settings`` on ``device``; ``measured`` holds the metrics of a similar run.

    With several GPUs (``num_gpus`` on each of ``nodes`` hosts, ``network`` Gbit/s between them) some train and the
    others are vLLM servers; with ENGINE=vllm or transformers and no VLLM_URLS, all train and sample in turn. Without
    ``num_gpus`` and ``nodes``, EMAILRL_NPROC and EMAILRL_NNODES count GPUs, each with a rank that trains. ``here``: the
    device is this machine. Then missing packages are reported and the measured run's seconds are used; elsewhere, and
    with several GPUs, only its token counts are.

    Raises UsageError or EmailRLError for unavailable shapes, conflicting settings, more than ``MOST_GPUS`` GPUs and
    questions that training refuses.
    """
    settings, fabric, started = _as_started(settings, device, num_gpus, nodes, network)
    per_host, gpus = fabric.per_host, fabric.gpus
    settings, confirmed, assumed = limit_to_questions(settings)
    shape = find_shape(settings.model.name)
    settings, shares = on_several(settings) if gpus > 1 else (settings, False)
    estimate = Estimator(shape, settings, tokens_per_trajectory, trainable_share, measured, utilization, confirmed)
    split = estimate.split(settings, device, fabric, shared=shares)
    memory, seconds = estimate(settings, device, cards=per_host)
    refused = sharding_obstacles(settings, per_host)
    refused += shared_obstacles(settings, per_host, sharded=memory.cards > 1) if shares else []
    tokens = estimate.tokens(gpus if shares else 1)
    if split:
        memory, tokens, seconds = split.memory, split.tokens, split.seconds
    return Plan(
        settings=settings, shape=shape, device=device, fabric=fabric, tokens=tokens, memory=memory, seconds=seconds,
        split=split, alternative=estimate.split(settings, device, fabric, shared=not shares), price=price,
        worst=plan_memory(shape, settings, device, estimate.tokens(1).at_worst(), cards=memory.cards),
        ways=[] if memory.fits else _ways(estimate, device, fabric, shared=shares),
        faster=faster_ways(settings, device, tokens.longest, estimate) if memory.fits and gpus == 1 else [],
        obstacles=refused + find_obstacles(settings, shape, device, here=here),
        measured=measured if here and split is None and measured and measured.is_of(settings.model.name) else None,
        remarks=[*(measured.remarks_on(settings.model.name) if measured else []), *assumed, *started],
    )  # fmt: skip


def _as_started(
    settings: Settings, device: Device, num_gpus: int | None, nodes: int | None, network: float
) -> tuple[Settings, Fabric, list[str]]:
    """The GPUs, the settings with the engine that ``train`` takes there, and a remark if servers are not counted."""
    ranks = settings.training if device.is_gpu else TrainingSettings()
    fabric = Fabric.of(device, per_host=num_gpus or ranks.nproc, hosts=nodes or ranks.nnodes, gigabits=network)
    if fabric.gpus > MOST_GPUS:
        message = f"A plan covers at most {MOST_GPUS:,} GPUs, not {fabric.gpus:,}."
        raise UsageError(message, "Lower --num-gpus or --nodes.")
    if fabric.gpus == 1 or num_gpus is not None or nodes is not None:
        return settings, fabric, []
    if settings.agent.engine == "auto":
        agent = settings.agent.model_copy(update={"engine": "transformers"})
        return settings.model_copy(update={"agent": agent}), fabric, []
    remark = "EMAILRL_NPROC counts only trainers; name all GPUs, those of servers too, with --num-gpus and --nodes"
    return settings, fabric, [remark] * has_servers(settings)


def _ways(estimate: Estimator, device: Device, fabric: Fabric, *, shared: bool) -> list[Way]:
    """Changes that make a run fit, with the seconds of all GPUs."""
    settings, longest = estimate.settings, estimate.tokens(1).longest
    tried = estimate.on(fabric, shared=shared)
    wider = wider_engines(settings, device, fabric.per_host, tried) if shared else []
    return wider + ways_to_fit(settings, device, estimate.shape, longest, tried)
