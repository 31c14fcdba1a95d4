"""Results are on stdout and nothing else is; with ``--json`` stdout is one line of JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from end_to_end.commands import begin, exit_code

QUICK = "--model nano --preset quick --max-steps 1 --eval-size 2 --wandb disabled"
RESULTS = {
    "gen-db --source demo --db new.db --overwrite": "1,589 emails stored",
    "gen-db --db demo.db": "already holds 1,589 emails",
    "gen-questions --db demo.db --limit 5 --out new.jsonl --overwrite": "5 questions in",
    "rollout --model nano --limit 1 --db demo.db": "mean reward",
    "benchmark --model nano --limit 1 --db demo.db": "=== Benchmark Results ===",
    f"train {QUICK} --db demo.db": "Done after step 1: all steps done.",
    "sft --model nano --max-steps 1 --batch-size 1 --eval-size 1 --out sft --wandb disabled": "Done after step 1",
    "ask budget? --inbox queha.timi@fibralt.example --model nano --db demo.db": "",
    "export --overwrite": "best_model →",
    "report --overwrite": "with email text",
    "checkpoints list": "best_model",
    "checkpoints show": "match their recorded hashes",
    "checkpoints prune --keep 9": "0 checkpoints removed",
    "plan --model nano --gpu CPU": "Memory",
    "doctor": "python",
    "trust --list": "",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    for command in ("gen-db --source demo --db demo.db", f"train {QUICK} --db demo.db"):
        assert exit_code(begin(folder, *command.split())) == 0, (folder / "output.txt").read_text()
    return folder


@pytest.mark.parametrize("command", RESULTS)
def test_results_go_to_stdout(emailrl, home: Path, monkeypatch, command: str) -> None:
    monkeypatch.chdir(home)
    code, out, said = emailrl(*command.split())
    assert code == 0, said
    assert RESULTS[command] in out and "Next: " not in out
    assert not RESULTS[command] or RESULTS[command] not in said
    code, out, said = emailrl(*command.replace("--out sft", "--out sft-json").split(), "--json")
    assert code == 0 and out.count("\n") == 1, (out, said)
    json.loads(out)
