"""Estimate a run's memory, tokens, time and cost before launch, from the settings and a model's config alone. Needs no
torch, no weights and, for built-in shapes, no network. ``docs/evidence/performance.md`` lists the measurements that
validate the arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from emailrl.base.errors import UsageError
from emailrl.model.shape import find_shape
from emailrl.plan.advice import Obstacle, Way, faster_ways, find_obstacles, ways_to_fit
from emailrl.plan.devices import GIB, MEASURED, Cluster, Device, find_device, this_machine
from emailrl.plan.memory import Memory, plan_memory
from emailrl.plan.time import Use, one_of, split_of
from emailrl.plan.tokens import Job, Known, Measured, Tokens, limit_to_questions, measure_run
from emailrl.runs.log import duration
from emailrl.settings import Settings, TrainingSettings
from emailrl.settings.names import changed

__all__ = ["Known", "Measured", "Plan", "duration", "find_device", "make_plan", "measure_run", "this_machine"]

MOST_GPUS: Final = 1024


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run needs."""

    job: Job
    tokens: Tokens
    memory: Memory  # Of one trainer.
    worst: Memory  # With the longest trajectories that the settings allow.
    use: Use  # Of all GPUs, or if no split of several fits, of one with its own trajectories.
    split: Use | None  # The same, if several GPUs fit the run: which train and which serve, or that all do both.
    alternative: Use | None  # The same GPUs used the other way, if the run then fits.
    price: float | None  # Per GPU-hour.
    ways: list[Way]  # Changes that make the run fit, if it does not.
    faster: list[Way]  # Engines that would make a fitting run clearly faster.
    obstacles: list[Obstacle]  # What prevents the run from starting, regardless of memory.
    measured: Measured | None  # From a run of this model on this machine.
    remarks: list[str]  # On what was measured, and on the questions.

    @property
    def runs(self) -> bool:
        """Whether it fits and nothing prevents it from starting."""
        return self.fits and not self.obstacles

    @property
    def fits(self) -> bool:
        """Whether memory suffices: of one GPU, or of the trainers and servers on several."""
        return self.memory.fits and (self.split is not None or self.job.cluster.gpus == 1)

    @property
    def run_seconds(self) -> float:
        """Seconds of the run: as planned, or its steps and evaluations at a measured run's seconds for each."""
        measured, tokens = self.measured, self.tokens
        if measured is None:
            return self.use.run
        step, evaluation = measured.seconds["total"], measured.evaluation
        if evaluation is None:
            return tokens.steps * step
        training = tokens.steps * (step - measured.seconds["evaluation"])
        return training + (tokens.evaluations + tokens.confirmed) * evaluation

    @property
    def tokens_per_second(self) -> float:
        """Tokens of trajectories, including prompts and tool results."""
        return self.tokens.per_step / self.use.step

    @property
    def cost(self) -> float | None:
        return None if self.price is None else self._cost(self.run_seconds)

    def _cost(self, seconds: float) -> float:
        return (self.price or 0.0) * self.job.cluster.gpus * seconds / 3600

    @property
    def verdict(self) -> str:
        """One line: whether it can run and fits, or what to change."""
        memory, cluster = self.memory, self.job.cluster
        amounts = f"{memory.peak / GIB:.1f} of {cluster.device.gib:.0f} GiB"
        if self.fits or (memory.fits and self.obstacles):
            fits = f"fits: {amounts}"
        elif memory.fits:
            fits = f"does not fit: {cluster.gpus:,} GPUs are too few for a trainer and a server; use more"
        else:
            if memory.peak <= memory.usable:
                whose = "vLLM's share" if self.job.settings.vllm_in_process else "the KV cache"
                amounts = f"{whose} has room for {memory.cache_tokens:,} tokens of {memory.cache_needs:,}"
            elif memory.peak <= memory.device_bytes:
                amounts += f", {memory.usable / GIB:.1f} of them usable"
            fits = f"does not fit: {amounts}; {f'try {self.ways[0].text}' if self.ways else 'choose a smaller model'}"
        return f"cannot run: {'; '.join(map(str, self.obstacles))}; its memory {fits}" if self.obstacles else fits

    @property
    def notes(self) -> list[str]:
        """What the numbers are based on, and what they exclude."""
        device, split, worst, other = self.job.cluster.device, self.split, self.worst, self.alternative
        notes = list(self.remarks)
        if self.memory.layout.layers == "unsloth":
            notes.append("Unsloth's memory is fitted to two measured peaks, not derived")
        if device.note:
            notes.append(device.note)
        elif device.is_gpu and device.name != MEASURED:
            notes.append(f"times were measured on an {MEASURED} and scaled to the {device.name} by its data sheet")
        if self.memory.fits and not worst.fits:
            most, needs = self.tokens.most_per_trajectory, f"would need {worst.peak / GIB:.1f} GiB"
            if worst.peak <= worst.usable:
                needs = f"would be cut off at {worst.cache_tokens:,}, the size of the KV cache"
            notes.append(f"a trajectory of {most:,} tokens, the most MAX_TURNS and MAX_TOKENS allow, {needs}")
        if split is None and self.job.cluster.gpus > 1 and self.job.settings.has_servers:
            notes.append("memory and tokens are those of one trainer")
        if split is not None and split.trainers > 1:
            notes.append(
                f"a step has {self.tokens.trajectories:,} trajectories: PER_DEVICE_TRAIN_BATCH_SIZE is per rank; "
                "lower it to keep the batch"
            )
        if split is not None and split.rank_0_decides:
            notes.append("rank 0 runs all conversations with servers and is the bottleneck: more servers do not help")
        if other is not None:
            reached = f"{other.tokens_per_second:,.0f} tokens/s"
            if split is None:
                notes.append(f"{other} would fit, with {reached}")
            elif other.tokens_per_second > split.tokens_per_second:
                notes.append(f"{other} would reach {reached} instead of {split.tokens_per_second:,.0f}")
            elif split.shared:
                notes.append(f"{other} would reach only {reached}")
        for way in self.faster:
            now, then = self.run_seconds, way.run_seconds
            cost = f", and cost {self._cost(then):,.2f} instead of {self._cost(now):,.2f}" if self.price else ""
            notes.append(f"with {way.text} the run would take {duration(then)} instead of {duration(now)}{cost}")
        return [
            *notes,
            f"times exclude {'mailbox search, ' if split is None else ''}the judge, checkpoints and start-up",
        ]


def make_plan(
    settings: Settings,
    device: Device,
    *,
    num_gpus: int | None = None,
    nodes: int | None = None,
    network: float = 100.0,
    price: float | None = None,
    known: Known | None = None,
    here: bool = False,
) -> Plan:
    """Plan the run of ``settings`` on ``device``. With several GPUs (``num_gpus`` on each of ``nodes`` hosts,
    ``network`` Gbit/s between them) some train and the others are vLLM servers; with ENGINE=vllm or transformers and no
    VLLM_URLS, all train and sample in turn. Without ``num_gpus`` and ``nodes``, EMAILRL_NPROC and EMAILRL_NNODES count
    GPUs, each with a rank that trains. ``here``: the device is this machine. Then missing packages are reported and the
    measured run's seconds are used; elsewhere, and with several GPUs, only its token counts are. Raises UsageError or
    EmailRLError for unavailable shapes, conflicting settings, more than ``MOST_GPUS`` GPUs and questions that training
    refuses."""
    ranks, counts_ranks = settings.training if device.is_gpu else TrainingSettings(), not (num_gpus or nodes)
    cluster = Cluster(device, num_gpus or ranks.nproc, nodes or ranks.nnodes, network)
    if cluster.gpus > MOST_GPUS:
        raise UsageError(f"A plan covers at most {MOST_GPUS:,} GPUs.", "Lower --num-gpus or --nnodes.")
    known, remarks = known or Known(), []
    measured = known.measured
    if measured and measured.base_model and "name" not in settings.model.model_fields_set:
        settings = settings.with_model(measured.base_model)
    model = settings.model.name
    if measured and measured.base_model is None:
        remarks.append(f"no checkpoint of the run names its model: assuming {model}")
    elif measured and measured.differs_from(model):
        used = f"the run used {measured.base_model}, not {model}"
        remarks.append(f"{used}: its token counts apply, its times do not")
    settings, confirmed, assumed = limit_to_questions(settings)
    remarks += assumed
    if cluster.gpus > 1 and counts_ranks and settings.has_servers:
        remarks.append(
            "EMAILRL_NPROC counts only trainers; name all GPUs, those of servers too, with --num-gpus and --nnodes"
        )
    with_servers = {"engine": "vllm", "vllm_urls": settings.vllm.vllm_urls or "http://servers"}
    if cluster.gpus > 1:
        if counts_ranks and settings.agent.engine == "auto":
            settings = changed(settings, engine="transformers")  # as every rank of train does
        elif settings.agent.engine != "transformers" and not settings.vllm_in_process:
            settings = changed(settings, **with_servers)
    job = Job(find_shape(model), settings, cluster, replace(known, confirmed=confirmed))
    shared = not settings.has_servers
    in_turn = {"engine": "vllm", "vllm_urls": "", "max_staleness": None}
    split, one = split_of(job), one_of(job, cluster.per_host)
    memory = (split or one).memory
    tokens = split.tokens if split else job.tokens(cluster.gpus if shared else 1)
    longest = replace(job.tokens(), longest=job.tokens().most_per_trajectory)
    return Plan(
        job=job,
        tokens=tokens,
        memory=memory,
        worst=plan_memory(job, longest, cards=memory.cards),
        use=split or one,
        split=split,
        alternative=split_of(job.with_settings(**(with_servers if shared else in_turn))),
        price=price,
        ways=[] if memory.fits else ways_to_fit(job),
        faster=faster_ways(job) if memory.fits and cluster.gpus == 1 else [],
        obstacles=list(find_obstacles(job, sharded=one.memory.cards > 1, here=here)),
        measured=measured if here and split is None and measured and not measured.differs_from(model) else None,
        remarks=remarks,
    )
