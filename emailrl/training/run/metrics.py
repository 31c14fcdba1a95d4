"""Metrics of one step: its object in ``metrics.jsonl``, and what training adds to its trajectories."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from emailrl.measure.evaluation import Evaluation, disagreement, is_correct, is_judged, mean, rubric_means
from emailrl.records import Record
from emailrl.records.trajectory import StopReason, Trajectory
from emailrl.training.batch import TrainingSample, is_truncated
from emailrl.training.losses import LOG_RATIO_LIMIT
from emailrl.training.run.filtering import Collected
from emailrl.training.update import TokenNumbers

UPDATE_METRICS = (
    "loss",
    "policy_loss",
    "kl_loss",
    "kl",
    "kl_coef",
    "clip_fraction",
    "entropy",
    "grad_norm",
    "learning_rate",
)
"""Null in a step without an update; ``kl_loss`` is the KL term of the loss, null if the loss has none."""

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
"""Means over a step's rollouts; those about answers cover only attempts (null if there were none)."""

UNANSWERED = frozenset(StopReason) - {StopReason.ANSWERED, StopReason.COMPLETED, StopReason.EXCEPTION}
"""Ways to end without an answer, other than "I don't know"."""


class Clock:
    """Seconds of one step by phase."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()
        self.phases: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block under ``name``; a phase entered twice adds up."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - begun

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase so far, and ``total``."""
        return self.phases | {"total": time.perf_counter() - self._begun}


class Pace:
    """Time of this process's steps so far, including evaluations and checkpoints."""

    def __init__(self, step: int) -> None:
        self._begun = time.perf_counter()
        self._first = step

    def seconds_left(self, step: int, total: int) -> float:
        """Seconds until ``total`` steps are done, at the mean pace up to ``step``."""
        return (time.perf_counter() - self._begun) / (step - self._first) * (total - step)


def rollout_metrics(collected: Collected) -> dict[str, Any]:
    """Metrics of the step's rollouts; means are over those that did not raise, ``accuracy`` over those judged.

    Dropped groups count too: keeping only the others would measure the filter, not the policy.
    """
    trajectories = [trajectory for group in collected.groups for trajectory in group.trajectories]
    completed = [trajectory for trajectory in trajectories if trajectory.exception is None]
    rewards = [trajectory.reward for trajectory in completed]
    rubric = rubric_means(completed)
    return {
        "accuracy": mean([float(is_correct(each)) for each in trajectories if is_judged(each)]),
        "reward_mean": mean(rewards),
        "reward_std": statistics.stdev(rewards) if len(rewards) > 1 else None,
        "reward_median": statistics.median(rewards) if rewards else None,
        "reward_min": min(rewards, default=None),
        "reward_max": max(rewards, default=None),
        "unanswered": mean([float(is_unanswered(each)) for each in completed]),
        **{name: rubric.get(name) for name in RUBRIC_METRICS},
        **disagreement(completed),
        "num_trajectories": len(trajectories),
        "groups_kept": len(collected.kept),
        "refill_rounds": collected.refill_rounds,
        "trajectories_broken": sum(len(trajectory.samples) > 1 for trajectory in trajectories),
        "exceptions": len(trajectories) - len(completed),
        "duration": mean([trajectory.seconds for trajectory in completed]),
    }


def is_unanswered(trajectory: Trajectory) -> bool:
    """Whether it ended with "I don't know", out of turns or tokens, or with a malformed call."""
    return trajectory.stop_reason in UNANSWERED or bool(trajectory.rubric.get("returned_i_dont_know"))


def policy_ages(collected: Collected, step: int) -> dict[str, Any]:
    """The policy steps that the rollouts were sampled from, and their lag behind ``step``."""
    stamps = [each.policy_version for group in collected.groups for each in group.trajectories if each.policy_version]
    versions = [int(stamp.removeprefix("v-")) for stamp in stamps]
    return {
        "policy_version_min": min(versions, default=None),
        "policy_version_max": max(versions, default=None),
        "policy_age_mean": mean([float(step - version) for version in versions]),
        "policy_age_max": step - min(versions) if versions else None,
    }


def update_metrics(update: Mapping[str, float]) -> dict[str, Any]:
    """Metrics of the update, ``UPDATE_METRICS`` first; without an update nothing was trained."""
    trainable, total = update.get("trainable_tokens", 0), update.get("total_tokens", 0)
    share = trainable / total if total else None
    named: dict[str, Any] = dict.fromkeys(UPDATE_METRICS)
    return named | {"trainable_tokens": trainable, "total_tokens": total, "trainable_share": share} | dict(update)


def evaluation_metrics(evaluation: Evaluation | None) -> dict[str, Any]:
    """An evaluation's numbers, prefixed ``eval_``; empty for a step without one."""
    return {f"eval_{name}": value for name, value in evaluation.metrics().items()} if evaluation else {}


def training_records(
    collected: Collected,
    samples: Sequence[TrainingSample],
    tokens: Sequence[TokenNumbers],
    *,
    mask_truncated: bool,
) -> Iterator[Record]:
    """What training adds to each trajectory of a step, by id: its tokens' numbers, or why it was dropped.

    ``tokens`` correspond to ``samples``. ``advantage`` is shared by all trained tokens; if they differ it is null, and
    each sequence lists its own.
    """
    trained: dict[str, list[Record]] = defaultdict(list)
    for sample, numbers in zip(samples, tokens, strict=True):
        trained[sample.trajectory_id].append(sample_record(sample, numbers))
    for group in collected.groups:
        for trajectory in group.trajectories:
            dropped: str | None = collected.reasons.get(group.id)
            if trajectory.exception is not None:
                dropped = "exception"
            elif dropped is None and mask_truncated and is_truncated(trajectory):
                dropped = "truncated"
            records = trained[trajectory.id]
            advantages = {each for record in records for each in record["advantages"] if each is not None}
            if len(advantages) == 1:
                for record in records:
                    del record["advantages"]
            yield {
                "id": trajectory.id,
                "group_id": group.id,
                "advantage": advantages.pop() if len(advantages) == 1 else None,
                "dropped": dropped,
                "samples": records,
            }


def sample_record(sample: TrainingSample, numbers: TokenNumbers) -> Record:
    """One trained sequence: lists with one entry per token, null where the mode's mask is 0.

    ``ratio`` is exp(log-probability in the last pass - old one), bounded as in the loss: 1 where a step makes one
    update.
    """

    def trained(values: Iterable[float]) -> list[float | None]:
        return [value if on else None for value, on in zip(values, sample.loss_mask, strict=True)]

    gaps = (new - old for new, old in zip(numbers.logprobs, numbers.old_logprobs, strict=True))
    return {
        "loss_mask": sample.loss_mask,
        "old_logprobs": trained(numbers.old_logprobs),
        "ratio": trained(math.exp(max(min(gap, LOG_RATIO_LIMIT), -LOG_RATIO_LIMIT)) for gap in gaps),
        "advantages": trained(numbers.advantages),
    }


def first_exception(trajectories: Sequence[Trajectory]) -> str | None:
    """The first trajectory's exception if every one raised, else None."""
    if trajectories and all(trajectory.exception is not None for trajectory in trajectories):
        return trajectories[0].exception
    return None
