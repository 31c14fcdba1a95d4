"""``docs/reference/metrics.md`` explains every field that a run's files have, and no other: held against real files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from documents.pages import DOCS

from emailrl.records import read_records

PAGE = (DOCS / "reference/metrics.md").read_text(encoding="utf-8")
METRICS_OF_A_BENCHMARK = set(re.findall(r"`(\w+)`", (DOCS / "guides/benchmark.md").read_text(encoding="utf-8")))
Record = dict[str, Any]


def section(title: str, level: str = "##") -> str:
    """A section of the page, with those below it."""
    [text] = re.findall(rf"^{level} {re.escape(title)}\n(.*?)(?=^{level} |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return text


def fields(text: str) -> set[str]:
    """The names in the first column of the tables."""
    cells = re.findall(r"^\| (`.+?) \|", text, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which PPO, a benchmark of several samples and SFT ran for a step, with every optional metric on."""
    from emailrl.checkpoints import find_checkpoint
    from emailrl.measure.benchmark import Subject, run_benchmark
    from emailrl.model.resolve import Adapter
    from emailrl.questions.load import questions_file, read_questions, write_demo
    from emailrl.settings import StoreSettings, load_settings
    from emailrl.sft.loop import sft
    from emailrl.training.loop import train

    folder = tmp_path_factory.mktemp("metrics")
    write_demo(folder / "demo.db", seed=42, settings=StoreSettings())
    settings = load_settings(
        {
            **{"model_name": "nano", "db": folder / "demo.db", "questions": questions_file(folder / "demo.db")},
            **{"max_turns": 4, "max_tokens": 96, "judge": "offline", "wandb_mode": "disabled", "temperature": 1.0},
            **{"max_steps": 1, "per_device_train_batch_size": 2, "num_generations": 2, "eval_dataset_size": 2},
            **{"eval_steps": 1, "train_dataset_size": 10},
            **{"algorithm": "ppo", "importance_correction": "tis", "sft_steps": 1, "sft_batch_size": 2},
            **{"eval_temperature": 0.7, "bench_samples": 2, "output_dir": folder / "run"},
        },
        cwd=folder,
        environ={},
    )
    train(settings)
    best = find_checkpoint("best", settings.output.output_dir)
    chosen = read_questions(settings.data.questions, settings.data).of("test", limit=2, seed=1)
    subjects = [Subject("best", "nano", Adapter.of(best)), Subject("nano", "nano")]
    run_benchmark(subjects, chosen.scenarios, settings, folder / "measured")
    sft(settings, out=folder / "sft")
    return folder


def read(path: Path) -> Record:
    """The first or only record of a file."""
    return next(iter(read_records(path))) if path.suffix == ".jsonl" else json.loads(path.read_text(encoding="utf-8"))


def named(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text))


def test_files_of_training(home: Path) -> None:
    run = home / "run_masked"
    step = read(run / "metrics.jsonl")
    own = {name for name in step if not name.startswith("eval_")} - {"dropped", "seconds"}
    elsewhere = {"teacher_kl", "peak_memory_gib", "gpu_memory_gib"}  # with a teacher, on a GPU
    assert own | elsewhere == fields(section("The update", "###")) | fields(section("The rollouts", "###"))
    assert set(step["dropped"]) == fields(section("dropped", "###"))
    assert set(step["seconds"]) == fields(section("seconds", "###").partition("\n## ")[0])
    evaluations = [*read_records(run / "evaluations.jsonl"), read(run / "confirmed.json")]
    evaluations.append({name.removeprefix("eval_"): None for name in step if name.startswith("eval_")})
    assert {name for each in evaluations for name in each} - {"step"} <= METRICS_OF_A_BENCHMARK
    metadata = read(run / "best_model" / "metadata.json")
    assert set(metadata) == fields(section("metadata.json")) and "evaluated_step" in metadata["metrics"]


def test_trajectories_and_what_training_adds(home: Path) -> None:
    trajectory = read(home / "run_masked" / "trajectories" / "step-000001.jsonl")
    own, turn = section("trajectories/").split("\nA turn:\n")
    assert set(trajectory) == fields(own) - {"samples"}
    assert set(trajectory["turns"][0]) == fields(turn)
    assert {name for message in trajectory["messages"] for name in message} <= named(own)
    assert set(trajectory["rubric"]) - {"offline_correct"} <= METRICS_OF_A_BENCHMARK
    added = list(read_records(home / "run_masked" / "training" / "step-000001.jsonl"))
    text = section("training/")
    assert {name for record in added for name in record} == fields(text)
    assert {name for record in added for sample in record["samples"] for name in sample} <= named(text)


def test_results_of_a_benchmark_and_metrics_of_sft(home: Path) -> None:
    results, text = read(home / "measured" / "results.json"), section("results.json")
    assert {*results, *results["comparisons"][0]} <= named(text)
    assert set(results["results"][0]) - METRICS_OF_A_BENCHMARK <= fields(text) <= set(results["results"][0])
    step, text = read(home / "sft" / "metrics.jsonl"), section("metrics.jsonl of sft")
    assert set(step) == fields(text) and set(step["seconds"]) <= named(text)


def test_labels_of_the_log(home: Path) -> None:
    """A label is what stands before a colon at the start of a line or after a bar."""
    log = (home / "run_masked" / "training.log").read_text(encoding="utf-8")
    lines = [line.split(" INFO ", 1)[-1] for line in log.splitlines()]
    end = next(number for number, line in enumerate(lines) if line.startswith("Done after"))
    shown = {label for line in lines[:end] for label in re.findall(r"(?:^|\| )([A-Z][A-Za-z ]+): ", line)}
    labels = set(
        re.findall(r"`([^`]+?)(?:: [^`]*)?`", section("The console and training.log").partition("A run prints")[2])
    )
    assert {"Loss", "Reward", "Average reward", "Eval accuracy", "Mode"} <= shown
    assert shown - labels <= {"Note", "Starting training"}
