"""Runs of ``emailrl train`` on the demo mailbox in processes of their own, and what they leave."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from emailrl.cli.quickstart import SETTINGS
from emailrl.model.logprobs import token_logprobs
from emailrl.model.packing import takes_packed
from emailrl.model.policy import Policy
from emailrl.questions.load import write_demo
from emailrl.records import Record, read_records, read_trajectories
from emailrl.settings import load_settings
from emailrl.training.batch import Layout, TrainingSample, micro_batches

SECONDS = 150
COMMAND = f"""
import faulthandler
faulthandler.dump_traceback_later({SECONDS}, exit=True)
from emailrl.cli.app import main
main()
"""


def make_workplace(folder: Path) -> Path:
    """A folder with the quickstart's settings, demo mailbox and questions, evaluations cut short."""
    folder.mkdir(parents=True, exist_ok=True)
    text = SETTINGS.format(steps=3).replace("eval_dataset_size = 75", "eval_dataset_size = 8")
    text = text.replace("eval_steps = 3", "eval_steps = 100\npatience = 100")
    text = text.replace("learning_rate = 2e-3", "learning_rate = 6e-3")  # three steps are to be seen through bf16
    (folder / "emailrl.toml").write_text(text)
    write_demo(folder / "demo.db", settings=load_settings(environ={}, cwd=folder).store, seed=42)
    return folder


def start(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Begin ``emailrl train`` in ``folder``; one that is stuck says where, and ends."""
    command = [sys.executable, "-c", COMMAND, "train", "--mode", "masked", *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for it; AssertionError with the end of what it said where it failed."""
    said, _ = process.communicate(timeout=SECONDS + 30)
    assert process.returncode == 0, said[-4000:]
    return said


@dataclass(frozen=True, slots=True)
class RunLeft:
    directory: Path

    @property
    def metrics(self) -> list[Record]:
        return list(read_records(self.directory / "metrics.jsonl"))

    def samples(self, step: int) -> list[TrainingSample]:
        """The trajectories of a step that were trained, by id."""
        trained = {record["id"] for record in self.training(step) if record["samples"]}
        path = self.directory / "trajectories" / f"step-{step:06d}.jsonl"
        found = []
        for one in read_trajectories(path):
            if one.id in trained:
                (whole,) = one.samples
                end = len(whole.loss_mask) - whole.loss_mask[::-1].index(1)
                columns = (whole.token_ids[:end], whole.loss_mask[:end], whole.sampler_logprobs[:end])
                found.append(TrainingSample(one.id, one.group_id, *columns))
        return sorted(found, key=lambda sample: sample.trajectory_id)

    def training(self, step: int) -> list[Record]:
        return list(read_records(self.directory / "training" / f"step-{step:06d}.jsonl"))

    def old_logprobs(self, step: int) -> dict[str, list[float]]:
        """The trainer's log-probabilities of the trained tokens, by trajectory."""
        return {
            record["id"]: [value for value in record["samples"][0]["old_logprobs"] if value is not None]
            for record in self.training(step)
            if record["samples"]
        }

    def adapter(self, name: str) -> dict[str, Tensor]:
        return load_file(self.directory / name / "adapter_model.safetensors")


def policy_logprobs(policy: Policy, samples: list[TrainingSample]) -> dict[str, list[float]]:
    """The same of a policy in this process."""
    found: dict[str, list[float]] = {}
    for batch in micro_batches(samples, Layout(8192, device=policy.device, packing=takes_packed(policy.model))):
        with torch.no_grad():
            scored = token_logprobs(policy.model, batch.token_ids, batch.loss_mask).logprobs
        for row, index in enumerate(batch.indices):
            found[samples[index].trajectory_id] = scored[row][batch.loss_mask[row]].tolist()
    return found


def gaps(left: Mapping[str, Any], right: Mapping[str, Any]) -> Tensor:
    """Absolute differences of log-probabilities under the same trajectory ids."""
    return torch.cat([(torch.tensor(left[name]) - torch.tensor(right[name])).abs() for name in left.keys() & right])
