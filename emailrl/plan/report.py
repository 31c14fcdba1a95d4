"""A plan as JSON values: memory in GiB, times in seconds."""

from __future__ import annotations

from typing import Any

from emailrl.plan import Plan
from emailrl.plan.cluster import Split
from emailrl.plan.gpus import GIB
from emailrl.plan.time import Seconds, scoring_passes
from emailrl.plan.ways import Way


def plan_json(plan: Plan) -> dict[str, Any]:
    """What ``emailrl plan --json`` prints."""
    lora, shape = plan.settings.lora, plan.shape
    return {
        "runs": plan.runs,
        "fits": plan.fits,
        "obstacles": [{"reason": one.reason, "remedy": one.remedy} for one in plan.obstacles],
        "verdict": plan.verdict,
        "model": {
            "name": plan.settings.model.name,
            "parameters": shape.parameters,
            "lora_parameters": shape.lora_parameters(lora.lora_rank, lora.target_modules),
        },
        "device": {"name": plan.device.name, "gib": round(plan.device.gib, 1), "num_gpus": plan.fabric.gpus},
        "memory": _memory(plan),
        "tokens": _tokens(plan),
        "seconds": _seconds(plan),
        "tokens_per_second": round(plan.tokens_per_second, 1),
        "split": None if plan.split is None else _split(plan.split),
        "alternative": None if plan.alternative is None else _split(plan.alternative),
        "price_per_gpu_hour": plan.price,
        "cost": None if plan.cost is None else round(plan.cost, 2),
        "ways": [_way(way) for way in plan.ways],
        "faster": [_way(way) for way in plan.faster],
        "notes": plan.notes,
    }


def _way(way: Way) -> dict[str, Any]:
    return {"change": way.text, "peak": _gib(way.peak), "run_seconds": round(way.run_seconds, 1)}


def _memory(plan: Plan) -> dict[str, Any]:
    memory = plan.memory
    parts = {"resident": memory.resident, "sampling": memory.sampling, "training": memory.training}
    peaks = {
        "sampling_peak": memory.sampling_peak,
        "training_peak": memory.training_peak,
        "peak": memory.peak,
        "usable": memory.usable,
        "worst_peak": plan.worst.peak,
    }
    return {
        **{phase: {name: _gib(size) for name, size in sizes.items()} for phase, sizes in parts.items()},
        **{name: _gib(size) for name, size in peaks.items()},
        "worst_fits": plan.worst.fits,
        "layers": memory.layout.layers,
        "kept": memory.keep.name.lower(),
        "micro_batch_tokens": memory.micro_batch_tokens,
        "cache_bytes_per_token": plan.shape.cache_bytes(memory.layout.itemsize),
        "cache_tokens": memory.cache_tokens,
        "cache_needs_tokens": memory.cache_needs,
        "trajectories_at_once": memory.at_once,
    }


def _tokens(plan: Plan) -> dict[str, Any]:
    tokens = plan.tokens
    return {
        "per_trajectory": tokens.per_trajectory,
        "longest": tokens.longest,
        "most_per_trajectory": tokens.most_per_trajectory,
        "source": tokens.source,
        "trainable_share": round(tokens.trainable_share, 4),
        "trajectories_per_step": tokens.trajectories,
        "per_step": tokens.per_step,
        "run": tokens.per_step * tokens.steps,
        "steps": tokens.steps,
        "epochs": round(tokens.epochs, 4),
        "questions": tokens.questions,
    }


def _seconds(plan: Plan) -> dict[str, Any]:
    seconds = plan.seconds
    return _phases(seconds) | {
        "evaluations": plan.tokens.evaluations,
        "confirmed": round(plan.tokens.confirmed, 4),
        "scoring_passes": scoring_passes(plan.settings),
        "utilization": round(seconds.utilization, 3),
        "measured": plan.measured.seconds if plan.measured else None,
        "run": round(plan.run_seconds, 1),
    }


def _phases(seconds: Seconds) -> dict[str, Any]:
    phases = {
        "rollout": seconds.rollout,
        "handover": seconds.handover,
        "score": seconds.score,
        "train": seconds.train,
        "gather": seconds.gather,
        "all_reduce": seconds.reduce,
        "step": seconds.step,
        "evaluation": seconds.evaluation,
    }
    return {name: round(value, 3) for name, value in phases.items()} | {"overlaps": seconds.overlaps}


def _split(split: Split) -> dict[str, Any]:
    return {
        "shared": split.shared,
        "trainers": split.trainers,
        "servers": split.servers,
        "tensor_parallel": split.tensor_parallel,
        "sharded_over": split.memory.cards,
        "sampling": round(split.sampling, 2),
        "playing": round(split.playing, 2),
        "seconds": _phases(split.seconds),
        "tokens_per_second": round(split.tokens_per_second, 1),
    }


def _gib(size: int) -> float:
    return round(size / GIB, 3)
