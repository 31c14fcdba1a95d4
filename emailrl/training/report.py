"""What a run reports: metrics, lines for the console, its outcome and curves, and signs of policy collapse. Each sign
is reported once, with a remedy and the way back, until it has passed: its severity is an alarm from 1, over below
``PASSED``, so that a value that hovers around its threshold warns once (docs/reference/rewards.md)."""

from __future__ import annotations

import io
import math
import shlex
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from emailrl.base.disk import replace_bytes
from emailrl.base.plain import counted, duration
from emailrl.checkpoints import list_checkpoints
from emailrl.measure.evaluation import Evaluation, disagreement, is_correct, is_judged, mean, rubric_means
from emailrl.records import Record, read_records
from emailrl.records.trajectory import StopReason
from emailrl.settings import PolicySettings
from emailrl.training.algorithms import MEASURED_RATES
from emailrl.training.batch import TrainingSample, is_truncated
from emailrl.training.losses import LOG_RATIO_LIMIT
from emailrl.training.state import Collected, RunState
from emailrl.training.update import TokenNumbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIRST, FAINT = "#0b6a72", "#7f8891"
"""Colors that stay distinct in grayscale and for color-blind readers, on the figures' own white background."""
IN_THE_DARK = (
    b"<style>@media (prefers-color-scheme: dark) { svg { filter: invert(0.91) hue-rotate(180deg) } }</style>\n"
)
"""In an SVG: it is drawn on a dark background, in lighter shades of the same hues, where its reader prefers that."""
UPDATE_METRICS = (
    *("loss", "policy_loss", "kl_loss", "kl", "kl_coef", "clip_fraction"),
    *("entropy", "grad_norm", "learning_rate"),
)  # Null in a step without an update; ``kl_loss`` is the KL term of the loss, null if the loss has none
RUBRIC_METRICS = (
    *("answer_correct", "returned_i_dont_know", "sources_correct", "num_sources", "num_turns", "answer_words"),
    *("answer_candidates", "answer_capitals", "thinking_tokens"),
)  # Means over a step's rollouts; those about answers cover only attempts (null if there were none)
UNANSWERED = frozenset(StopReason) - {StopReason.ANSWERED, StopReason.COMPLETED, StopReason.EXCEPTION}
"""Ways to end without an answer, other than "I don't know"."""


def rollout_metrics(collected: Collected, step: int) -> dict[str, Any]:
    """Metrics of the step's rollouts; means are over those that did not raise, ``accuracy`` over those judged. Dropped
    groups count too: keeping only the others would measure the filter, not the policy. ``step`` is that of the policy
    in training, behind which those that sampled may lag."""
    trajectories = collected.trajectories
    completed = [trajectory for trajectory in trajectories if trajectory.exception is None]
    rewards = [trajectory.reward for trajectory in completed]
    unanswered = [one.stop_reason in UNANSWERED or bool(one.rubric.get("returned_i_dont_know")) for one in completed]
    stamps = (each.policy_version for each in trajectories)
    versions = [int(stamp.removeprefix("v-")) for stamp in stamps if stamp]
    rubric = rubric_means(completed)
    return {
        "accuracy": mean([float(is_correct(each)) for each in trajectories if is_judged(each)]),
        "reward_mean": mean(rewards),
        "reward_std": statistics.stdev(rewards) if len(rewards) > 1 else None,
        "reward_median": statistics.median(rewards) if rewards else None,
        "reward_min": min(rewards, default=None),
        "reward_max": max(rewards, default=None),
        "unanswered": mean([float(each) for each in unanswered]),
        **{name: rubric.get(name) for name in RUBRIC_METRICS},
        **disagreement(completed),
        "num_trajectories": len(trajectories),
        "groups_kept": len(collected.kept),
        "refill_rounds": collected.refill_rounds,
        "trajectories_broken": sum(len(trajectory.samples) > 1 for trajectory in trajectories),
        "exceptions": len(trajectories) - len(completed),
        "duration": mean([trajectory.seconds for trajectory in completed]),
        "policy_version_min": min(versions, default=None),
        "policy_version_max": max(versions, default=None),
        "policy_age_mean": mean([float(step - version) for version in versions]),
        "policy_age_max": step - min(versions) if versions else None,
    }


def update_metrics(update: Mapping[str, float]) -> dict[str, Any]:
    """Metrics of the update, ``UPDATE_METRICS`` first; without an update nothing was trained."""
    trainable, total = update.get("trainable_tokens", 0), update.get("total_tokens", 0)
    named: dict[str, Any] = dict.fromkeys(UPDATE_METRICS) | {"trainable_tokens": trainable, "total_tokens": total}
    return named | {"trainable_share": trainable / total if total else None} | dict(update)


def training_records(
    collected: Collected, samples: Sequence[TrainingSample], tokens: Sequence[TokenNumbers], *, mask_truncated: bool
) -> Iterator[Record]:
    """What training adds to each trajectory of a step, by id: its tokens' numbers, or why it was dropped. ``tokens``
    correspond to ``samples``. ``advantage`` is shared by all trained tokens; if they differ it is null, and each
    sequence lists its own. Its lists have one entry per token, null where the mode's mask is 0; ``ratio`` is
    exp(log-probability in the last pass - old one), bounded as in the loss."""
    trained: dict[str, list[Record]] = defaultdict(list)
    for sample, numbers in zip(samples, tokens, strict=True):
        gaps = (new - old for new, old in zip(numbers.logprobs, numbers.old_logprobs, strict=True))
        ratios = [math.exp(max(min(gap, LOG_RATIO_LIMIT), -LOG_RATIO_LIMIT)) for gap in gaps]
        columns = {"old_logprobs": numbers.old_logprobs, "ratio": ratios, "advantages": numbers.advantages}
        lists = {
            name: [value if on else None for value, on in zip(values, sample.loss_mask, strict=True)]
            for name, values in columns.items()
        }
        trained[sample.trajectory_id].append({"loss_mask": sample.loss_mask} | lists)
    for trajectory in collected.trajectories:
        truncated = "truncated" if mask_truncated and is_truncated(trajectory) else None
        dropped = collected.reasons.get(trajectory.group_id, truncated)
        dropped = dropped if trajectory.exception is None else "exception"
        records = trained[trajectory.id]
        advantages = {each for record in records for each in record["advantages"] if each is not None}
        shared = advantages.pop() if len(advantages) == 1 else None
        if shared is not None:
            for record in records:
                del record["advantages"]
        names = {"id": trajectory.id, "group_id": trajectory.group_id}
        yield names | {"advantage": shared, "dropped": dropped, "samples": records}


DROPPED: Final = {
    "trajectories_exception": ("trajectory", "trajectories", "failed"),
    "groups_too_small": ("group", "groups", "too small"),
    "groups_unscored": ("group", "groups", "without a verdict or reward"),
    "groups_low_std": ("group", "groups", "with nearly equal rewards"),
    "groups_below_range": ("group", "groups", "too hard"),
    "groups_above_range": ("group", "groups", "too easy"),
    "trajectories_truncated": ("trajectory", "trajectories", "cut off"),
    "samples_nothing_trainable": ("sample", "samples", "without trainable tokens"),
}  # Why something was dropped (``dropped`` in ``metrics.jsonl``), in words


def step_line(metrics: Mapping[str, Any], total: int, seconds_left: float = 0.0) -> str:
    """One step on one line, with the time left; missing numbers are dashes."""

    def shown(name: str, form: str) -> str:
        value = metrics.get(name)
        return "-" if value is None else format(value, form)

    in_loss = metrics.get("kl_loss") is not None or metrics.get("kl") is None
    taught = [f"KL to the teacher: {shown('teacher_kl', 'z.4f')}"] if "teacher_kl" in metrics else []
    tokens = f"{metrics['trainable_tokens']}/{metrics['total_tokens']} ({shown('trainable_share', '.1%')})"
    parts = [
        f"Step {metrics['step']}/{total}",
        f"Loss: {shown('loss', 'z.4f')}",
        f"Policy: {shown('policy_loss', 'z.4f')}",
        f"KL: {shown('kl_loss', 'z.4f')}" if in_loss else f"KL in the reward: {shown('kl', 'z.4f')}",
        *taught,
        f"Reward: {shown('reward_mean', 'z.3f')}",
        f"Acc: {shown('accuracy', '.1%')}",
        f"Trainable tokens: {tokens}",
        f"{metrics['seconds']['total']:.1f} s",
    ]
    if seconds_left:
        parts.append(f"about {duration(seconds_left)} left")
    counts = ((count, *DROPPED[reason]) for reason, count in metrics["dropped"].items() if count)
    if dropped := [f"{count} {one if count == 1 else many} {why}" for count, one, many, why in counts]:
        parts.append("Dropped: " + ", ".join(dropped))
    return " | ".join(parts)


def percent(accuracy: float, interval: tuple[float, float]) -> str:
    """An accuracy with its 95% interval."""
    low, high = interval
    return f"{accuracy:.1%} (95% interval {low:.1%} to {high:.1%})"


def evaluation_block(evaluation: Evaluation, state: RunState, *, is_best: bool) -> str:
    """An evaluation's results, compared with the best so far, which ``state`` already includes."""
    low, high = evaluation.interval
    averages = (evaluation.reward, ".3f"), (evaluation.rubric.get("num_turns"), ".1f")
    reward, turns = ("-" if value is None else format(value, form) for value, form in averages)
    lines = [
        f"=== Evaluation after step {state.step} ===",
        f"Average reward: {reward} | turns: {turns} | exceptions: {evaluation.exceptions}",
        f"Eval accuracy: {evaluation.accuracy:.1%}"
        f" ({evaluation.num_correct} of {evaluation.num_judged}, 95% interval {low:.1%} to {high:.1%})",
    ]
    if (sources := evaluation.rubric.get("sources_correct")) is not None:
        lines.append(f"Correct sources: {sources:.1%}")
    if evaluation.unjudged:
        void = "so this evaluation does not count for the best model, patience or target."
        then = void if evaluation.is_void else "and are excluded from the accuracy."
        lines.append(f"{evaluation.unjudged} of {len(evaluation.trajectories)} answers have no verdict, {then}")
    if state.best_accuracy == 0:
        lines.append(f"No correct answer yet; best_model stays at step {state.best_step} until there is one")
    elif is_best:
        lines.append(f"New best accuracy: {evaluation.accuracy:.1%}")
    elif state.best_accuracy is not None and state.best_interval is not None:
        best = percent(state.best_accuracy, state.best_interval)
        lines.append(f"Best accuracy so far: {best} at step {state.best_step}")
    return "\n".join(lines)


LAST_CURVE: Final = "curve.svg"  # In a run's folder: the file that ``draw_curves`` writes last


def outcome(state: RunState, reason: str, num_eval: int, settings: PolicySettings) -> str:
    """The result of a run that ended for ``reason``."""
    best, interval, step = state.best_accuracy, state.best_interval, state.best_step
    steps = counted(state.step, "step")
    if best is None or interval is None:
        said = "No evaluation selected a best_model"
    elif best == 0:
        said = f"No evaluation had a correct answer; best_model is from step {step}"
    else:
        questions = f"the {counted(num_eval, 'validation question')} that selected best_model"
        start = "; best_model has the weights of the start" if step == 0 < state.step else ""
        said = f"Best accuracy {percent(best, interval)} at step {step}, on {questions}{start}"
    said = f"Done after step {state.step}: {reason}. {said}."
    if 0 < state.step == state.steps_without_update:
        kept = "final has" if best is None else "best_model and final have"
        return (
            f"{said}\nNothing was learned: {steps} without an update, so {kept} the weights of the start."
            " The step lines say why; if the rewards of each group are equal, raise --temperature, or start with"
            " emailrl sft (docs/guides/troubleshooting.md)."
        )
    if not state.learned_nothing:
        return said
    if not best:
        return (
            f"{said}\nNothing was learned in {steps}: start with emailrl sft, or with a stronger model or an easier"
            " mailbox (docs/guides/troubleshooting.md)."
        )
    model, rate = settings.model.name, settings.training.peak_rate
    higher = max(MEASURED_RATES.get(model, 0), rate)
    return (
        f"{said}\nNothing was learned: every evaluation in {steps} had the same {best:.1%} correct."
        f" The learning rate {rate:g} is probably too small for {model}: try --learning-rate"
        f" {higher if higher > rate else 10 * rate:g} (docs/guides/learning_rate.md)."
    )


def complete(skipped: Sequence[str]) -> str:
    """The line of a run that was interrupted after its last step."""
    return f"The run is complete and saved{'; skipped: ' * bool(skipped)}{' and '.join(skipped)}."


def curve(records: Sequence[Record], name: str) -> list[tuple[int, float]]:
    """Return ``(step, number)`` of every record that has the number."""
    return [(record["step"], record[name]) for record in records if record.get(name) is not None]


def draw_curves(run_dir: Path, settings: PolicySettings) -> list[Path]:
    """Draw a run's ``metrics.jsonl`` and ``evaluations.jsonl`` as ``curve.png`` and ``curve.svg`` in its folder."""
    steps, evaluations = (list(read_records(run_dir / f"{name}.jsonl")) for name in ("metrics", "evaluations"))
    figure = new_figure(9, 3.6)
    accuracy, reward = figure.subplots(1, 2)
    for axes, of_steps, of_evaluations in ((accuracy, "accuracy", "accuracy"), (reward, "reward_mean", "reward")):
        for points, style in (
            (curve(steps, of_steps), {"color": FAINT, "label": "training rollouts"}),
            (curve(evaluations, of_evaluations), {"color": FIRST, "marker": "o", "label": "evaluations"}),
        ):
            axes.plot([step for step, _ in points], [value for _, value in points], **style)
    if whole := [each for each in evaluations if each.get("accuracy") is not None]:
        at = [each["step"] for each in whole]
        accuracy.vlines(at, *([each[f"accuracy_{end}"] for each in whole] for end in ("low", "high")), color=FIRST)
    accuracy.set(title="Accuracy, 95% interval", xlabel="training step", ylim=(0, 1.02))
    accuracy.yaxis.set_major_formatter("{x:.0%}")
    reward.set(title="Reward", xlabel="training step")
    reward.legend()
    title = f"{settings.model.name}, {settings.training.algorithm}, mode {settings.training.mode}"
    figure.suptitle(title, fontsize=11, parse_math=False)  # names may hold a $
    return save(figure, run_dir / "curve")


WATCHED = ("accuracy", "unanswered", "entropy", "kl", "answer_words", "answer_candidates")
"""The metrics of a step that the signs are computed from."""
WINDOW = 5  # Steps over which a level is averaged
UNANSWERED_SHARE = 0.9  # Share of rollouts that end without an answer
LOWEST_ENTROPY = 0.002
"""Nats per trained token: two rollouts of 50 tokens are then identical with probability e^-0.1 = 90% or more."""
HIGHEST_KL = 1.0  # Nats per trained token
TIMES_KL_TARGET = 5  # With KL_TARGET, the highest KL as a multiple of it
GROWTH_WINDOW = 10  # Steps at each end of ``HISTORY`` that are compared to measure growth
HISTORY = 40
GROWTH = 1.5
LEAST_GROWTH = {"answer_words": 5.0, "answer_candidates": 0.5}
"""Minimum absolute growth: from one word to two is no sign."""
UNANSWERED_WARNING = (
    '{:.0%} of rollouts end without an answer ("I don\'t know", or out of turns), which the art_e reward pays more than'
    " answering with less than about 37% accuracy: lower REWARD_NO_ANSWER or LEARNING_RATE, use easier questions or"
    " start with emailrl sft (docs/reference/rewards.md)."
)
ENTROPY_WARNING = (
    "the policy's entropy is {:.4f} nats per token: a question's rollouts are nearly identical and teach nothing; raise"
    " ENTROPY_COEF or TEMPERATURE, or lower LEARNING_RATE."
)
ACCURACY_ROSE = 0.02  # Answers may grow if accuracy rises by more than this
PASSED = 0.75

Steps = Sequence[Mapping[str, float | None]]
"""The watched metrics of the last steps, oldest first; None if a step lacks the number."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """A sign that has just reached its threshold."""

    warning: str
    good_step: int | None  # A step from before it began; None if none is remembered


def watch(state: RunState, metrics: Mapping[str, float | None], kl_target: float | None) -> list[Alarm]:
    """Record the last step's metrics in ``state``; return new alarms."""
    state.watched = [*state.watched, {name: metrics.get(name) for name in WATCHED}][-HISTORY:]
    alarms = []
    for cause, (severity, warning) in signs(state.watched, kl_target).items():
        if cause in state.collapsing:
            if severity < PASSED:
                state.collapsing.remove(cause)
        elif severity >= 1:
            state.collapsing.append(cause)
            # The step before the whole window in which the sign was last below PASSED: a mean lags behind a change.
            window = GROWTH_WINDOW if cause in LEAST_GROWTH else WINDOW
            before = (
                max(0, state.step - back - (window - 1))
                for back in range(1, len(state.watched))
                if signs(state.watched[:-back], kl_target).get(cause, (0.0, ""))[0] < PASSED
            )
            alarms.append(Alarm(warning, next(before, None)))
    return alarms


def signs(steps: Steps, kl_target: float | None) -> dict[str, tuple[float, str]]:
    """Severity (0 if there are too few steps to tell) and warning of every sign that can be computed, by cause."""
    recent = {name: [value for step in steps if (value := step[name]) is not None][-WINDOW:] for name in WATCHED}
    levels = {name: math.fsum(values) / WINDOW for name, values in recent.items() if len(values) == WINDOW}
    limit = TIMES_KL_TARGET * kl_target if kl_target else HIGHEST_KL
    above = f"the KL to the reference policy is {{:.3g}} nats per token, above {limit:g}:"
    of_level: dict[str, tuple[Callable[[float], float], str]] = {
        "unanswered": (lambda share: share / UNANSWERED_SHARE, UNANSWERED_WARNING),
        "entropy": (lambda entropy: LOWEST_ENTROPY / max(entropy, 1e-12), ENTROPY_WARNING),
        "kl": (lambda kl: kl / limit, f"{above} raise BETA or lower LEARNING_RATE."),
    }
    found = {
        name: (severity(levels[name]), warning.format(levels[name]))
        for name, (severity, warning) in of_level.items()
        if name in levels
    }

    def average(part: Steps, name: str) -> float:
        return mean([value for step in part if (value := step[name]) is not None]) or 0.0

    early, late = steps[:GROWTH_WINDOW], steps[-GROWTH_WINDOW:]
    accuracy = [average(part, "accuracy") for part in (early, late)]
    for name, what in (("answer_words", "words"), ("answer_candidates", "candidates")):
        before, after = average(early, name), average(late, name)
        severity = 0.0
        if len(steps) >= 2 * GROWTH_WINDOW and accuracy[1] - accuracy[0] <= ACCURACY_ROSE and before > 0:
            severity = min(after / before / GROWTH, (after - before) / LEAST_GROWTH[name])
        warning = (
            f"answers grew from {before:.1f} to {after:.1f} {what} in {len(steps)} steps while accuracy did not rise"
            f" ({accuracy[0]:.0%}, {accuracy[1]:.0%}): read some (emailrl inspect-trajectory); if they game the check,"
            " set EMAILRL_JUDGE=llm or use a reward that penalizes it (docs/guides/custom.md)."
        )
        found[name] = severity, warning
    return found


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


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcdefaults()  # a matplotlibrc in the working folder may ask for LaTeX and run what it likes there
    matplotlib.rcParams |= {
        "svg.hashsalt": "emailrl",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "0.92",
        "axes.axisbelow": True,
        "legend.frameon": False,
    }
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def save(figure: Figure, path: Path) -> list[Path]:
    """Write the figure next to ``path`` as PNG and SVG, and return both paths."""
    written = []
    for suffix in (".png", ".svg"):
        content = io.BytesIO()
        metadata = {"Date": None} if suffix == ".svg" else {"Software": None}
        figure.savefig(content, format=suffix[1:], dpi=150, metadata=metadata)
        written.append(path.with_suffix(suffix))
        replace_bytes(written[-1], content.getvalue().replace(b"<defs>", IN_THE_DARK + b"<defs>", 1))
    return written
