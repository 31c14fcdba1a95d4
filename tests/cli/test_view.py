"""``emailrl view`` as a user starts it: prints an address that answers, ends on Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from emailrl.page.place import newest_made
from emailrl.records import write_trajectories
from emailrl.records.trajectory import Trajectory


@pytest.mark.parametrize("run", [None, "outputs/grpo_masked"])
def test_it_serves_a_run_until_it_is_interrupted(emailrl, tmp_path: Path, trajectory: Trajectory, run) -> None:
    (tmp_path / "outputs" / "grpo_masked").mkdir(parents=True)
    code, _, error = emailrl("view", *([run] if run else []))
    assert code == 2 and error.startswith("error: No ") and (run or "outputs") in error and error.count("\n") == 1
    write_trajectories(tmp_path / "outputs" / "grpo_masked" / "trajectories" / "step-000001.jsonl", [trajectory])
    command = [sys.executable, "-m", "emailrl", "view", *([run] if run else [])]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout and process.stderr
    try:
        address = process.stdout.readline().strip()
        with urllib.request.urlopen(address.replace("/?", "/data/run.json?"), timeout=300) as response:
            run = json.load(response)
        assert (run["title"], run["total"]) == ("grpo_masked", 1)
    finally:
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=300)
    assert process.returncode == 0
    assert rest == ("", "Serving outputs/grpo_masked on this machine only; Ctrl-C ends it.\nStopped.\n")


def test_a_benchmark_is_not_the_newest_run(emailrl, tmp_path: Path, trajectory: Trajectory) -> None:
    for number, folder in enumerate(("grpo_masked", "benchmarks/20260101")):  # the benchmark's are newer
        made = tmp_path / "outputs" / folder / "trajectories" / "nano.jsonl"
        write_trajectories(made, [trajectory])
        os.utime(made, (number, number))
    assert newest_made(Path("outputs/grpo")) == Path("outputs/grpo_masked")
    assert emailrl("report")[2] == "Newest: outputs/grpo_masked\n"
    code, out, said = emailrl("inspect-trajectory")
    file = "outputs/benchmarks/20260101/trajectories/nano.jsonl"
    assert code == 0 and f"inspect-trajectory {file} --index 0 --verbose" in said and file in out
