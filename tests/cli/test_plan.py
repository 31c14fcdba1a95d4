"""The command that plans a run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from plan.planned import write_metrics

from emailrl.cli.app import app


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    monkeypatch.chdir(tmp_path)
    fits = CliRunner().invoke(app, ["plan", "--gpu", "H200", "--price", "3", "--json"])
    assert fits.exit_code == 0
    [line] = fits.stdout.splitlines()
    said = json.loads(line)
    assert said["fits"] and said["model"]["parameters"] == 14_768_307_200
    assert said["memory"]["peak"] == pytest.approx(
        max(said["memory"]["training_peak"], said["memory"]["sampling_peak"])
    )
    assert said["cost"] == pytest.approx(said["seconds"]["run"] * 3 / 3600, abs=0.01)
    write_metrics(tmp_path / "run")
    again = CliRunner().invoke(app, ["plan", "--model", "nano", "--run", "run", "--max-steps", "30", "--json"])
    assert json.loads(again.stdout)["seconds"]["run"] == 300
    elsewhere = CliRunner().invoke(app, ["plan", "--model", "nano", "--run", "run", "--gpu", "H200", "--json"])
    said = json.loads(elsewhere.stdout)
    assert said["seconds"]["measured"] is None and said["tokens"]["source"] == "measured"
    table = CliRunner().invoke(app, ["plan", "--gpu", "T4"])
    assert table.exit_code == 1
    assert "does not fit: " in table.stdout and "KV cache (sampling)" in table.stdout


@pytest.mark.parametrize(("gpus", "shown"), [("1", "1 GPU at 3.5 per GPU-hour"), ("8", "8 GPUs at 3.5 per GPU-hour")])
def test_the_cost_is_shown_with_what_it_is_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: str, shown: str
) -> None:
    from typer.testing import CliRunner

    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["plan", "--gpu", "H200", "--num-gpus", gpus, "--price", "3.5", "--preset", "quick"])
    [cost] = [line for line in done.stdout.splitlines() if line.startswith("  cost ")]
    assert cost.strip().split(maxsplit=2)[2] == shown


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--mfu", ("1e-308", "0", "-1", "1.5", "nan", "inf")),
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


@pytest.mark.parametrize("tflops", ["1" + 400 * "0", "0." + 320 * "0" + "1", "nan", "0"])
def test_a_described_card_has_a_finite_speed(emailrl, tflops: str) -> None:
    code, out, error = emailrl("plan", "--gpu", f"80 GiB, {tflops} TFLOP/s, 2 TB/s")
    assert (code, out) == (2, "") and error.startswith("error: Unknown GPU '80 GiB, ")


@pytest.mark.parametrize(
    ("option", "content", "code", "message"),
    [
        ("--questions", None, 2, "No such question file: named."),
        ("--db", None, 2, "No such mail database: named."),
        ("--db", "no database", 2, "named cannot be read as a mail database: file is not a database."),
    ],
)
def test_a_named_file_that_cannot_be_read_is_an_error(
    emailrl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, content: str | None, code: int, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("named").write_text(content)
    ended, out, error = emailrl("plan", "--gpu", "H200", option, "named")
    assert (ended, out) == (code, "") and error.startswith(f"error: {message}") and error.count("\n") == 1


def test_settings_may_name_files_that_a_run_will_have(emailrl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("emailrl.toml").write_text('db = "later.db"\nquestions = "later.jsonl"\n')
    code, out, _ = emailrl("plan", "--gpu", "H200", "--preset", "quick")
    assert code == 0 and "no question file at" in out and "later.jsonl" in out


def test_a_plan_has_no_more_gpus_than_it_can_divide(emailrl, tmp_path: Path) -> None:
    code, out, error = emailrl("plan", "--gpu", "H200", "--num-gpus", "1000000")
    assert (code, out) == (2, "")
    assert error == "error: A plan covers at most 1,024 GPUs. Lower --num-gpus or --nnodes.\n"


def test_planning_imports_nothing_heavy(tmp_path: Path) -> None:
    script = "from emailrl.cli.app import main; import sys; sys.argv = ['emailrl', 'plan', '--gpu', 'H200', '--json']\n"
    script += "try:\n    main()\nexcept SystemExit:\n    pass\n"
    script += "print(sorted({'torch', 'transformers', 'peft', 'datasets', 'vllm'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_examples_of_the_help_fit(emailrl, monkeypatch: pytest.MonkeyPatch) -> None:
    from emailrl.cli import plan

    monkeypatch.setenv("LORA_RANK", "8")
    examples = [line.split("emailrl plan ")[1] for line in (plan.__doc__ or "").splitlines() if "plan --gpu" in line]
    assert len(examples) == 4
    for example in examples:
        code, out, _ = emailrl("plan", *example.split())
        assert code == 0 and out.splitlines()[-1].startswith("fits: "), example


def test_every_count_has_separators(emailrl) -> None:
    code, out, _ = emailrl("plan", "--gpu", "H200", "--num-gpus", 8, "--nnodes", 128, "--price", 1)
    assert code == 0 and "1,024 GPUs" in out and re.search(r"(?<![,.])\b\d{4}", out) is None, out
