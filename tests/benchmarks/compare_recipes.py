"""Which recipe learns most from the same number of rollouts, with the packaged policy on the demo worlds.

    python tests/benchmarks/compare_recipes.py --out recipes --jobs 16

Each recipe of ``RECIPES`` trains from each of ``--seeds`` on at most ``--rollouts`` rollouts: with the learning rate
that its users would have, and again with the one that `--preset recommended` chooses, so that the rate and the rest are
told apart. ``recommended`` replaces groups without spread, and its schedule has to end before the budget does: it plans
``REPLACED`` rollouts for each that its steps need. An evaluation beyond the budget does not count. All else is as in
``compare_algorithms.py``: the mailbox, training and held-out questions, greedy evaluations, no early stop. ``--jobs 0``
shows the table of what has been trained.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compare_algorithms import collect, prepare

TRL = {  # docs/guides/trl.md; the rate is that of its LoRA guide ("LoRA Without Regret": 1e-5, full fine-tuning 1e-6)
    "temperature": 1.0, "per_device_train_batch_size": 1, "num_generations": 8, "learning_rate": 1e-5,
    "lr_scheduler": "linear", "warmup_steps": 0, "adam_beta2": 0.999, "beta": 0.0, "min_group_std": 0.0,
}  # fmt: skip
RECIPES: dict[str, tuple[str | None, dict[str, Any]]] = {
    "recommended": ("recommended", {}),
    "defaults": (None, {}),
    "defaults, rate auto": (None, {"learning_rate": "auto"}),
    "TRL": (None, TRL),
    "TRL, rate auto": (None, TRL | {"learning_rate": "auto"}),
}
REPLACED = 1.5
EVALUATIONS = 6  # after the one at step 0, or more


@dataclass(frozen=True, slots=True)
class Spec:
    """One run: a recipe, a seed, and its number of rollouts."""

    recipe: str
    seed: int
    rollouts: int

    @property
    def name(self) -> str:
        """What its files are called."""
        return f"{self.recipe.replace(', ', '-').replace(' ', '-')}-{self.rollouts}-seed{self.seed}"


def train_one(spec: Spec, out: Path) -> dict[str, Any]:
    """Train one run in this process and return its record."""
    from emailrl.records import read_records
    from emailrl.settings import load_settings
    from emailrl.settings.names import changed
    from emailrl.training.loop import train

    preset, own = RECIPES[spec.recipe]
    task = {
        "db": out / "demo.db", "questions": out / "questions.jsonl", "eval_dataset_size": 1000,
        "model_name": "nano", "device": "cpu", "judge": "offline", "wandb_mode": "disabled",
        "max_turns": 6, "max_tokens": 96, "max_batch_trajectories": 128, "seed": spec.seed,
        "save_steps": 10_000, "patience": 10_000, "output_dir": out / "runs" / spec.name / "masked",
    }  # fmt: skip
    settings = load_settings(task | own, preset, cwd=out, environ={})
    training = settings.training
    per_step = training.per_device_train_batch_size * training.num_generations
    steps = int(spec.rollouts / per_step / (REPLACED if settings.algorithm.dynamic_filtering else 1))
    settings = changed(settings, max_steps=steps, eval_steps=max(1, steps // EVALUATIONS), target_accuracy=2.0)
    result = train(settings, overwrite=True, progress=lambda line: None)
    curve, used = [], {0: 0}
    metrics = list(read_records(result.run_dir / "metrics.jsonl"))
    for line in metrics:
        used[line["step"]] = used[line["step"] - 1] + line["num_trajectories"]
    for line in read_records(result.run_dir / "evaluations.jsonl"):
        kept = {name: line[name] for name in ("step", "accuracy", "accuracy_low", "accuracy_high")}
        curve.append(kept | {"rollouts": used[line["step"]]})
    updates = training.updates_per_step * sum(line["loss"] is not None for line in metrics)
    rates = [line["learning_rate"] for line in metrics if line["learning_rate"] is not None]
    shutil.rmtree(out / "runs" / spec.name)
    seconds = sum(line["seconds"]["total"] for line in metrics)
    own = {"recipe": spec.recipe, "seed": spec.seed, "budget": spec.rollouts, "steps": steps, "updates": updates}
    return own | {"peak_rate": max(rates, default=None), "seconds": round(seconds, 1), "curve": curve}


def table(records: Sequence[dict[str, Any]]) -> str:
    """Markdown, a row a recipe: means over its seeds, with the lowest and highest final accuracy."""
    head = ["recipe", "peak rate", "before", "best", "final (lowest, highest)", "rollouts", "updates"]
    rows = [head, ["---"] * len(head)]
    for recipe in dict.fromkeys(record["recipe"] for record in records):
        runs = [record for record in records if record["recipe"] == recipe]
        curves = [[point for point in run["curve"] if point["rollouts"] <= run["budget"]] for run in runs]
        ends, used = [curve[-1]["accuracy"] for curve in curves], [curve[-1]["rollouts"] for curve in curves]
        before = statistics.mean(curve[0]["accuracy"] for curve in curves)
        best = statistics.mean(max(point["accuracy"] for point in curve) for curve in curves)
        final = f"{statistics.mean(ends):.1%} ({min(ends):.1%}, {max(ends):.1%})"
        counts = (f"{statistics.mean(each):,.0f}" for each in (used, [run["updates"] for run in runs]))
        rows.append([recipe, f"{runs[0]['peak_rate'] or 0:.0e}", f"{before:.1%}", f"{best:.1%}", final, *counts])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for a JSON file a run")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, of one thread each")
    parser.add_argument("--rollouts", type=int, default=1024)
    parser.add_argument("--questions", type=int, default=100, help="held-out questions")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    wanted = parser.parse_args()
    out = wanted.out.absolute()
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "disabled"}
    out.mkdir(parents=True, exist_ok=True)
    prepare(out, wanted.questions)
    specs = [Spec(recipe, seed, wanted.rollouts) for recipe in wanted.recipes for seed in wanted.seeds]
    print(table(collect(specs, out, wanted.jobs, train_one)))


if __name__ == "__main__":
    main()
