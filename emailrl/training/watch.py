"""Signs of policy collapse: each is reported once, with a remedy and the way back, until it has passed.

Every sign has a severity: an alarm from 1, over below ``PASSED``, so that a value that hovers around its threshold
warns once. ``docs/reference/rewards.md`` explains the thresholds.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from emailrl.checkpoints import list_checkpoints
from emailrl.measure.evaluation import mean
from emailrl.training.state import RunState

WATCHED = ("accuracy", "unanswered", "entropy", "kl", "answer_words", "answer_candidates")
"""The metrics of a step that the signs are computed from."""

WINDOW = 5
"""Steps over which a level is averaged."""
UNANSWERED_SHARE = 0.9
"""Share of rollouts that end without an answer."""
LOWEST_ENTROPY = 0.002
"""Nats per trained token: two rollouts of 50 tokens are then identical with probability e^-0.1 = 90 % or more."""
HIGHEST_KL = 1.0
"""Nats per trained token."""
TIMES_KL_TARGET = 5
"""With KL_TARGET, the highest KL as a multiple of it."""

GROWTH_WINDOW = 10
"""Steps at each end of ``HISTORY`` that are compared to measure growth."""
HISTORY = 40
GROWTH = 1.5
LEAST_GROWTH = {"answer_words": 5.0, "answer_candidates": 0.5}
"""Minimum absolute growth: from one word to two is no sign."""
ACCURACY_ROSE = 0.02
"""Answers may grow if accuracy rises by more than this."""

PASSED = 0.75

Steps = Sequence[Mapping[str, float | None]]
"""The watched metrics of the last steps, oldest first; None if a step lacks the number."""


@dataclass(frozen=True, slots=True)
class Sign:
    """The severity of one sign."""

    cause: str
    severity: float
    warning: str
    window: int = WINDOW


@dataclass(frozen=True, slots=True)
class Alarm:
    """A sign that has just reached its threshold."""

    warning: str
    good_step: int | None
    """A step from before it began; None if none is remembered."""


def watch(state: RunState, metrics: Mapping[str, float | None], kl_target: float | None) -> list[Alarm]:
    """Record the last step's metrics in ``state``; return new alarms."""
    state.watched = [*state.watched, {name: metrics.get(name) for name in WATCHED}][-HISTORY:]
    alarms = []
    for sign in signs(state.watched, kl_target):
        if sign.cause in state.collapsing:
            if sign.severity < PASSED:
                state.collapsing.remove(sign.cause)
        elif sign.severity >= 1:
            state.collapsing.append(sign.cause)
            alarms.append(Alarm(sign.warning, _good_step(sign, state, kl_target)))
    return alarms


def signs(steps: Steps, kl_target: float | None) -> list[Sign]:
    """Every sign that the last steps allow to compute."""
    return [*_levels(steps, kl_target), *_growth(steps)]


def way_back(run_dir: Path, good_step: int | None) -> str:
    """The command that resumes from the last checkpoint up to ``good_step``, or else from the best."""
    checkpoints = list_checkpoints(run_dir)
    kept = [item for item in checkpoints if good_step is not None and item.metadata.step <= good_step]
    best = [item for item in checkpoints if item.metadata.kind == "best"]
    if not kept and not best:
        return "No earlier checkpoint is left: make that change and start a new run."
    chosen = (kept or best)[-1]
    where = " (before this)" if kept else " (the best; no earlier one is left)"
    return (
        f"Make that change and return to step {chosen.metadata.step}{where}:"
        f" emailrl train --resume {shlex.quote(str(chosen.path))} --overwrite"
    )


def _levels(steps: Steps, kl_target: float | None) -> list[Sign]:
    found = []
    if (unanswered := _level(steps, "unanswered")) is not None:
        warning = (
            f'{unanswered:.0%} of rollouts end without an answer ("I don\'t know", or out of turns), which the art_e'
            " reward pays more than answering with less than about 37 % accuracy: lower REWARD_NO_ANSWER or"
            " LEARNING_RATE, use easier questions or start with emailrl sft (docs/reference/rewards.md)."
        )
        found.append(Sign("unanswered", unanswered / UNANSWERED_SHARE, warning))
    if (entropy := _level(steps, "entropy")) is not None:
        warning = (
            f"the policy's entropy is {entropy:.4f} nats per token: a question's rollouts are nearly identical and"
            " teach nothing; raise ENTROPY_COEF or TEMPERATURE, or lower LEARNING_RATE."
        )
        found.append(Sign("entropy", LOWEST_ENTROPY / max(entropy, 1e-12), warning))
    if (kl := _level(steps, "kl")) is not None:
        limit = TIMES_KL_TARGET * kl_target if kl_target else HIGHEST_KL
        warning = (
            f"the KL to the reference policy is {kl:.3g} nats per token, above {limit:g}:"
            " raise BETA or lower LEARNING_RATE."
        )
        found.append(Sign("kl", kl / limit, warning))
    return found


def _level(steps: Steps, name: str) -> float | None:
    """Mean of the last ``WINDOW`` steps that have the number; None if there are fewer."""
    values = [value for step in steps if (value := step[name]) is not None]
    return mean(values[-WINDOW:]) if len(values) >= WINDOW else None


def _growth(steps: Steps) -> list[Sign]:
    """Answers that get longer or offer more while accuracy does not rise; 0 if there are too few steps to tell."""
    early, late = steps[:GROWTH_WINDOW], steps[-GROWTH_WINDOW:]
    accuracy = [_average(part, "accuracy") for part in (early, late)]
    found = []
    for name, what in (("answer_words", "words"), ("answer_candidates", "candidates")):
        before, after = _average(early, name), _average(late, name)
        severity = 0.0
        if len(steps) >= 2 * GROWTH_WINDOW and accuracy[1] - accuracy[0] <= ACCURACY_ROSE and before > 0:
            severity = min(after / before / GROWTH, (after - before) / LEAST_GROWTH[name])
        warning = (
            f"answers grew from {before:.1f} to {after:.1f} {what} in {len(steps)} steps while accuracy did not rise"
            f" ({accuracy[0]:.0%}, {accuracy[1]:.0%}): read some (emailrl inspect-trajectory); if they game the check,"
            " set EMAILRL_JUDGE=llm or use a reward that penalizes it (docs/guides/custom.md)."
        )
        found.append(Sign(name, severity, warning, GROWTH_WINDOW))
    return found


def _average(steps: Steps, name: str) -> float:
    return mean([value for step in steps if (value := step[name]) is not None]) or 0.0


def _good_step(alarm: Sign, state: RunState, kl_target: float | None) -> int | None:
    """The step before the whole window in which the sign was last below ``PASSED``: a mean lags behind a change."""
    for back in range(1, len(state.watched)):
        earlier = signs(state.watched[:-back], kl_target)
        if all(sign.severity < PASSED for sign in earlier if sign.cause == alarm.cause):
            return max(0, state.step - back - (alarm.window - 1))
    return None
