"""``emailrl train --resume`` alone goes on with the options the run was begun with."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from same_run import assert_same_run, lines

from emailrl.checkpoints import list_checkpoints, read_checkpoint
from emailrl.training.loop import TrainResult


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "emailrl", "train", *arguments],
            cwd=tmp_path, env=os.environ | environ, capture_output=True, text=True, check=False,
        )  # fmt: skip

    return run


def test_a_run_goes_on_with_its_own_options_and_with_those_given_now(
    command: Callable[..., subprocess.CompletedProcess[str]],
    options: Callable[..., dict[str, Any]],
    tmp_path: Path,
    finished: TrainResult,
) -> None:
    chosen = options(tmp_path, max_steps=2)
    own = chosen.pop("reward")
    chosen["output_dir"] = tmp_path / "outputs" / "grpo"  # the default, from here
    names = {"model_name", "emailrl_db", "kl_target", "kl_horizon"}
    environ = {name.upper(): str(value) for name, value in chosen.items()}
    environ["EMAILRL_QUESTIONS"] = environ.pop("QUESTIONS")
    assert names <= chosen.keys()
    first = command("--reward", own, OMP_NUM_THREADS="1", **environ)
    assert first.returncode == 0, first.stderr
    run = tmp_path / "outputs" / "grpo_masked"
    bare = command("--resume", "latest", OMP_NUM_THREADS="1")
    assert bare.returncode == 2
    assert bare.stderr.splitlines()[-1].startswith(f"error: The run was trained with EMAILRL_REWARD={own}, which")
    (tmp_path / "emailrl.toml").write_text("warmup_steps = 77")
    for resume, steps in (("latest", 4), (str(run), 6)):
        more = command("--resume", resume, "--reward", own, "--max-steps", str(steps), OMP_NUM_THREADS="1")
        assert more.returncode == 0, more.stderr
        assert "ignored in favor of the run's own settings: WARMUP_STEPS=77 (the run: " in more.stderr
        assert "Resuming from " in more.stderr and list_checkpoints(run)[-1].metadata.step == steps
    assert lines(run / "metrics.jsonl") == lines(finished.run_dir / "metrics.jsonl")
    assert_same_run(run, finished.run_dir)
    assert read_checkpoint(run / "final").metadata.settings["lora"]["lora_rank"] == 4
