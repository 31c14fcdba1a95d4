"""What a run sends where; no tracking service is ever reached from here."""

from __future__ import annotations

import errno
import subprocess
import sys
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, call

import pytest
from full_disk import on_a_full_disk
from pydantic import SecretStr
from runs.run_files import evaluation

from emailrl.base.errors import UsageError
from emailrl.page.results import read_object
from emailrl.records import read_records
from emailrl.runs import log
from emailrl.runs.log import Display, Tracker, pace, silent
from emailrl.settings import RewardSettings, Settings, TrackingSettings

OFF = TrackingSettings(wandb_mode="disabled")


def tracked(folder: Path, settings: Settings, say: Any = silent, run_id: str = "r", step: int = 0) -> Tracker:
    return Tracker(folder, settings, Display(say), run_id=run_id, mode="masked", step=step, evaluated=step)


def test_the_pace_of_the_steps_done_is_that_of_those_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.perf_counter", iter([100.0, 130.0]).__next__)
    assert pace(10)(12, 20) == 120  # 2 steps took 30 s, 8 are left


# -- files

LOG = """
from pathlib import Path
from emailrl.runs.log import open_log
import logging
open_log(Path(sys.argv[1]), verbose=False)
for _ in range(3):
    logging.getLogger("emailrl.training").info("a line of more than thirty characters")
"""


def test_a_log_that_does_not_fit_on_the_disk_is_an_error_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "training.log"
    assert on_a_full_disk(100, LOG, path) == f"{errno.EFBIG} {path}"


def test_metrics_and_evaluations_go_on_after_the_step_that_was_resumed(tmp_path: Path) -> None:
    for start in (0, 2):
        tracker = tracked(tmp_path, Settings(tracking=OFF), step=start)
        for step in (start + 1, start + 2, start + 3):
            tracker.step({"step": step, "start": start}, "a line")
        tracker.evaluation(evaluation(1, 2, step=start + 3))
        tracker.close()
    recorded = [(line["step"], line["start"]) for line in read_records(tmp_path / "metrics.jsonl")]
    assert recorded == [(1, 0), (2, 0), (3, 2), (4, 2), (5, 2)]
    evaluations = list(read_records(tmp_path / "evaluations.jsonl"))
    assert [(line["step"], line["accuracy"]) for line in evaluations] == [(5, 0.5)]


# -- services


def begin(monkeypatch: pytest.MonkeyPatch, mode: Any, tmp_path: Path, *, login: Any, init: Any = None) -> Any:
    """A tracker of the run ``run-7``, the stub that stands for W&B, and what was said."""
    stub = MagicMock()
    stub.errors.Error = Error
    stub.login.side_effect = [login]
    stub.init.side_effect = init
    monkeypatch.setitem(sys.modules, "wandb", stub)
    said: list[str] = []
    settings = Settings(
        tracking=TrackingSettings(wandb_mode=mode, wandb_entity="team"),
        rewards=RewardSettings(openrouter_api_key=SecretStr("sk-secret"), judge_base_url="https://me:pw@host/v1"),
    )
    return tracked(tmp_path, settings, said.append, run_id="run-7"), stub, said


class Error(Exception):
    """W&B's own."""


def test_wandb_online_takes_the_runs_id_and_no_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run, stub, said = begin(monkeypatch, "online", tmp_path, login=True)
    options = stub.init.call_args.kwargs
    assert (options["mode"], options["id"], options["resume"]) == ("online", "run-7", "allow")
    assert (options["project"], options["entity"], options["name"]) == ("email-agent-grpo", "team", "grpo-masked")
    assert "sk-secret" not in str(options) and "pw" not in str(options["config"]["rewards"]["judge_base_url"])
    assert options["config"]["training"]["max_steps"] == 200 and said == []
    run.step({"step": 3, "loss": None, "kl": float("nan"), "seconds": {"rollout": 2.5}, "name": "x"}, "a line")
    run.close()
    assert stub.login.call_args == call(prompt=False)
    assert stub.init.return_value.method_calls == [
        call.log({"step": 3.0, "seconds/rollout": 2.5}, step=3),
        call.finish(),
    ]


@pytest.mark.parametrize(
    ("mode", "login", "init", "reason"),
    [
        ("online", False, None, "not logged in"),
        ("online", Error("no network"), None, "no network"),
        ("online", True, [Error("timed out\nmore"), MagicMock()], "timed out"),
        ("offline", RuntimeError("must not be asked"), None, None),
    ],
)
def test_wandb_without_login_or_network_goes_on_offline_and_says_so_once(
    mode: str, login: Any, init: Any, reason: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, stub, said = begin(monkeypatch, mode, tmp_path, login=login, init=init)
    assert stub.init.call_args.kwargs["mode"] == "offline" and len(said) == (reason is not None)
    assert all(line.startswith(f"W&B logs offline: {reason}.") and "wandb sync" in line for line in said)
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it would raise
    tracked(tmp_path, Settings(tracking=OFF)).close()


def test_a_real_offline_run_is_written_here_and_runs_no_command_that_a_folders_git_configuration_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "hook").write_text(f"#!/bin/sh\ntouch {tmp_path}/PWNED\n")
    (tmp_path / "hook").chmod(0o755)
    git("init")
    git("config", "core.fsmonitor", "./hook")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SAVE_CODE", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = tracked(tmp_path, Settings(tracking=TrackingSettings(wandb_mode="offline")), run_id="run-9")
    run.step({"step": 1, "loss": 1.0}, "a line")
    run.close()
    assert list((tmp_path / "wandb").glob("offline-run-*-run-9/run-run-9.wandb"))
    assert not (tmp_path / "PWNED").exists()
    git("status")
    assert (tmp_path / "PWNED").exists()  # it would have been


@pytest.mark.parametrize("name", ["tensorboard", "trackio"])
def test_a_tracker_without_its_package_is_a_clear_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emailrl.base.install.find_spec", lambda found: None if found == name else found)
    log.check_services(OFF)
    with pytest.raises(UsageError, match=rf"needs {name}, .*pip install '?{name}"):
        log.check_services(TrackingSettings(**{name: True}))


def test_tensorboard_gets_every_number_and_hides_steps_done_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = MagicMock()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    settings = Settings(tracking=TrackingSettings(wandb_mode="disabled", tensorboard=True))
    tracker = tracked(tmp_path, settings, step=4)
    tracker.step({"step": 5, "loss": 0.5, "eval_accuracy": 0.1}, "a line")
    tracker.close()
    assert module.SummaryWriter.call_args == call(str(tmp_path / "tensorboard"), purge_step=5)
    added = [call.add_scalar("step", 5.0, 5), call.add_scalar("loss", 0.5, 5)]
    assert module.SummaryWriter.return_value.method_calls == [*added, call.close()]


@pytest.mark.parametrize(
    ("raised", "noted", "state", "reason"),
    [
        (None, "all steps done", "finished", "all steps done"),
        (KeyboardInterrupt(), None, "interrupted", None),
        (ValueError("no\nluck"), None, "failed", "no"),
        (KeyboardInterrupt(), "all steps done", "finished", "all steps done"),  # while the best model is confirmed
    ],
)
def test_the_status_says_how_far_a_run_is_and_how_it_ended(
    tmp_path: Path, raised: BaseException | None, noted: str | None, state: str, reason: str | None
) -> None:
    with (
        pytest.raises(BaseException) if raised else nullcontext(),
        closing(tracked(tmp_path, Settings(tracking=OFF))) as tracker,
    ):
        tracker.display.start(tmp_path, 2, 9)
        tracker.display.phase("val rollouts of step 2", 30)
        now = read_object(tmp_path / "status.json")
        assert (now["state"], now["step"], now["steps"], now["rollouts"]) == ("running", 2, 9, 30)
        tracker.step({"step": 3}, "line", 60.0)
        now = read_object(tmp_path / "status.json")
        assert now["step"] == 3 and 59 < now["end"] - now["at"] <= 60.1
        if noted:
            tracker.display.ended(noted)
        if raised:
            raise raised
    now = read_object(tmp_path / "status.json")
    assert (now["state"], now["reason"], now["phase"]) == (state, reason, None)
