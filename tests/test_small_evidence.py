"""What the small model's evidence is packed into, and the settings of its runs."""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save_file

sys.path.insert(0, str(Path(__file__).parent / "gpu"))
import small_evidence
from small_curves import read
from small_evidence import Entry, pack
from small_model import settings_text


def lines(path: Path, *records: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def make_run(folder: Path, best: float, test: float | None = None) -> None:
    """A seed with ten SFT steps, two of RL and two evaluations; with ``test``, a benchmark of both policies too."""
    lines(
        folder / "outputs/sft/metrics.jsonl",
        *({"step": n, "val_loss": 0.05 if n == 10 else None} for n in range(1, 11)),
    )
    lines(folder / "outputs/grpo_masked/metrics.jsonl", {"step": 1, "accuracy": 0.5}, {"step": 2, "accuracy": 0.7})
    evaluations = ({"step": step, "accuracy": accuracy} for step, accuracy in ((0, 0.4), (2, best)))
    lines(folder / "outputs/grpo_masked/evaluations.jsonl", *evaluations)
    for name in ("sft", "grpo_masked"):
        adapter = folder / "outputs" / name / "best_model"
        adapter.mkdir()
        save_file({"a": torch.full((8, 8), best)}, adapter / "adapter_model.safetensors")
        for file in ("adapter_config.json", "tokenizer.json"):
            (adapter / file).write_text("{}")
    if test is not None:
        results = [{"accuracy": a, "accuracy_low": a - 0.04, "accuracy_high": a + 0.04} for a in (0.5, test)]
        (folder / "benchmark").mkdir()
        (folder / "benchmark/results.json").write_text(
            json.dumps({"results": results, "comparisons": [{"p_value": 0.001}]})
        )


def test_the_best_in_validation_comes_first_in_bf16_and_without_tokenizer(tmp_path: Path) -> None:
    work, out = tmp_path / "work", tmp_path / "out"
    make_run(work / "long/seed-1", best=0.6, test=0.8)
    make_run(work / "long/seed-2", best=0.5, test=0.9)
    shown = pack(work, out)
    assert (out / "table.txt").read_text() == shown
    first = (
        "| long-1 | 10 steps, val 0.0500 | 2 steps, sampled 60.0% → 60.0% | 40.0% at 0, 60.0% at 2 "
        "| 50.0% (46.0%–54.0%) → 80.0% (76.0%–84.0%), p = 0.001 | – |"
    )
    assert shown.splitlines()[2] == first and shown.splitlines()[3].startswith("| long-2 |")
    assert sorted(path.name for path in out.iterdir()) == [
        "adapter-1-long-1.tar.xz", "adapter-2-long-2.tar.xz", "results.tar.xz", "start-1-long-1.tar.xz",
        "start-2-long-2.tar.xz", "table.txt", "trajectories.tar",
    ]  # fmt: skip
    with tarfile.open(out / "adapter-1-long-1.tar.xz") as tar:
        assert sorted(tar.getnames()) == ["adapter_config.json", "adapter_model.safetensors"]
        weights = tar.extractfile("adapter_model.safetensors")
        assert weights is not None and load(weights.read())["a"].dtype == torch.bfloat16
    with tarfile.open(out / "results.tar.xz") as tar:
        names = tar.getnames()
    assert "long/seed-1/benchmark/results.json" in names and not any("tokenizer" in name for name in names)
    make_run(work / "short/seed-1", best=0.7)
    assert pack(work, out).splitlines()[2].startswith("| short-1 |")  # and the files follow
    assert "adapter-1-short-1.tar.xz" in {path.name for path in out.iterdir()}


def test_of_three_runs_the_third_start_is_one_file_too_many(tmp_path: Path) -> None:
    for seed, best in enumerate((0.9, 0.8, 0.7), 1):
        make_run(tmp_path / f"work/long/seed-{seed}", best=best)
    pack(tmp_path / "work", tmp_path / "out")
    kept = {path.name for path in (tmp_path / "out").iterdir()}
    assert len(kept) == small_evidence.MOST
    assert {"adapter-3-long-3.tar.xz", "start-2-long-2.tar.xz"} <= kept and "start-3-long-3.tar.xz" not in kept


def test_curves_are_named_by_variant_and_seed(tmp_path: Path) -> None:
    folder = tmp_path / "wide/seed-3/outputs/grpo_masked"
    lines(folder / "metrics.jsonl", {"step": 1, "seconds": {"total": 30}}, {"step": 2, "seconds": {"total": 60}})
    lines(folder / "evaluations.jsonl", {"step": 0, "accuracy": 0.4})
    found = read(folder)
    assert (found.name, found.minutes) == ("wide-3", {0: 0.0, 1: 0.5, 2: 1.5})


def test_what_does_not_fit_is_left_out(tmp_path: Path, monkeypatch: Any) -> None:
    make_run(tmp_path / "work/long/seed-1", best=0.6)
    monkeypatch.setattr(small_evidence, "LARGEST", 10)
    pack(tmp_path / "work", tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["table.txt", "trajectories.tar"]


def test_an_entry_of_the_plan_and_the_settings_it_changes() -> None:
    assert Entry.read("0:long:1,2") == Entry("0", "long", ["1", "2"], [])
    entry = Entry.read("1:short:3:sft_steps=150,learning_rate=3e-4")
    assert entry == Entry("1", "short", ["3"], ["sft_steps=150", "learning_rate=3e-4"])
    lines = settings_text(Path("/base"), Path("/data"), "3", entry.changes).splitlines()
    assert [line for line in lines if line.startswith(("sft_steps", "learning_rate", "seed"))] == [
        "seed = 3", "sft_steps = 150", "learning_rate = 3e-4",
    ]  # fmt: skip
