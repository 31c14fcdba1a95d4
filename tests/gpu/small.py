"""Samples for a small random policy, and an updater that moves weights by their gradient."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emailrl.model.policy import load_policy
from emailrl.settings import load_settings
from emailrl.training.algorithms import resolve
from emailrl.training.batch import TrainingSample
from emailrl.training.team import build_updater
from emailrl.training.update import Updater


def make_samples(count: int, shortest: int, longest: int, *, seed: int = 0) -> list[TrainingSample]:
    """Trajectories of random ids, four a group, a quarter of the tokens trained in spans of 20."""
    draw = random.Random(seed)
    samples = []
    for i in range(count):
        length = draw.randrange(shortest, longest)
        mask = [int(t > 40 and (t // 20) % 4 == 3) for t in range(length - 1)] + [1]
        ids = [draw.randrange(300, 2000) for _ in range(length)]
        logprobs = [-8.0 if on else None for on in mask]
        samples.append(TrainingSample(f"t{i}", f"g{i // 4}", ids, mask, logprobs))
    return samples


def paid(samples: list[TrainingSample]) -> dict[str, float]:
    return {one.trajectory_id: random.Random(one.trajectory_id).uniform(-1, 1) for one in samples}


def make_updater(folder: Path, **changes: Any) -> Updater:
    """An updater whose adapter has moved; it descends plainly, so that a step moves weights by their gradient."""
    given = {"model_name": str(folder), "lora_rank": 8, "lora_dropout": 0.0, "temperature": 1.0}
    given |= {"learning_rate": 1e-2, "warmup_steps": 0, "max_grad_norm": 0, "beta": 0.0}
    settings = load_settings(given | changes, environ={}, cwd=folder)
    updater = build_updater(load_policy(settings, trainable=True), settings, resolve(settings))
    generator = torch.Generator().manual_seed(5)
    for parameter in updater.parameters:
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator).to(parameter.device)
    updater.optimizer = torch.optim.SGD(updater.parameters, lr=1.0)
    return updater


def weights(updater: Updater) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in updater.parameters]


def distance(left: list[Tensor], right: list[Tensor]) -> float:
    """‖left − right‖ / ‖right‖ over all of it."""
    gap = sum(float((one - other).double().square().sum()) for one, other in zip(left, right, strict=True))
    return (gap / sum(float(other.double().square().sum()) for other in right)) ** 0.5


def moved(before: list[Tensor], after: list[Tensor]) -> list[Tensor]:
    return [new - old for new, old in zip(after, before, strict=True)]
