"""How many rollouts on-policy distillation takes to reach its teacher, and GRPO without one, with the packaged policy.

    python tests/benchmarks/distill.py --out distill --jobs 13

The teacher is trained as `emailrl quickstart` trains. Students start from the packaged policy, with quickstart's
settings but for `LINES`; runs of one seed ask the same questions in the same order. All answer the same questions of
the test worlds greedily, and what counts are the training rollouts up to the first evaluation within `MARGIN` of the
teacher. Runs are processes of one thread; GRPO does not wait for the teacher. `--jobs 0` tells of whatever there is, of
runs that were cut off too.
"""

from __future__ import annotations

import argparse
import json
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

EVAL_QUESTIONS = 100
MARGIN = 0.02
DEMO_SEED = 42
# Algorithm, rollouts of each of 8 questions, steps, steps between evaluations.
LINES = {"grpo": ("grpo", 6, 15, 1), "opd-1": ("opd", 1, 16, 4), "opd-2": ("opd", 2, 8, 2), "opd-6": ("opd", 6, 6, 1)}


@dataclass(frozen=True, slots=True)
class Spec:
    """One student."""

    algorithm: str
    rollouts: int
    steps: int
    eval_steps: int
    seed: int


def prepare(out: Path) -> None:
    """Write the demo mailbox, its questions, and a file of them in which those of the test worlds stand as `val`."""
    from emailrl.cli.quickstart import SETTINGS
    from emailrl.questions.load import questions_file, read_questions, write_demo, write_scenarios
    from emailrl.settings import DataSettings, StoreSettings

    (out / "emailrl.toml").write_text(SETTINGS.format(steps=15))
    if (out / "questions.jsonl").exists():
        return
    write_demo(out / "demo.db", settings=StoreSettings(), seed=DEMO_SEED, overwrite=True)
    questions = read_questions(questions_file(out / "demo.db"), DataSettings())
    train = questions.of("train", limit=None, seed=DEMO_SEED).scenarios
    test = questions.of("test", limit=EVAL_QUESTIONS, seed=DEMO_SEED).scenarios
    write_scenarios(out / "questions.jsonl", [*train, *(replace(one, split="val") for one in test)])


def train_teacher(out: Path) -> str:
    """Train the teacher, unless it is there, and measure it on the questions that measure students; its path."""
    from emailrl.checkpoints import find_checkpoint
    from emailrl.measure.benchmark import Subject, run_benchmark
    from emailrl.model.resolve import Adapter
    from emailrl.questions.load import read_questions
    from emailrl.settings import load_settings
    from emailrl.training.loop import train

    settings = load_settings({"output_dir": out / "teacher", "device": "cpu"}, cwd=out, environ={}, dotenv=False)
    run = train(settings, resume="auto", progress=lambda line: None).run_dir
    best = find_checkpoint(run / "best_model", out)
    if not (out / "teacher.json").exists():
        questions = read_questions(out / "questions.jsonl", settings.data).of("val", limit=None, seed=DEMO_SEED)
        subject = Subject("teacher", best.metadata.base_model, Adapter.of(best))
        report = run_benchmark([subject], questions.scenarios, settings, out / "benchmark", overwrite=True)
        (out / "teacher.json").write_text(json.dumps({"accuracy": report.results[0].evaluation.accuracy}))
    return str(best.path)


def train_student(spec: Spec, out: Path, teacher: str | None) -> None:
    """Train one student, without an early stop."""
    from emailrl.settings import load_settings
    from emailrl.settings.names import changed
    from emailrl.training.loop import train

    given: dict[str, Any] = {
        "questions": out / "questions.jsonl", "eval_dataset_size": 1000, "device": "cpu", "algorithm": spec.algorithm,
        "num_generations": spec.rollouts, "max_steps": spec.steps, "seed": spec.seed, "eval_steps": spec.eval_steps,
        "save_steps": 10_000, "output_dir": folder(spec, out), "teacher": teacher, "patience": 10_000,
    }  # fmt: skip
    settings = changed(load_settings(given, cwd=out, environ={}, dotenv=False), target_accuracy=2.0)
    train(settings, overwrite=True, progress=lambda line: None)


def folder(spec: Spec, out: Path) -> Path:
    return out / "runs" / f"{spec.algorithm}-{spec.rollouts}-seed{spec.seed}_masked"


def curve(spec: Spec, out: Path) -> list[dict[str, Any]]:
    """A student's evaluations so far: accuracy, and the training rollouts up to it."""
    from emailrl.records import read_records

    evaluations, metrics = (folder(spec, out) / f"{name}.jsonl" for name in ("evaluations", "metrics"))
    steps = list(read_records(metrics)) if metrics.exists() else []
    points = read_records(evaluations) if evaluations.exists() else ()
    return [
        {
            "rollouts": sum(step["num_trajectories"] for step in steps if step["step"] <= point["step"]),
            "accuracy": point["accuracy"],
        }
        for point in points
    ]


def table(level: float, curves: dict[Spec, list[dict[str, Any]]]) -> str:
    """Markdown, a row a line: by seed, the rollouts until the level and the best accuracy."""
    rows = ["| student | rollouts until the level, by seed | best accuracy, by seed |", "|---" * 3 + "|"]
    for line in dict.fromkeys((spec.algorithm, spec.rollouts) for spec in curves):
        runs = [points for spec, points in curves.items() if (spec.algorithm, spec.rollouts) == line and points]
        reached = [next((one["rollouts"] for one in run if one["accuracy"] >= level), "–") for run in runs]
        best = [f"{max(one['accuracy'] for one in run):.1%}" for run in runs]
        rows.append(f"| `{line[0]}`, 8 × {line[1]} | {', '.join(map(str, reached))} | {', '.join(best)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--lines", nargs="+", choices=LINES, default=list(LINES))
    wanted = parser.parse_args()
    out = wanted.out.absolute()
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "disabled"}
    out.mkdir(parents=True, exist_ok=True)
    prepare(out)
    specs = [Spec(*LINES[line], seed) for line in wanted.lines for seed in wanted.seeds]
    if wanted.jobs:
        todo = [spec for spec in specs if not (folder(spec, out) / "final").exists()]
        with ProcessPoolExecutor(wanted.jobs, mp_context=get_context("spawn")) as pool:
            taught = pool.submit(train_teacher, out)
            running = [pool.submit(train_student, spec, out, None) for spec in todo if spec.algorithm != "opd"]
            teacher = taught.result()
            running += [pool.submit(train_student, spec, out, teacher) for spec in todo if spec.algorithm == "opd"]
        for future in running:
            future.result()
    accuracy = json.loads((out / "teacher.json").read_text())["accuracy"]
    curves = {spec: curve(spec, out) for spec in specs}
    told = [{"line": spec.algorithm, "seed": spec.seed, "curve": points} for spec, points in curves.items()]
    (out / "curves.json").write_text(json.dumps({"teacher": accuracy, "students": told}, indent=1))
    print(f"Teacher {accuracy:.1%} of {EVAL_QUESTIONS} questions, level {accuracy - MARGIN:.1%}\n")
    print(table(accuracy - MARGIN, curves))


if __name__ == "__main__":
    main()
