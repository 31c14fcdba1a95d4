"""The command that plans a run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from plan.planned import write_metrics

from emailrl.cli import plan


def test_the_command(emailrl, tmp_path: Path) -> None:
    code, out, _ = emailrl("plan", "--gpu", "H200", "--price", "3", "--json")
    said = json.loads(out)
    assert code == 0 and out.count("\n") == 1 and said["fits"] and said["model"]["parameters"] == 14_768_307_200
    peaks = said["memory"]["training_peak"], said["memory"]["sampling_peak"]
    assert said["memory"]["peak"] == pytest.approx(max(peaks))
    assert said["cost"] == pytest.approx(said["run_seconds"] * 3 / 3600) and said["seconds"]["step"] > 0
    write_metrics(tmp_path / "run")
    again = emailrl("plan", "--model", "nano", "--run", "run", "--max-steps", "30", "--json")[1]
    assert json.loads(again)["run_seconds"] == 300
    elsewhere = json.loads(emailrl("plan", "--model", "nano", "--run", "run", "--gpu", "H200", "--json")[1])
    assert elsewhere["measured"] is None and elsewhere["tokens"]["source"] == "measured"
    out = emailrl("plan", "--gpu", "H200", "--num-gpus", "8", "--price", "3.5", "--preset", "quick")[1]
    [cost] = [line.rstrip() for line in out.splitlines() if line.startswith("  cost ")]
    assert cost.endswith(" 8 GPUs at 3.5 per GPU-hour")
    code, table, _ = emailrl("plan", "--gpu", "T4")
    assert code == 1 and "does not fit: " in table and "KV cache (sampling)" in table


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--price", ("1e308", "-1", "nan", "inf")),
        ("--network", ("1e308", "0", "-1", "nan", "inf")),
        ("--trainable-share", ("1.5", "-1", "nan", "inf")),
    ],
)
def test_a_number_without_a_finite_plan_is_an_error(emailrl, option: str, values: tuple[str, ...]) -> None:
    for value in values:
        code, out, error = emailrl("plan", "--gpu", "H200", option, value)
        assert (code, out) == (2, "") and error.startswith(f"error: Invalid value for '{option}': '{value}'")
    assert emailrl("plan", "--gpu", "H200", option, "0.5")[0] == 0


def test_settings_may_name_files_that_a_run_will_have(emailrl, tmp_path: Path) -> None:
    (tmp_path / "emailrl.toml").write_text('db = "later.db"\nquestions = "later.jsonl"\n')
    code, out, _ = emailrl("plan", "--gpu", "H200", "--preset", "quick")
    assert code == 0 and "no question file at" in out and "later.jsonl" in out


def test_planning_imports_nothing_heavy(tmp_path: Path) -> None:
    script = "from emailrl.cli.app import main; import sys; sys.argv = ['emailrl', 'plan', '--gpu', 'H200', '--json']\n"
    script += "try:\n    main()\nexcept SystemExit:\n    pass\n"
    script += "print(sorted({'torch', 'transformers', 'peft', 'datasets', 'vllm'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_examples_of_the_help_fit_and_every_count_has_separators(emailrl) -> None:
    lines = [line for line in (plan.__doc__ or "").splitlines() if "--gpu" in line and "--json" not in line]
    examples = [line.split("emailrl plan ")[1] for line in lines if "plan " in line]
    assert len(examples) == 2
    for example in examples:
        code, out, _ = emailrl("plan", *example.split())
        assert code == 0 and out.splitlines()[-1].startswith("fits: "), example
    code, out, _ = emailrl("plan", "--gpu", "H200", "--num-gpus", 8, "--nnodes", 128, "--price", 1)
    assert code == 0 and "1,024 GPUs" in out and re.search(r"(?<![,.])\b\d{4}", out) is None, out
