"""Every error is one line with a remedy, a code that names its kind, and an exit code."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from emailrl.base.errors import EmailRLError
from emailrl.cli.app import app

CAUSES = {
    "no-database": [
        *(f"{each} --db none.db" for each in ("rollout", "benchmark", "train", "gen-questions", "ask When?", "plan")),
        "rollout --db link.db",
    ],
    "no-questions": [f"{command} --questions none.jsonl" for command in ("rollout", "benchmark", "train", "plan")]
    + ["rollout --questions pipe.jsonl"],
    "no-checkpoint": [f"{command} --checkpoint nowhere" for command in ("rollout", "benchmark", "export", "ask When?")],
    "nothing-to-resume": [
        *("rollout --resume", "benchmark --resume", "rollout --resume --out a.jsonl", "benchmark --resume --out a")
    ],
    "exists": ["rollout --out mail.db", "gen-questions --out mail.db"],
    "not-a-file": ["rollout --out model", "gen-questions --out model"],
    "invalid-setting": ["train --mode maskd", "rollout --engine llama", "gen-db --source demo --db .", "sft --db /"],
    "usage": [
        *("rollout --split train", "rollout --model nanno", "train --model nanno"),
        *("rollout --resume --overwrite", "benchmark --resume --overwrite", "sft --out model"),
        *("benchmark --out mail.db", "quickstart --out mail.db"),
        *("benchmark --model 'no such model'", "ask --json"),
        *("train --preset tiny", "train --from-openrlhf '--kl_estimater k3'", "plan --gpu H900", "plan --run model"),
        *("ask ''", "ask 'post\udcff'", "ask When? --db mail.db --inbox an@example.com"),
        *("ask When? --checkpoint best --model nano", "ask When? --checkpoint best --engine openai"),
        *("mcp --host 0.0.0.0", "mcp --port 8080"),
        *(f"gen-questions {option}" for option in ("--dry-run", "--yes", "--max-cost 1", "--generator-model m")),
        *("inspect-trajectory --list --follow", "inspect-trajectory --redact", "view emailrl.toml"),
        *("trust nowhere", "checkpoints list nowhere", "view nowhere", "report nowhere", "gen-db --source nowhere"),
    ],
}


@pytest.mark.parametrize(("code", "line"), [(code, line) for code, lines in CAUSES.items() for line in lines])
def test_every_error_is_one_line_with_a_remedy(code: str, line: str, here: Path, monkeypatch) -> None:
    monkeypatch.chdir(here)
    (here / "link.db").symlink_to("gone.db")
    os.mkfifo(here / "pipe.jsonl")
    with pytest.raises(EmailRLError) as caught:
        app(shlex.split(line), prog_name="emailrl", standalone_mode=False)
    error = caught.value
    assert (error.code, error.exit_code) == (code, 2)
    assert (error.hint or "should be" in error.message) and "\n" not in str(error)


@pytest.mark.parametrize(
    ("command", "planted"),
    [
        ("rollout", "rollouts/rollout-001.conditions.json"), ("rollout", "rollouts/rollout-001.jsonl"),
        ("benchmark", "benchmarks/2026/results.json"),
    ],
)  # fmt: skip
def test_nothing_waits_for_a_pipe_in_the_place_of_what_is_resumed(
    command: str, planted: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(here)
    pipe = here / "outputs" / planted
    pipe.parent.mkdir(parents=True)
    for name in ("rollout-001.conditions.json", "conditions.json"):
        (pipe.parent / name).write_text('{"num_questions": 1, "num_generations": 1}')
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    with pytest.raises(EmailRLError, match="is a device or pipe"):
        app([command, "--resume"], prog_name="emailrl", standalone_mode=False)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("max_step = 3", "unknown-setting"),
        ("[trainng]\nmax_steps = 3", "unknown-setting"),
        ("max_steps = 0", "invalid-setting"),
        ('judge_base_url = "https://example.org/v1"', "untrusted"),
    ],
)
def test_errors_of_a_settings_file(text: str, code: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "emailrl.toml").write_text(text)
    with pytest.raises(EmailRLError) as caught:
        app(["train"], prog_name="emailrl", standalone_mode=False)
    assert (caught.value.code, caught.value.exit_code) == (code, 2)
