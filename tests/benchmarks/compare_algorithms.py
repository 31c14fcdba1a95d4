"""Which named algorithm learns fastest on the demo worlds, with the packaged policy and one budget of steps for all.

    python tests/benchmarks/compare_algorithms.py --out compare --jobs 16
    python tests/benchmarks/compare_algorithms.py --out compare --report --figure docs/figures/algorithms_decay.svg

- Every run has the same budget: `--steps` steps of `QUESTIONS` questions × `ROLLOUTS` rollouts, two optimizer updates a
  step (so that ratios differ from 1 and clipping means something), no KL to the reference, no early stop.
- The learning rate is that of a search made once, six steps from another seed at 1e-3, 2e-3 and 4e-3, by the last
  accuracy on the validation worlds (the area under the curve likes rates that rise and collapse): 2e-3 for all, 4e-3 in
  rollout mode. It decays to 0 (`--schedule`); at a constant one, tried first, one run in 24 collapsed.
- Every `EVAL_STEPS` steps the greedy policy answers `EVAL_QUESTIONS` questions of the test worlds. The last accuracy
  counts, not the best.

Runs are processes of their own with `--threads` threads. A run that ended is not done again, so that an interrupted
comparison goes on where it was; one that failed is told, and tried again by the next call.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

NAMES = ("dapo", "grpo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "ppo")
QUESTIONS, ROLLOUTS, MINI_BATCHES = 8, 6, 2
EVAL_STEPS, EVAL_QUESTIONS = 2, 120
RATES = {"masked": 2e-3, "rollout": 4e-3}
DEMO_SEED = 42


@dataclass(frozen=True, slots=True)
class Spec:
    """One run: what is trained, from which seed, for how long."""

    algorithm: str
    mode: str
    seed: int
    steps: int
    schedule: str

    @property
    def label(self) -> str:
        """Whose line it belongs to."""
        return self.algorithm if self.mode == "masked" else f"{self.algorithm} ({self.mode})"

    @property
    def name(self) -> str:
        """What its files are called."""
        return f"{self.algorithm}-{self.mode}-{self.schedule}-seed{self.seed}-steps{self.steps}"


def prepare(out: Path, num_questions: int = EVAL_QUESTIONS) -> None:
    """Write the demo mailbox and a question file in which questions of the test worlds stand as `val`."""
    from emailrl.questions.load import questions_file, read_questions, write_demo, write_scenarios
    from emailrl.settings import DataSettings, StoreSettings

    if (out / "questions.jsonl").exists():
        return
    write_demo(out / "demo.db", settings=StoreSettings(), seed=DEMO_SEED, overwrite=True)
    questions = read_questions(questions_file(out / "demo.db"), DataSettings())
    train, test = (
        questions.of(split, limit=limit, seed=DEMO_SEED).scenarios
        for split, limit in (("train", None), ("test", num_questions))
    )
    write_scenarios(out / "questions.jsonl", [*train, *(replace(one, split="val") for one in test)])


def train_one(spec: Spec, out: Path) -> dict[str, Any]:
    """Train one run in this process and return its record."""
    from emailrl.records import read_records
    from emailrl.settings import load_settings
    from emailrl.training.algorithms import ALGORITHMS
    from emailrl.training.loop import train

    rate = RATES[spec.mode]
    overrides = {
        "db": out / "demo.db", "questions": out / "questions.jsonl", "eval_dataset_size": 1000,
        "model_name": "nano", "device": "cpu", "judge": "offline", "wandb_mode": "disabled",
        "max_turns": 6, "max_tokens": 96, "temperature": 1.0, "max_batch_trajectories": 128,
        "mode": spec.mode, "algorithm": spec.algorithm, "seed": spec.seed, "num_train_epochs": 1000,
        "max_steps": spec.steps, "eval_steps": EVAL_STEPS, "save_steps": 10_000, "patience": 10_000,
        "per_device_train_batch_size": QUESTIONS, "num_generations": ROLLOUTS, "num_mini_batches": MINI_BATCHES,
        "learning_rate": rate, "lr_scheduler": spec.schedule, "warmup_steps": 1, "beta": 0.0,
        "output_dir": out / "runs" / spec.name / spec.mode,
    }  # fmt: skip
    overrides |= {"critic_learning_rate": rate} if ALGORITHMS[spec.algorithm].has_critic else {}
    settings = load_settings(overrides, cwd=out, environ={})
    # No early stop, so that every run has its whole budget: a share above 1 is never reached.
    never = settings.evaluation.model_copy(update={"target_accuracy": 2.0})
    result = train(settings.model_copy(update={"evaluation": never}), overwrite=True, progress=lambda line: None)
    kept = ("step", "accuracy", "accuracy_low", "accuracy_high")
    curve = [{name: one[name] for name in kept} for one in read_records(result.run_dir / "evaluations.jsonl")]
    rollouts = sum(step["num_trajectories"] for step in read_records(result.run_dir / "metrics.jsonl"))
    shutil.rmtree(out / "runs" / spec.name)
    return {"label": spec.label, "mode": spec.mode, "curve": curve, "rollouts": rollouts}


def collect(
    specs: Sequence[Any], out: Path, jobs: int, train: Callable[[Any, Path], dict[str, Any]] = train_one
) -> list[dict[str, Any]]:
    """The records of the runs that ended, now or before; ``jobs`` 0 runs nothing. A failure is told on stderr."""
    from emailrl.base.disk import replace_bytes

    records = {spec: out / f"{spec.name}.json" for spec in specs}
    todo = [spec for spec in specs if jobs and not records[spec].exists()]
    with ProcessPoolExecutor(max(jobs, 1), mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(train, spec, out): spec for spec in todo}
        for future in as_completed(futures):
            spec = futures[future]
            try:
                record = future.result()
            except Exception:
                print(f"FAILED {spec.name}: {traceback.format_exc()}", file=sys.stderr, flush=True)
                continue
            replace_bytes(records[spec], json.dumps(record).encode())
            print(spec.name, *(f"{point['accuracy']:.0%}" for point in record["curve"]), file=sys.stderr, flush=True)
    return [json.loads(path.read_text()) for path in records.values() if path.exists()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--threads", type=int, default=1, help="threads of each run")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--schedule", default="linear", help="constant, linear, cosine")
    parser.add_argument("--algorithms", nargs="+", default=list(NAMES))
    parser.add_argument("--report", action="store_true", help="train nothing: tell what has been trained")
    parser.add_argument("--figure", type=Path, help="draw the curves here (SVG or PNG)")
    wanted = parser.parse_args()
    out = wanted.out.absolute()
    os.environ |= {"OMP_NUM_THREADS": str(wanted.threads), "CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "disabled"}
    out.mkdir(parents=True, exist_ok=True)
    prepare(out)
    # grpo once more with every token after the prompt trained: masked against rollout mode.
    lines = [(name, "masked") for name in wanted.algorithms] + [("grpo", "rollout")] * ("grpo" in wanted.algorithms)
    specs = [Spec(*line, seed, wanted.steps, wanted.schedule) for line in lines for seed in wanted.seeds]
    records = collect(specs, out, 0 if wanted.report else wanted.jobs)
    by_label = {
        label: [record for record in records if record["label"] == label]
        for label in dict.fromkeys(record["label"] for record in records)
    }
    print(table(by_label))
    if wanted.figure:
        draw(by_label, wanted.figure)


def table(by_label: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown, a row a label: means over its seeds with lowest and highest, the best end first."""

    def spread(values: Sequence[float]) -> str:
        return f"{statistics.mean(values):.1%} ({min(values):.1%} to {max(values):.1%})".replace("%", " %")

    rows = []
    for label, runs in by_label.items():
        starts, ends = ([run["curve"][at]["accuracy"] for run in runs] for at in (0, -1))
        apart = sum(run["curve"][-1]["accuracy_low"] > run["curve"][0]["accuracy_high"] for run in runs)
        rollouts = statistics.mean(run["rollouts"] for run in runs)
        cells = [f"`{label}`", spread(starts), spread(ends), f"{apart} of {len(runs)}", f"{rollouts:,.0f}"]
        rows.append((statistics.mean(ends), f"| {' | '.join(cells)} |"))
    head = ["| algorithm | start | final | apart | rollouts |", "|---" * 5 + "|"]
    return "\n".join([*head, *(row for _, row in sorted(rows, reverse=True))])


def draw(by_label: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Accuracy over steps: left every algorithm in masked mode, right one algorithm's modes; bands span the seeds."""
    from emailrl.training.report import new_figure

    figure = new_figure(10, 4.2)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[1.6, 1])
    for marker, (label, runs) in zip("osD^v<>pX*", by_label.items(), strict=False):
        at = [point["step"] for point in runs[0]["curve"]]
        points = list(zip(*([point["accuracy"] for point in run["curve"]] for run in runs), strict=True))
        for axes in (left, right):
            if runs[0]["mode"] == "masked" if axes is left else label.startswith("grpo"):
                (line,) = axes.plot(at, list(map(statistics.mean, points)), marker=marker, ms=4, label=label)
                axes.fill_between(at, list(map(min, points)), list(map(max, points)), color=line.get_color(), alpha=0.1)
    for axes, title in ((left, "Named algorithms"), (right, "Masked against rollout mode")):
        axes.set(xlabel="step", ylim=(0, 1), title=title)
        axes.legend(loc="lower right", fontsize=8)
    left.set(ylabel="answers right on held-out worlds")
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
