"""What a run prints: its header, a line per step and a block per evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from emailrl.base.plain import counted
from emailrl.measure.evaluation import Evaluation
from emailrl.settings import Settings
from emailrl.training.mix import staleness
from emailrl.training.run.modes import MODES
from emailrl.training.run.state import RunState, num_epochs, questions_per_step

RULE = "=" * 60
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
RATES: Final = {"nano": 2e-3, "smol": 3e-4, "smol-base": 3e-4}
"""Measured learning rates (docs/guides/learning_rate.md)."""


def header(
    settings: Settings, *, run_dir: Path, num_train: int, num_eval: int, start: int, total: int, num_ranks: int = 1
) -> str:
    """The header of a run."""
    training = settings.training
    per_step = questions_per_step(training, num_ranks)
    epochs = num_epochs(total, per_step, num_train)
    on_ranks = f" | ranks: {num_ranks}" if num_ranks > 1 else ""
    return "\n".join(
        (
            RULE,
            f"Resuming at step {start} of {total}" if start else f"Starting training: {counted(total, 'step')}",
            f"Mode: {training.mode} ({MODES[training.mode].summary})",
            f"Model: {settings.model.name} | algorithm: {training.algorithm}{_sampling(settings)}",
            f"Train questions: {num_train} | eval questions: {num_eval}",
            f"Rollouts per question: {training.num_generations} | questions per step: {per_step}{on_ranks}"
            f" | {total} step{'s are' if total != 1 else ' is'} {epochs:.2g} epochs",
            f"KL reference: {_reference(settings)}",
            f"Target accuracy: {settings.evaluation.target_accuracy:.1%}",
            f"Output: {run_dir}",
            RULE,
        )
    )


def _reference(settings: Settings) -> str:
    wanted = settings.algorithm
    if not wanted.beta:
        return "none (BETA=0)"
    return "the adapter as it was at the start" if wanted.reference == "start" else "the base model"


def _sampling(settings: Settings) -> str:
    """The servers that sample, and how far ahead, if they do."""
    servers = [url for url in settings.vllm.vllm_urls.split(",") if url.strip()] if settings.has_servers else []
    steps = staleness(settings)
    ahead = f", up to {counted(steps, 'step')} ahead of training" if steps else ""
    return f" | rollouts on {counted(len(servers), 'vLLM server')}{ahead}" if servers else ""


def duration(seconds: float) -> str:
    """A human-readable duration: 90 s, 12 min, 3.4 h, 5.1 days."""
    for length, most, unit in ((1, 120, "s"), (60, 7200, "min"), (3600, 172_800, "h")):
        if seconds < most:
            return f"{seconds / length:.{0 if length < 3600 else 1}f} {unit}"
    return f"{seconds / 86_400:.1f} days"


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


def outcome(state: RunState, reason: str, num_eval: int, settings: Settings) -> str:
    """The result of a run that ended for ``reason``."""
    best, interval, step = state.best_accuracy, state.best_interval, state.best_step
    if best is None or interval is None:
        said = "No evaluation selected a best_model"
    elif best == 0:
        said = f"No evaluation had a correct answer; best_model is from step {step}"
    else:
        said = (
            f"Best accuracy {percent(best, interval)} at step {step}, on the"
            f" {counted(num_eval, 'validation question')} that selected best_model"
        )
        if step == 0 < state.step:
            said += "; best_model has the weights of the start"
    lines = [f"Done after step {state.step}: {reason}. {said}."]
    if 0 < state.step == state.steps_without_update:
        kept = "final has" if best is None else "best_model and final have"
        lines.append(
            f"Nothing was learned: {counted(state.step, 'step')} without an update, so {kept} the weights of the start."
            " The step lines say why; if the rewards of each group are equal, raise --temperature, or start with"
            " emailrl sft (docs/guides/troubleshooting.md)."
        )
    elif state.learned_nothing and not best:
        lines.append(
            f"Nothing was learned in {counted(state.step, 'step')}: start with emailrl sft, or with a stronger model or"
            " an easier mailbox (docs/guides/troubleshooting.md)."
        )
    elif state.learned_nothing:
        model, rate = settings.model.name, settings.training.learning_rate
        higher = max(RATES.get(model, 0), rate)
        lines.append(
            f"Nothing was learned: every evaluation in {counted(state.step, 'step')} had the same {best:.1%} correct."
            f" The learning rate {rate:g} is probably too small for {model}: try --learning-rate"
            f" {higher if higher > rate else 10 * rate:g} (docs/guides/learning_rate.md)."
        )
    return "\n".join(lines)


def complete(*, skipped: Sequence[str]) -> str:
    """The line of a run that was interrupted after its last step."""
    return f"The run is complete and saved{'; skipped: ' * bool(skipped)}{' and '.join(skipped)}."


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
