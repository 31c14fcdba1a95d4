"""One step in numbers: the object that ``metrics.jsonl`` holds for it, and what training adds to its trajectories."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from emailrl.evaluation import Evaluation, disagreement, is_correct, is_judged, mean, rubric_means
from emailrl.recording import Record
from emailrl.training.losses import LOG_RATIO_LIMIT
from emailrl.training.run.filtering import Collected
from emailrl.training.step.samples import TrainingSample, is_truncated
from emailrl.trajectory import Trajectory

UPDATE_METRICS = ("loss", "policy_loss", "kl", "kl_coef", "clip_fraction", "entropy", "grad_norm", "learning_rate")
"""Null in a step without an update."""

RUBRIC_METRICS = (
    "answer_correct",
    "returned_i_dont_know",
    "sources_correct",
    "num_sources",
    "num_turns",
    "answer_words",
    "answer_candidates",
    "answer_capitals",
)
"""Means of a step's rollouts; of the answers' looks, over those that attempted one (null where none did)."""


class Clock:
    """Seconds of one step by phase."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()
        self._phases: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block under ``name``; a phase entered twice adds up."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._phases[name] = self._phases.get(name, 0.0) + time.perf_counter() - begun

    def seconds(self) -> dict[str, float]:
        """Each phase so far and ``total``."""
        return self._phases | {"total": time.perf_counter() - self._begun}


class Pace:
    """What the steps of this process have taken so far, evaluations and checkpoints included."""

    def __init__(self, step: int) -> None:
        self._begun = time.perf_counter()
        self._first = step

    def seconds_left(self, step: int, total: int) -> float:
        """Seconds until ``total`` steps are done at the mean pace of those up to ``step``."""
        return (time.perf_counter() - self._begun) / (step - self._first) * (total - step)


def rollout_metrics(collected: Collected) -> dict[str, Any]:
    """What the step's rollouts were worth; means are over those that did not raise, ``accuracy`` is over those judged.

    Groups that were dropped count as the others do: what is kept says what was asked for, not how good the policy is.
    """
    trajectories = [trajectory for group in collected.groups for trajectory in group.trajectories]
    whole = [trajectory for trajectory in trajectories if trajectory.exception is None]
    rewards = [trajectory.reward for trajectory in whole]
    rubric = rubric_means(whole)
    return {
        "accuracy": mean([float(is_correct(each)) for each in trajectories if is_judged(each)]),
        "reward_mean": mean(rewards),
        "reward_std": statistics.stdev(rewards) if len(rewards) > 1 else None,
        "reward_median": statistics.median(rewards) if rewards else None,
        "reward_min": min(rewards, default=None),
        "reward_max": max(rewards, default=None),
        **{name: rubric.get(name) for name in RUBRIC_METRICS},
        **disagreement(whole),
        "num_trajectories": len(trajectories),
        "groups_kept": len(collected.kept),
        "refill_rounds": collected.refill_rounds,
        "trajectories_broken": sum(len(trajectory.samples) > 1 for trajectory in trajectories),
        "exceptions": len(trajectories) - len(whole),
        "duration": mean([trajectory.seconds for trajectory in whole]),
    }


def update_metrics(update: Mapping[str, float]) -> dict[str, Any]:
    """What the update did, the names of ``UPDATE_METRICS`` first; without an update nothing was trained."""
    trainable, total = update.get("trainable_tokens", 0), update.get("total_tokens", 0)
    share = trainable / total if total else None
    named: dict[str, Any] = dict.fromkeys(UPDATE_METRICS)
    return named | {"trainable_tokens": trainable, "total_tokens": total, "trainable_share": share} | dict(update)


def evaluation_metrics(evaluation: Evaluation | None) -> dict[str, Any]:
    """An evaluation's numbers with ``eval_`` before their names; nothing in a step without one."""
    return {f"eval_{name}": value for name, value in evaluation.metrics().items()} if evaluation else {}


def training_records(
    collected: Collected,
    advantages: Mapping[str, float],
    noted: Mapping[str, Sequence[Record]],
    *,
    mask_truncated: bool,
) -> Iterator[Record]:
    """What training adds to each trajectory of a step, under the same ids: its advantage or why it was dropped.

    ``noted`` has the trained samples' lists by trajectory id (see ``sample_record``).
    """
    for group in collected.groups:
        for trajectory in group.trajectories:
            dropped: str | None = collected.reasons.get(group.id)
            if trajectory.exception is not None:
                dropped = "exception"
            elif dropped is None and mask_truncated and is_truncated(trajectory):
                dropped = "truncated"
            yield {
                "id": trajectory.id,
                "group_id": group.id,
                "advantage": advantages.get(trajectory.id),
                "dropped": dropped,
                "samples": list(noted.get(trajectory.id, ())),
            }


def sample_record(
    sample: TrainingSample, old_logprobs: Sequence[float], logprobs: Sequence[float], advantages: Sequence[float]
) -> Record:
    """One trained sequence: lists as long as its tokens, null where the mask of the mode is 0.

    ``ratio`` is exp(log-probability in the last pass - old one), bounded as in the loss: 1 where a step makes one
    update. ``advantages`` stands where tokens differ from their trajectory, whose number under gae is its reward.
    """
    trained = sample.loss_mask
    olds = [old if on else None for old, on in zip(old_logprobs, trained, strict=True)]
    gaps = (new - old for new, old in zip(logprobs, old_logprobs, strict=True))
    ratios = [
        math.exp(max(min(gap, LOG_RATIO_LIMIT), -LOG_RATIO_LIMIT)) if on else None
        for gap, on in zip(gaps, trained, strict=True)
    ]
    worth = [advantage if on else None for advantage, on in zip(advantages, trained, strict=True)]
    shaped = not all(each is None or math.isclose(each, sample.advantage, rel_tol=1e-6) for each in worth)  # float32
    record: Record = {"loss_mask": trained, "old_logprobs": olds, "ratio": ratios}
    return record | ({"advantages": worth} if shaped else {})


def first_exception(trajectories: Sequence[Trajectory]) -> str | None:
    """The exception of the first trajectory where every one raised; None where any did not."""
    if trajectories and all(trajectory.exception is not None for trajectory in trajectories):
        return trajectories[0].exception
    return None
