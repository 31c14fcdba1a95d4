"""SIGKILL at file operations, at random moments, in an overwriting: in the end the run is the uninterrupted one."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from operator import le
from pathlib import Path

import pytest
from end_to_end.commands import begin, exit_code, file_operations
from end_to_end.conftest import MakeSettings, Options, settle
from same_run import assert_nothing_torn, assert_same_run, everything, lines

from emailrl.checkpoints import find_checkpoint
from emailrl.settings import Settings, load_settings
from emailrl.training.loop import TrainResult, train

KILLS = 30


def operations(
    settings: Settings, resume: str | None = None, *, overwrite: bool = False, kill_at: int | None = None
) -> int | None:
    """Train in a child process; see ``file_operations``."""
    work = partial(train, settings, resume=resume, overwrite=overwrite)
    return file_operations(work, settings.output.output_dir.parent, kill_at=kill_at)


@pytest.fixture(scope="module")
def whole(options: Options, tmp_path_factory: pytest.TempPathFactory) -> int:
    """The file operations of an uninterrupted run."""
    count = operations(load_settings(options(tmp_path_factory.mktemp("counted"))), "auto")
    assert count is not None and count > 100
    return count


@pytest.mark.parametrize(
    ("share", "then"),
    [
        *((0.05, ()), (0.2, ()), (0.45, (20,)), (0.7, (7, 31)), (0.87, ()), (0.96, ())),
        *(pytest.param(n / 100, (), marks=pytest.mark.slow) for n in range(100)),
    ],
    ids=str,
)
def test_sigkill_at_any_file_operation_is_survived(
    share: float, then: tuple[int, ...], whole: int, finished: TrainResult, make_settings: MakeSettings
) -> None:
    """After a share of a run's operations; then in the resumed runs."""
    settings = make_settings()
    for kill_at in (int(share * whole), *then):
        assert operations(settings, "auto", kill_at=kill_at) is None
        for run in settings.output.output_dir.parent.glob("grpo_masked*"):
            assert_nothing_torn(run)
    result = train(settings, resume="auto")
    assert [path.name for path in result.run_dir.parent.glob("grpo*")] == ["grpo_masked"]
    assert_same_run(result.run_dir, finished.run_dir)


@pytest.mark.parametrize(
    "operation", [3, 9, 30, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 6, 14, 21, 38, 45))]
)
def test_a_run_whose_overwriting_was_killed_is_back_at_the_next_start(
    operation: int, make_settings: MakeSettings
) -> None:
    settings = make_settings(max_steps=2)
    run = train(settings).run_dir
    kept = everything(run)
    assert operations(settings, overwrite=True, kill_at=operation) is None
    said: list[str] = []
    result = train(settings, resume="auto", progress=said.append)
    assert (result.run_dir, result.steps) == (run, 2) and everything(run) == kept
    assert not (run / ".replaced").exists() and not (run / ".replacing").exists()
    assert any("is restored: the run that --overwrite started" in line for line in said)
    assert [path.name for path in run.parent.glob("grpo*")] == ["grpo_masked"]


# -- the command on the packaged policy, at random moments ----------------------------------------------------------


def start_and_kill(folder: Path, moment: Callable[[float], bool]) -> float:
    """Begin or go on, kill it when ``moment`` says so of the seconds so far; nothing is torn. Returns the seconds."""
    child, begun = begin(folder, "train", "--resume", "auto"), time.monotonic()
    while not moment(time.monotonic() - begun):
        assert os.waitpid(child, os.WNOHANG) == (0, 0), (folder / "output.txt").read_text()
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    for run in folder.glob("grpo_masked*"):
        assert_nothing_torn(run)
    return time.monotonic() - begun


@pytest.mark.slow
def test_sigkill_at_random_moments_is_survived(options: Options, tmp_path: Path) -> None:
    """The packaged policy by ``dapo`` with refill, an adaptive KL weight and dropout, killed 30 times."""
    killed, whole, rng = tmp_path / "killed", tmp_path / "whole", random.Random(30)
    for folder in (killed, whole):
        chosen = options(
            folder, model_name="nano", algorithm="dapo", max_turns=4, max_tokens=96, max_steps=999,
            per_device_train_batch_size=1, num_generations=2, num_mini_batches=1, learning_rate=1e-3, save_steps=1,
            eval_steps=4, min_group_std=0.05, max_refill_rounds=2, reward="art_e",
        )  # fmt: skip
        settle(folder, chosen)
    # A start and two steps: most of the moments drawn from so long lie in a step, some in a start.
    so_long = start_and_kill(killed, lambda seconds: (killed / "grpo_masked" / "checkpoint-2").exists())
    for _ in range(KILLS - 1):
        end = rng.uniform(0, so_long)
        start_and_kill(killed, partial(le, end))  # once so many seconds have passed
    latest = find_checkpoint("latest", killed / "grpo").metadata.step
    for folder, resume in ((killed, ["--resume", "auto"]), (whole, [])):
        assert exit_code(begin(folder, "train", *resume, "--max-steps", str(latest + 1))) == 0
    assert_same_run(killed / "grpo_masked", whole / "grpo_masked")
    assert sum(line["refill_rounds"] for line in lines(whole / "grpo_masked" / "metrics.jsonl")) > 0
