"""Ctrl-C in a run, and going on after it."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from end_to_end.commands import begin, exit_code, interrupted
from end_to_end.conftest import MakeSettings, Options, settle
from same_run import assert_same_run

from emailrl.checkpoints import find_checkpoint
from emailrl.training import run as run_module
from emailrl.training.loop import TrainResult, train
from emailrl.training.update import Updater


@pytest.mark.parametrize(
    ("owner", "name", "saved"),
    [(run_module.TrainingRun, "collect", 2), (Updater, "train", 3), (run_module.TrainingRun, "measure", 4)],
    ids=["rollout", "update", "evaluation"],
)
def test_ctrl_c_saves_the_last_step_and_the_resumed_run_equals_the_uninterrupted(
    owner: Any, name: str, saved: int, finished: TrainResult, make_settings: MakeSettings
) -> None:
    settings = make_settings()
    said: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with interrupted(owner, name, at=3):
        train(settings, progress=said.append)
    assert signal.getsignal(signal.SIGINT) is before
    assert find_checkpoint("latest", settings.output.output_dir, "masked").metadata.step == saved
    assert f"Stopped after step {saved}" in said[-1]
    result = train(settings, resume="auto")
    drop = result.run_dir / "checkpoint-3"  # one more than the uninterrupted run saved, pruned with the others
    assert not drop.exists()
    assert_same_run(result.run_dir, finished.run_dir)


def test_ctrl_c_in_the_last_step_saves_the_end_and_is_not_swallowed(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    settings = make_settings(max_steps=1, export_dir=tmp_path / "export")
    said: list[str] = []
    with interrupted(Updater, "train"):
        train(settings, progress=said.append)
    assert sum(line.startswith("Done after step 1: ") for line in said) == 1 and "Stopped" not in "\n".join(said)
    assert said[-1].startswith("The run is complete and saved; skipped: ") and said[-1].endswith("the export.")
    latest = find_checkpoint("latest", settings.output.output_dir).metadata
    assert (latest.kind, latest.step) == ("final", 1)


def test_a_second_ctrl_c_stops_at_once_and_saves_nothing_more(make_settings: MakeSettings) -> None:
    settings = make_settings(save_steps=50)
    said: list[str] = []
    with interrupted(Updater, "train", times=2):
        train(settings, progress=said.append)
    assert any("stopping after this step" in line for line in said)
    assert find_checkpoint("latest", settings.output.output_dir).metadata.kind == "best"


def test_the_command_exits_130_when_interrupted_and_prints_its_result_when_resumed(
    options: Options, tmp_path: Path
) -> None:
    settle(tmp_path, options(tmp_path))
    child = begin(tmp_path, "train", "--max-steps", "500")
    metrics = tmp_path / "grpo_masked" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(child, signal.SIGINT)
    code, errors = exit_code(child), (tmp_path / "output.txt").read_text()
    assert code == 130, errors
    assert "Stopped after step" in errors and "interrupted" in errors and "Traceback" not in errors
    done = find_checkpoint("latest", tmp_path / "grpo").metadata.step
    code = exit_code(begin(tmp_path, "train", "--resume", "latest", "--max-steps", str(done + 1), "--json"))
    said = (tmp_path / "output.txt").read_text()
    assert code == 0 and f"Resuming at step {done} of {done + 1}" in said, said
    result = json.loads(said.splitlines()[-1])
    assert result.pop("steps_without_update") in range(done + 2)  # rewards may happen to be equal in any step
    assert result.pop("learned_nothing")
    run = str((tmp_path / "grpo_masked").absolute())
    assert result == {"run_dir": run, "best_accuracy": 0.0, "best_step": 0, "steps": done + 1}
