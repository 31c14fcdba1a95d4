"""Where torch is missing, what needs no model runs, and what needs one says how to install it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import make_checkpoint, make_model

from emailrl.questions.load import questions_file, read_jsonl, write_demo
from emailrl.settings import StoreSettings

BLOCKED = "raise ImportError('torch is blocked')\n"
ALL_IN_ONE = """
import sys
from emailrl.cli.app import main

commands = sys.argv[1:]
for command in commands:
    sys.argv = ["emailrl", *command.split()]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, command
print(len(commands), "ran")
"""
"""What a process has imported stays, but an import that failed is tried again by the next command."""


@pytest.fixture
def folder(emailrl, tmp_path: Path) -> Path:
    write_demo(tmp_path / "mail.db", settings=StoreSettings(), seed=42)
    play = ("--model", "nano", "--db", "mail.db", "--limit", "1", "--num-generations", "1", "--out", "played.jsonl")
    assert emailrl("rollout", *play)[0] == 0
    make_checkpoint(tmp_path / "outputs/grpo_masked/best_model", make_model(tmp_path / "model"))
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked/torch.py").write_text(BLOCKED)
    return tmp_path


def test_commands_without_a_model_never_import_torch(folder: Path) -> None:
    inbox = read_jsonl(questions_file(folder / "mail.db")).__next__().inbox_address
    commands = [
        "gen-db --source demo --db other.db",
        "gen-questions --db other.db --out q.jsonl --limit 5",
        "inspect-trajectory played.jsonl",
        "report played.jsonl --html page.html",
        "convert played.jsonl --to atif",
        "checkpoints list",
        "checkpoints show best",
        "export --questions mail_questions.jsonl --out dataset",
        "publish-env verifiers --out package",
        "plan --help",
        f"forget --inbox {inbox} --dry-run",
    ]
    done = subprocess.run(
        [sys.executable, "-c", ALL_IN_ONE, *commands], cwd=folder, capture_output=True, text=True, timeout=600,
        env=os.environ | {"PYTHONPATH": str(folder / "blocked")},
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.endswith(f"{len(commands)} ran\n"), done.stderr[-1500:]


@pytest.mark.parametrize(
    "problem", ["ModuleNotFoundError(\"No module named 'torch'\", name='torch')", "ImportError('libx')"]
)
def test_commands_with_a_model_end_in_one_line(folder: Path, problem: str) -> None:
    (folder / "blocked/torch.py").write_text(f"raise {problem}\n")
    inbox = read_jsonl(questions_file(folder / "mail.db")).__next__().inbox_address
    play = "--model nano --db mail.db"
    commands = [
        f"rollout {play} --out other.jsonl",
        "quickstart --max-steps 1 --no-open",
        f"ask Why? {play} --inbox {inbox}",
        f"train {play} --max-steps 1",
        f"sft {play} --max-steps 1",
        f"benchmark {play}",
        "export --format merged --out merged",
    ]
    advice = " -m pip install 'torch" if "Module" in problem else "libx. Run: emailrl doctor"
    told = {command: run(command, folder) for command in commands}
    assert all(done.returncode == 1 for done in told.values()), told
    said = {command: done.stderr.splitlines() for command, done in told.items()}
    assert [lines for lines in said.values() if not (lines[-1].startswith("error: ") and advice in lines[-1])] == []
    assert "Traceback" not in str(said)


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(folder / "blocked"), "WANDB_MODE": "disabled"}
    words = [sys.executable, "-m", "emailrl", *command.split()]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
