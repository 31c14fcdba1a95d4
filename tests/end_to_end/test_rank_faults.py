"""Ranks that die, hang or are asked to stop, in real processes under torchrun's agent: one line, in bounded time."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from end_to_end.conftest import Options, settle
from safetensors.torch import load_file

from emailrl.checkpoints import list_checkpoints, newest_run
from emailrl.records import read_records
from emailrl.settings import load_settings
from emailrl.training.loop import train

pytestmark = pytest.mark.slow

EXACT = {"lora_dropout": 0.0, "warmup_steps": 0, "learning_rate": 1e-3, "num_mini_batches": 1, "save_steps": 1}
LIMIT = 20
"""RANK_TIMEOUT in seconds."""


@dataclass
class Started:
    """A command with ranks."""

    process: subprocess.Popen[str]
    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / "grpo_masked"

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes of the ranks."""
        found = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            environment = child.environ()
            if "RANK" in environment:
                found[int(environment["RANK"])] = child
        return found

    def wait_for_steps(self, count: int) -> None:
        """Wait until so many steps are recorded."""
        metrics, end = self.run / "metrics.jsonl", time.monotonic() + 300
        while time.monotonic() < end and self.process.poll() is None:
            if metrics.exists() and metrics.read_text().count("\n") >= count:
                return
            time.sleep(0.05)
        raise AssertionError(f"{count} steps never came: {self.finish(1)}")

    def finish(self, seconds: float = 300) -> tuple[int, str]:
        """Wait for the end: exit code, and what it printed."""
        try:
            _, said = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            _, said = self.process.communicate()
            raise AssertionError(f"not at its end after {seconds:g} s: {said[-2000:]}") from None
        return self.process.returncode, said


Start = Callable[..., Started]


@pytest.fixture
def start(options: Options, tmp_path: Path) -> Iterator[Start]:
    """Begin ``emailrl train`` in a folder, as three ranks unless ``how`` says otherwise; settings by name."""
    begun: list[Started] = []

    def run(*how: str, launcher: tuple[str, ...] = (), **changes: Any) -> Started:
        given = options(tmp_path, **EXACT | {"max_steps": 500, "per_device_train_batch_size": 1} | changes)
        settle(tmp_path, given | {"rank_timeout": LIMIT})
        command = [*(launcher or (sys.executable, "-m", "emailrl")), "train", *how]
        process = subprocess.Popen(
            command, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True
        )
        begun.append(Started(process, tmp_path))
        return begun[-1]

    yield run
    for one in begun:
        left = [*psutil.Process(one.process.pid).children(recursive=True)] if one.process.poll() is None else []
        for process in (*left, one.process):
            process.kill()


def assert_none_left(folder: Path, before: dict[int, psutil.Process]) -> None:
    """No rank lives on, not even stopped."""
    _, alive = psutil.wait_procs(before.values(), timeout=300)
    assert not alive, f"{alive} in {folder}"


def errors_in(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("error:")]


def steps_saved(run: Path) -> int:
    return max(item.metadata.step for item in list_checkpoints(run))


@pytest.mark.parametrize(("which", "killed"), [(0, True), (2, True), (0, False), (1, False)])
def test_a_rank_that_dies_or_hangs_ends_all_with_one_line_within_the_limit(
    which: int, killed: bool, start: Start
) -> None:
    running = start("--nproc", "3")
    running.wait_for_steps(2)
    ranks = running.ranks()
    ranks[which].kill() if killed else ranks[which].suspend()
    code, said = running.finish(LIMIT + 300)
    (line,) = errors_in(said)
    # A connection that another rank closed may come before the limit.
    what = rf"did not answer within {LIMIT} s|stopped responding|ended or stopped responding|was ended by SIGKILL"
    assert code == 1 and re.search(rf"Rank {which} .*({what})", line) and "Traceback" not in said
    assert said.count(f"Rank {which} was ended by SIGKILL. The host may be out of memory.") == killed
    assert_none_left(running.folder, ranks)
    recorded = [record["step"] for record in read_records(running.run / "metrics.jsonl")]
    assert steps_saved(running.run) >= recorded[-1] - 1  # at most the step under way is lost


def test_a_rank_lost_after_the_last_step_leaves_a_complete_run_and_no_export(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    running = start("--nproc", "2", max_steps=2, eval_steps=9, export_dir="export")
    running.wait_for_steps(2)
    ranks = running.ranks()
    while not (running.run / "curve.png").exists():
        time.sleep(0.01)
    ranks[1].kill()
    code, said = running.finish()
    (line,) = errors_in(said)
    assert code == 1 and re.search("Rank 1 (of 2 ended or stopped responding|was ended by SIGKILL)", line), said
    told = said + capfd.readouterr().out
    assert "The run is complete and saved; skipped: the export." in told and "Stopped after" not in told, told
    assert (running.run / "final").is_dir() and not (running.folder / "export").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("whom", ["launcher", "rank 0", "rank 2"])
def test_a_signal_to_any_of_them_saves_the_last_step_and_ends_all(
    number: signal.Signals, whom: str, start: Start
) -> None:
    running = start("--nproc", "3", save_steps=500)
    running.wait_for_steps(2)
    ranks = running.ranks()
    if whom == "launcher":
        running.process.send_signal(number)
    else:
        ranks[int(whom[-1])].send_signal(number)
    code, said = running.finish()
    assert code == 130 and errors_in(said) == [] and "Traceback" not in said, said
    assert "Stopped after step" in said and said.splitlines().count("interrupted") == 1
    assert_none_left(running.folder, ranks)
    assert steps_saved(running.run) == len(list(read_records(running.run / "metrics.jsonl")))


def test_a_launcher_that_is_killed_leaves_no_rank_behind(start: Start) -> None:
    running = start("--nproc", "2", save_steps=500)
    running.wait_for_steps(2)
    ranks = running.ranks()
    running.process.kill()
    running.process.wait()
    _, alive = psutil.wait_procs(ranks.values(), timeout=300)
    assert not alive
    assert steps_saved(running.run) == len(list(read_records(running.run / "metrics.jsonl")))


def test_a_restart_goes_on_from_the_last_checkpoint_to_the_same_weights(
    start: Start, options: Options, tmp_path: Path
) -> None:
    changes = EXACT | {"max_steps": 6, "per_device_train_batch_size": 2, "output_dir": tmp_path / "whole" / "grpo"}
    whole = train(load_settings(options(tmp_path, **changes), environ={}, cwd=tmp_path))
    running = start("--nproc", "2", "--max-restarts", "1", "--overwrite", max_steps=6)
    running.wait_for_steps(3)
    running.ranks()[1].kill()
    code, said = running.finish()
    assert code == 0, said
    assert "Resuming" in said and newest_run(running.folder / "grpo") == running.run
    assert [record["step"] for record in read_records(running.run / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    wanted = load_file(whole.run_dir / "final" / "adapter_model.safetensors")
    for name, value in load_file(running.run / "final" / "adapter_model.safetensors").items():
        torch.testing.assert_close(value, wanted[name], atol=2e-5, rtol=0)


def can_make_networks() -> bool:
    unshare = shutil.which("unshare")
    if unshare is None or shutil.which("ip") is None or shutil.which("nsenter") is None:
        return False
    return subprocess.run([unshare, "-r", "-n", "-m", "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_make_networks(), reason="no unprivileged network namespaces, or no iproute2, here")
def test_a_cut_cable_between_two_hosts_ends_both(start: Start) -> None:
    hosts = ("unshare", "-r", "-n", "-m", str(Path(__file__).with_name("two_hosts.sh")))
    meeting = ("--nnodes", "2", "--rdzv-endpoint", "10.77.0.1:29511")
    folder = start("--help").folder
    running = start(*meeting, launcher=(*hosts, str(folder), "2", sys.executable, "-m", "emailrl"))
    _, said = running.finish()
    assert (folder / "codes.txt").exists(), said
    first, second, seconds = map(int, (folder / "codes.txt").read_text().split())
    errors = [(folder / f"host-{host}.err").read_text() for host in (0, 1)]
    assert (first, second) == (1, 1), errors
    for text in errors:
        assert len(errors_in(text)) == 1 and "Traceback" not in text, text
    assert seconds < 60
    assert steps_saved(running.run) >= 2


def test_torchrun_itself_starts_it_too(start: Start) -> None:
    torchrun = shutil.which("torchrun", path=str(Path(sys.executable).parent))
    assert torchrun is not None
    running = start(launcher=(torchrun, "--nproc-per-node", "2", "-m", "emailrl"), max_steps=2)
    code, said = running.finish()
    assert code == 0, said
    assert [record["step"] for record in read_records(running.run / "metrics.jsonl")] == [1, 2]
