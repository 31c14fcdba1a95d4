"""Estimate a run's memory, tokens, time and cost before launch, from the settings and a model's config alone. Needs no
torch, no weights and, for built-in shapes, no network. ``docs/evidence/performance.md`` lists the measurements that
validate the arithmetic. What to do about a plan, too: obstacles to starting
the run, changes that make it fit, and engines that make it faster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from typing import Final, NamedTuple

from emailrl.base.errors import UsageError
from emailrl.base.install import how
from emailrl.base.plain import counted, duration
from emailrl.model.layout import GPU_SIZED
from emailrl.model.shape import KNOWN, find_shape
from emailrl.plan.devices import DEVICES, GIB, MEASURED, Cluster, Device, driver_gpus, find_device, this_machine
from emailrl.plan.memory import Memory, plan_memory
from emailrl.plan.time import Use, one_of, split_of, whole_of
from emailrl.plan.tokens import Job, Known, Measured, Tokens, limit_to_questions, measure_run
from emailrl.settings import Settings, TrainingSettings
from emailrl.settings.names import by_name, changed

__all__ = ["Known", "Measured", "Plan", "duration", "find_device", "make_plan", "measure_run", "this_machine"]

MOST_GPUS: Final = 1024
SMALLEST_BATCH: Final = 1024
WINDOW_STEP: Final = 1024
SHARES: Final = tuple(percent / 100 for percent in range(20, 95, 5))  # Share of the GPU's memory for vLLM.
QWEN3: Final = ("32B", "14B", "8B", "4B", "1.7B", "0.6B")
CLEARLY: Final = 0.8  # Maximum share of the planned time at which another engine is worth suggesting.
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


@dataclass(frozen=True, slots=True)
class Plan:
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
        return self.tokens.per_step / self.use.step

    @property
    def cost(self) -> float | None:
        return None if self.price is None else self._cost(self.run_seconds)

    def _cost(self, seconds: float) -> float:
        return (self.price or 0.0) * self.job.cluster.gpus * seconds / 3600

    @property
    def verdict(self) -> str:
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
            rule = "PER_DEVICE_TRAIN_BATCH_SIZE is per rank; lower it to keep the batch"
            notes.append(f"a step has {self.tokens.trajectories:,} trajectories: {rule}")
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
        mailbox = "mailbox search, " if split is None else ""
        return [*notes, f"times exclude {mailbox}the judge, checkpoints and start-up"]


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
    measured run's seconds are used; elsewhere, and with several GPUs, only its token counts are. UsageError or
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
        remarks.append("EMAILRL_NPROC counts only trainers; name all GPUs, servers' too, with --num-gpus and --nnodes")
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
        yield Obstacle("vllm is not installed here", f"{how('vllm')}; VLLM_URLS, or --engine transformers")
    if on_gpu and each > 1 and each > (found := len(driver_gpus())):
        yield Obstacle(f"VLLM_TENSOR_PARALLEL_SIZE is {each}, but this machine has {counted(found, 'GPU')}", "lower it")
    if on_gpu and model.backend == "unsloth" and find_spec("unsloth") is None:
        yield Obstacle("unsloth is not installed here", f"{how('unsloth')}; or --backend transformers")
    if on_gpu and model.load_in_4bit and find_spec("bitsandbytes") is None:
        yield Obstacle("bitsandbytes, which LOAD_IN_4BIT needs, is not installed here", how("bitsandbytes"))
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
