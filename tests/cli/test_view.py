"""``emailrl view`` as a user starts it: waits for a trajectory, prints an address that answers, ends on Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from two_turns import trajectory

from emailrl.recording import write_trajectories
from emailrl.trajectory import Trajectory

__all__ = ["trajectory"]


def test_it_serves_the_newest_run_until_it_is_interrupted(tmp_path: Path, trajectory: Trajectory) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "emailrl", "view"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout and process.stderr
    try:
        assert process.stderr.readline() == "Waiting for the first trajectory in outputs ...\n"
        time.sleep(0.2)
        write_trajectories(tmp_path / "outputs" / "grpo_masked" / "trajectories" / "step-000001.jsonl", [trajectory])
        address = process.stdout.readline().strip()
        with urllib.request.urlopen(address.replace("/?", "/data/run.json?"), timeout=10) as response:
            run = json.load(response)
        assert (run["title"], run["total"]) == ("grpo_masked", 1)
    finally:
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=30)
    assert process.returncode == 0
    assert rest == ("", "Serving outputs/grpo_masked on this machine only; Ctrl-C ends it.\nStopped.\n")


@pytest.mark.parametrize(
    ("arguments", "line"), [(["nowhere"], "No such file or folder: nowhere."), (["--port", "x"], "--port")]
)
def test_wrong_arguments_end_in_one_line(emailrl, arguments: list[str], line: str) -> None:
    code, out, error = emailrl("view", *arguments)
    assert (code, out) == (2, "") and line in error and error.count("\n") == 1
