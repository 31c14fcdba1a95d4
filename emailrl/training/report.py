"""What a run reports of its steps and evaluations: the metrics of a step, and lines for the console."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from emailrl.measure.evaluation import Evaluation, disagreement, is_correct, is_judged, mean, rubric_means
from emailrl.records import Record
from emailrl.records.trajectory import StopReason, Trajectory
from emailrl.runs.log import duration
from emailrl.training.batch import TrainingSample, is_truncated
from emailrl.training.losses import LOG_RATIO_LIMIT
from emailrl.training.rollouts import Collected
from emailrl.training.state import RunState
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


# -- lines ---

DROPPED: Final = {
    "trajectories_exception": ("trajectory", "trajectories", "failed"),
    "groups_too_small": ("group", "groups", "too small"),
    "groups_low_std": ("group", "groups", "with nearly equal rewards"),
    "groups_below_range": ("group", "groups", "too hard"),
    "groups_above_range": ("group", "groups", "too easy"),
    "trajectories_truncated": ("trajectory", "trajectories", "cut off"),
    "samples_nothing_trainable": ("sample", "samples", "without trainable tokens"),
}
"""Why something was dropped (``dropped`` in ``metrics.jsonl``), in words."""


def step_line(metrics: Mapping[str, Any], total: int, seconds_left: float = 0.0) -> str:
    """One step on one line, with the time left; missing numbers are dashes.

    Loss is the sum of Policy and the weighted KL, unless the algorithm adds an entropy bonus or a critic's loss.
    """

    def shown(name: str, form: str) -> str:
        value = metrics.get(name)
        return "-" if value is None else format(value, form)

    in_loss = metrics.get("kl_loss") is not None or metrics.get("kl") is None
    parts = [
        f"Step {metrics['step']}/{total}",
        f"Loss: {shown('loss', 'z.4f')}",
        f"Policy: {shown('policy_loss', 'z.4f')}",
        f"KL: {shown('kl_loss', 'z.4f')}" if in_loss else f"KL in the reward: {shown('kl', 'z.4f')}",
        f"Reward: {shown('reward_mean', 'z.3f')}",
        f"Acc: {shown('accuracy', '.1%')}",
        f"Trainable tokens: {metrics['trainable_tokens']}/{metrics['total_tokens']}"
        f" ({shown('trainable_share', '.1%')})",
        f"{metrics['seconds']['total']:.1f} s",
    ]
    if seconds_left:
        parts.append(f"about {duration(seconds_left)} left")
    if dropped := {reason: count for reason, count in metrics["dropped"].items() if count}:
        parts.append("Dropped: " + ", ".join(_in_words(*item) for item in dropped.items()))
    return " | ".join(parts)


def _in_words(reason: str, count: int) -> str:
    one, many, why = DROPPED[reason]
    return f"{count} {one if count == 1 else many} {why}"


def percent(accuracy: float, interval: tuple[float, float]) -> str:
    """An accuracy with its 95% interval."""
    low, high = interval
    return f"{accuracy:.1%} (95% interval {low:.1%} to {high:.1%})"


def evaluation_block(evaluation: Evaluation, state: RunState, *, is_best: bool) -> str:
    """An evaluation's results, compared with the best so far, which ``state`` already includes."""
    low, high = evaluation.interval
    reward = "-" if evaluation.reward is None else f"{evaluation.reward:.3f}"
    turns = evaluation.rubric.get("num_turns")
    lines = [
        "=== Benchmark Results ===",
        f"Average reward: {reward} | turns: {'-' if turns is None else f'{turns:.1f}'}"
        f" | exceptions: {evaluation.exceptions}",
        f"Eval accuracy: {evaluation.accuracy:.1%}"
        f" ({evaluation.num_correct} of {evaluation.num_judged}, 95% interval {low:.1%} to {high:.1%})",
    ]
    if (sources := evaluation.rubric.get("sources_correct")) is not None:
        lines.append(f"Correct sources: {sources:.1%}")
    if evaluation.unjudged:
        void = "so this evaluation does not count for the best model, patience or target."
        lines.append(
            f"{evaluation.unjudged} of {len(evaluation.trajectories)} answers have no verdict, "
            + (void if evaluation.is_void else "and are excluded from the accuracy.")
        )
    if state.best_accuracy == 0:
        lines.append(f"No correct answer yet; best_model stays at step {state.best_step} until there is one")
    elif is_best:
        lines.append(f"New best accuracy: {evaluation.accuracy:.1%}")
    elif state.best_accuracy is not None and state.best_interval is not None:
        best = percent(state.best_accuracy, state.best_interval)
        lines.append(f"Best accuracy so far: {best} at step {state.best_step}")
    return "\n".join(lines)
