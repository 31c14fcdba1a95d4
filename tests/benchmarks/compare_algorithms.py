"""Which named algorithm learns fastest on the demo worlds, with the packaged policy and one budget of steps for all.

    python tests/benchmarks/compare_algorithms.py --out compare --jobs 16
    python tests/benchmarks/compare_algorithms.py --out compare --report --figure docs/figures/algorithms.svg

The rules, and where one gave way to another:

- Every run has the same budget: `--steps` steps of `QUESTIONS` questions × `ROLLOUTS` rollouts, two optimizer updates a
  step (so that ratios differ from 1 and clipping means something), no KL to the reference, no early stop.
- Learning rate: the same search for all, `SEARCH_STEPS` steps from `SEARCH_SEED` at each of `LEARNING_RATES`, judged by
  the last accuracy on the validation worlds; of equals the lowest rate. The critic's is the policy's. (The area under
  the search's curve was the first rule; before any comparison it gave way, for it liked rates that rise and collapse.)
- The comparison: `--seeds` other seeds at the chosen rate, judged on the test worlds, which no search saw: greedy
  accuracy on `EVAL_QUESTIONS` of their questions every `EVAL_STEPS` steps. The last accuracy counts, not the best.
  The rate decays to 0 over the budget (`--schedule`); at a constant one, tried first, one run in 24 collapsed.

Runs are processes of their own with `--threads` threads. A run that ended is not done again, so that an interrupted
comparison goes on where it was; one that failed is told, counted and tried again by the next call.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from learning_curves import draw, rows, table

if TYPE_CHECKING:
    from emailrl.questions.splits import Split
    from emailrl.records.trajectory import Scenario

NAMES = ("dapo", "grpo", "dr_grpo", "gspo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "ppo")
QUESTIONS, ROLLOUTS, MINI_BATCHES = 8, 6, 2
EVAL_STEPS, EVAL_QUESTIONS = 2, 120
LEARNING_RATES = (1e-3, 2e-3, 4e-3)
SEARCH_SEED, SEARCH_STEPS, SEARCH_EVAL_STEPS = 1000, 6, 3
DEMO_SEED = 42


@dataclass(frozen=True, slots=True)
class Spec:
    """One run: what is trained, from which seed, at which rate, for how long, judged on which split."""

    algorithm: str
    mode: str
    seed: int
    learning_rate: float
    steps: int
    eval_steps: int
    judged_on: str
    schedule: str = "constant"

    @property
    def name(self) -> str:
        """What its files are called."""
        return (
            f"{self.judged_on}-{self.algorithm}-{self.mode}-lr{self.learning_rate:g}-seed{self.seed}-steps{self.steps}"
        )

    @property
    def label(self) -> str:
        """Whose line it belongs to."""
        return self.algorithm if self.mode == "masked" else f"{self.algorithm} ({self.mode})"


def prepare(out: Path) -> None:
    """Write the demo mailbox and, for each split that judges, a question file in which its questions stand as `val`."""
    from emailrl.questions.beside import questions_file, write_demo
    from emailrl.questions.load import load_scenario_set
    from emailrl.questions.rows import write_scenarios
    from emailrl.settings import DataSettings, StoreSettings

    database = out / "demo.db"
    if (out / "judged_on_test.jsonl").exists():
        return
    write_demo(database, settings=StoreSettings(), seed=DEMO_SEED, overwrite=True)

    def load(split: Split, limit: int | None) -> list[Scenario]:
        file = questions_file(database)
        return load_scenario_set(file, split, limit=limit, seed=DEMO_SEED, data=DataSettings()).scenarios

    for judge in ("val", "test"):
        asked = [replace(scenario, split="val") for scenario in load(judge, EVAL_QUESTIONS)]
        write_scenarios(out / f"judged_on_{judge}.jsonl", [*load("train", None), *asked])


def train_one(spec: Spec, out: Path) -> dict[str, Any]:
    """Train one run in this process and return its record."""
    from emailrl.settings import load_settings
    from emailrl.training.algorithms import ALGORITHMS
    from emailrl.training.loop import train

    overrides = {
        "db": out / "demo.db", "questions": out / f"judged_on_{spec.judged_on}.jsonl", "eval_dataset_size": 1000,
        "model_name": "nano", "device": "cpu", "judge": "offline", "wandb_mode": "disabled",
        "max_turns": 6, "max_tokens": 96, "temperature": 1.0, "max_batch_trajectories": 128,
        "mode": spec.mode, "algorithm": spec.algorithm, "seed": spec.seed, "num_train_epochs": 1000,
        "max_steps": spec.steps, "eval_steps": spec.eval_steps, "save_steps": 10_000, "patience": 10_000,
        "per_device_train_batch_size": QUESTIONS, "num_generations": ROLLOUTS, "num_mini_batches": MINI_BATCHES,
        "learning_rate": spec.learning_rate, "lr_scheduler": spec.schedule, "warmup_steps": 1, "beta": 0.0,
        "output_dir": out / "runs" / spec.name / spec.mode,
    }  # fmt: skip
    if ALGORITHMS[spec.algorithm].has_critic:
        overrides["critic_learning_rate"] = spec.learning_rate
    settings = load_settings(overrides, cwd=out, environ={})
    # No early stop, so that every run has its whole budget: a share above 1 is never reached.
    never = settings.evaluation.model_copy(update={"target_accuracy": 2.0})
    started = time.monotonic()
    result = train(settings.model_copy(update={"evaluation": never}), overwrite=True, progress=lambda line: None)
    lines = (result.run_dir / "evaluations.jsonl").read_text().splitlines()
    kept = ("step", "accuracy", "accuracy_low", "accuracy_high", "num_questions", "reward", "num_turns")
    curve = [{name: one[name] for name in kept} for one in map(json.loads, lines)]
    metrics = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(out / "runs" / spec.name)
    return asdict(spec) | {
        "label": spec.label,
        "seconds": time.monotonic() - started,
        "curve": curve,
        "sampled_accuracy": [step["accuracy"] for step in metrics],
        "num_trajectories": sum(step["num_trajectories"] for step in metrics),
        "trainable_tokens": sum(step["trainable_tokens"] for step in metrics),
        "clip_fraction": [step["clip_fraction"] for step in metrics],
        "grad_norm": [step["grad_norm"] for step in metrics],
    }


def collect(specs: Sequence[Spec], out: Path, jobs: int) -> list[dict[str, Any]]:
    """The records of the runs that ended, now or before; a failure is told on stderr and written beside.

    ``jobs`` 0 runs nothing.
    """
    todo = [spec for spec in specs if jobs and not _record(out, spec).exists()]
    if todo:
        _train_all(todo, out, jobs)
    return [json.loads(_record(out, spec).read_text()) for spec in specs if _record(out, spec).exists()]


def _train_all(todo: Sequence[Spec], out: Path, jobs: int) -> None:
    print(f"{len(todo)} runs, {jobs} at a time", file=sys.stderr, flush=True)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(train_one, spec, out): spec for spec in todo}
        for future in as_completed(futures):
            spec = futures[future]
            try:
                record = future.result()
            except Exception as error:
                _record(out, spec).with_suffix(".failed").write_text("".join(traceback.format_exception(error)))
                print(f"FAILED {spec.name}: {error}", file=sys.stderr, flush=True)
                continue
            beside = _record(out, spec).with_suffix(".part")
            beside.write_text(json.dumps(record) + "\n")
            beside.rename(_record(out, spec))
            told = " ".join(f"{point['accuracy']:.0%}" for point in record["curve"])
            print(f"{spec.name}: {told} ({record['seconds']:.0f} s)", file=sys.stderr, flush=True)


def _record(out: Path, spec: Spec) -> Path:
    return out / "records" / f"{spec.name}.json"


def choose_rates(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Each label's learning rate: the highest last accuracy of the search, of equals the lowest rate."""
    best: dict[str, tuple[float, float]] = {}
    for record in records:
        mark = record["curve"][-1]["accuracy"], -record["learning_rate"]
        best[record["label"]] = max(best.get(record["label"], mark), mark)
    return {label: -rate for label, (_, rate) in best.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--threads", type=int, default=1, help="threads of each run")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--schedule", default="linear", help="constant, linear, cosine: the rate of the comparison")
    parser.add_argument("--algorithms", nargs="+", default=list(NAMES))
    parser.add_argument("--search-only", action="store_true", help="choose the learning rates and stop")
    parser.add_argument("--report", action="store_true", help="train nothing: tell what has been trained")
    parser.add_argument("--figure", type=Path, help="draw the curves here (SVG or PNG)")
    wanted = parser.parse_args()
    out = wanted.out.absolute()
    os.environ |= {"OMP_NUM_THREADS": str(wanted.threads), "CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "disabled"}
    (out / "records").mkdir(parents=True, exist_ok=True)
    prepare(out)
    # grpo once more with every token after the prompt trained: masked against rollout mode.
    lines = [(name, "masked") for name in wanted.algorithms] + [("grpo", "rollout")] * ("grpo" in wanted.algorithms)
    searched = [
        Spec(name, mode, SEARCH_SEED, rate, SEARCH_STEPS, SEARCH_EVAL_STEPS, "val")
        for name, mode in lines
        for rate in LEARNING_RATES
    ]
    jobs = 0 if wanted.report else wanted.jobs
    search = collect(searched, out, jobs)
    rates = choose_rates(search)
    print(json.dumps(rates), file=sys.stderr, flush=True)
    if wanted.search_only:
        return
    specs = [
        Spec(spec.algorithm, spec.mode, seed, rates[spec.label], wanted.steps, EVAL_STEPS, "test", wanted.schedule)
        for spec in searched[:: len(LEARNING_RATES)]
        for seed in wanted.seeds
        if spec.label in rates
    ]
    records = collect(specs, out, jobs)
    told = rows(records)
    facts = {"date": datetime.now(UTC).date().isoformat(), "machine": platform.processor() or platform.machine()}
    whole = {"facts": facts, "rates": rates, "rows": told, "runs": records, "search": search}
    (out / "results.json").write_text(json.dumps(whole) + "\n")
    print(table(told))
    if wanted.figure:
        draw(records, wanted.figure)


if __name__ == "__main__":
    main()
