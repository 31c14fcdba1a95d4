"""Several ranks fine-tune as one does: each batch is divided among them, and rank 0 alone records the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from ranks.processes import in_ranks
from safetensors.torch import load_file
from sft.talk import settings_for

from emailrl.checkpoints import list_checkpoints
from emailrl.ranks import Place
from emailrl.records import read_records
from emailrl.settings import Settings
from emailrl.sft.loop import SftResult, SftRun, follow, sft


def rank(settings: Settings, stop_after: int | None = None) -> SftResult | None:
    """What one rank does; rank 0 is told to stop after a step."""
    if Place.here().rank:
        return follow(settings.training, settings.model.device)
    end_step = SftRun.end_step

    def end(run: SftRun) -> None:
        end_step(run)
        if run.state.step == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)

    SftRun.end_step = end  # type: ignore[method-assign] # in this process, which ends
    return sft(settings, resume="auto")


@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
def test_any_number_of_ranks_fits_the_weights_of_one_and_goes_on_with_another(
    model: Path, tmp_path: Path, full: bool
) -> None:
    """Batches of three conversations: the last of four ranks has none."""
    given = {"full_finetuning": full, "sft_batch_size": 3, "sft_learning_rate": 1e-3}
    one, several = sft(settings_for(tmp_path / "one", model, **given)), settings_for(tmp_path / "some", model, **given)
    found = []
    for ranks, stop_after in ((4, 3), (2, None)):
        (folder := tmp_path / f"{ranks}").mkdir()
        found.append(in_ranks(ranks, partial(rank, several, stop_after), folder))
    (stopped, *others), (result, other) = found
    assert isinstance(stopped, KeyboardInterrupt) and others == [None] * 3 and other is None
    assert isinstance(result, SftResult) and result.steps == 8
    mine, wanted = result.out.parent, one.out.parent
    name = "checkpoint-8/model.safetensors" if full else "checkpoint-8/adapter_model.safetensors"
    weights, expected = load_file(mine / name), load_file(wanted / name)
    for key, value in expected.items():
        torch.testing.assert_close(weights[key], value, atol=1e-5, rtol=0)
    lines = [list(read_records(run / "metrics.jsonl")) for run in (mine, wanted)]
    assert [line["step"] for line in lines[0]] == list(range(1, 9))
    for ours, theirs in zip(*lines, strict=True):
        for metric in ("loss", "val_loss", "grad_norm", "total_tokens"):
            assert ours[metric] == pytest.approx(theirs[metric], abs=1e-4), metric


@pytest.mark.slow
def test_ctrl_c_ends_all_ranks_with_the_last_step_saved_once(model: Path, tmp_path: Path) -> None:
    settings_for(tmp_path, model)
    given = f"--model {model} --trajectories talk.jsonl --max-steps 5000 --eval-steps 10000 --wandb disabled --nproc 2"
    command = [sys.executable, "-m", "emailrl", "sft", *given.split(), "--out", "mine"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as running:
        metrics, end = tmp_path / "mine" / "metrics.jsonl", time.monotonic() + 120
        while not (metrics.exists() and metrics.read_text().count("\n") > 2) and time.monotonic() < end:
            time.sleep(0.05)
        ranks = [each for each in psutil.Process(running.pid).children(recursive=True) if "RANK" in each.environ()]
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=300)
    assert running.returncode == 130 and len(ranks) == 2 and "Traceback" not in said
    assert not psutil.wait_procs(ranks, timeout=300)[1]
    steps = [line["step"] for line in read_records(metrics)]
    assert [item.metadata.step for item in list_checkpoints(tmp_path / "mine")] == [steps[-1]] and steps[-1] > 2
    shown = [line for line in said.splitlines() if line.startswith("Step ")]
    assert len(shown) == len(steps) and said.count("Stopped after step") == 1
