"""Trackio records a run's numbers on this machine."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from integrations.conftest import foreign

TRACKIO_RUN = """
import sys
from pathlib import Path
from emailrl.runs.log import Display, Tracker, check_services
from emailrl.settings import Settings, TrackingSettings

tracking = TrackingSettings(wandb_mode="disabled", trackio=True, wandb_project="mail")
check_services(tracking)
first = int(sys.argv[1])
run = Tracker(Path("run"), Settings(tracking=tracking), Display(), run_id="r7", mode="masked", step=first, evaluated=0)
for step in (first + 1, first + 2):
    run.step({"step": step, "loss": step / 4, "kl": float("nan"), "seconds": {"rollout": 2.5}}, "a line")
run.close()
"""


@pytest.mark.clients
def test_trackio_has_the_numbers_of_a_run_and_of_its_resumption(tmp_path: Path) -> None:
    python = foreign("trackio", "trackio==0.43.0")
    home = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio")}

    def told(*command: str) -> str:
        where: dict[str, Any] = {"cwd": tmp_path, "env": home, "capture_output": True, "text": True}
        done = subprocess.run([python, *command], timeout=120, **where)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    assert [told("-c", TRACKIO_RUN, first) for first in ("0", "2")] == ["", ""]
    asked = ("get", "metric", "--project", "mail", "--run", "r7", "--metric")
    values = json.loads(told("-m", "trackio.cli", *asked, "loss", "--json"))["values"]
    assert [(each["step"], each["value"]) for each in values] == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
    assert len(json.loads(told("-m", "trackio.cli", *asked, "seconds/rollout", "--json"))["values"]) == 4
