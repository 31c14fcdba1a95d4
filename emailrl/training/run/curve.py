"""Plot a run's accuracy and reward over its steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from emailrl.drawing import FAINT, FIRST, new_figure, save
from emailrl.recording import Record, read_records
from emailrl.settings import Settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LAST_CURVE: Final = "curve.svg"
"""In a run's folder: the file that ``draw_curves`` writes last."""

Points = list[tuple[int, float]]


def curve(records: Sequence[Record], name: str) -> Points:
    """Return ``(step, number)`` of every record that has the number."""
    return [(record["step"], record[name]) for record in records if record.get(name) is not None]


def draw_curves(run_dir: Path, settings: Settings) -> list[Path]:
    """Draw a run's ``metrics.jsonl`` and ``evaluations.jsonl`` as ``curve.png`` and ``curve.svg`` in its folder."""
    steps, evaluations = (list(read_records(run_dir / f"{name}.jsonl")) for name in ("metrics", "evaluations"))
    figure = new_figure(9, 3.6)
    accuracy, reward = figure.subplots(1, 2)
    _draw(accuracy, curve(steps, "accuracy"), curve(evaluations, "accuracy"))
    if whole := [each for each in evaluations if each.get("accuracy") is not None]:
        at = [each["step"] for each in whole]
        accuracy.vlines(at, *([each[f"accuracy_{end}"] for each in whole] for end in ("low", "high")), color=FIRST)
    accuracy.set(title="Accuracy, 95 % interval", xlabel="training step", ylim=(0, 1.02))
    accuracy.yaxis.set_major_formatter("{x:.0%}")
    _draw(reward, curve(steps, "reward_mean"), curve(evaluations, "reward"))
    reward.set(title="Reward", xlabel="training step")
    reward.legend(loc="lower right")
    training = settings.training
    title = f"{settings.model.name}, {training.algorithm}, mode {training.mode}"
    figure.suptitle(title, fontsize=11, parse_math=False)  # names may hold a $
    return save(figure, run_dir / "curve")


def _draw(axes: Axes, rollouts: Points, evaluations: Points) -> None:
    lines: list[tuple[Points, dict[str, Any]]] = [
        (rollouts, {"color": FAINT, "label": "training rollouts"}),
        (evaluations, {"color": FIRST, "marker": "o", "label": "evaluations"}),
    ]
    for points, style in lines:
        axes.plot([step for step, _ in points], [value for _, value in points], **style)
