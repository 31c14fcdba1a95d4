"""SIGINT and SIGTERM at random moments, to the whole process group or to the command alone: exit code 130 within
seconds, nothing left behind, and every complete step saved."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from emailrl.base.process import SECONDS
from emailrl.checkpoints import list_checkpoints
from emailrl.mail.demo import demo_emails
from emailrl.questions.load import write_demo
from emailrl.settings import StoreSettings

SMALL = {
    "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "WANDB_MODE": "disabled", "EMAILRL_JUDGE": "offline",
    "EMAILRL_DB": "demo.db", "MAX_TOKENS": "32", "MAX_TURNS": "5", "NUM_GENERATIONS": "4", "SFT_BATCH_SIZE": "2",
    "PER_DEVICE_TRAIN_BATCH_SIZE": "1", "EVAL_DATASET_SIZE": "4", "TRAIN_DATASET_SIZE": "12",
}  # fmt: skip


START_SECONDS = 12
"""Until about the first step of a run."""


@dataclass(frozen=True)
class Command:
    """A command, and for how many seconds after it handles signals, or its last awaited step, one may come."""

    line: str
    seconds: float = 4
    run: str = ""
    """The run's folder, if it trains."""
    last: int = 10
    """The last step after which a signal comes; by the tenth, the run's workers are idle."""
    begun: str = "*"
    """What is there once another command is under way."""

    def steps(self, folder: Path) -> list[int]:
        """The steps in the run's log; of another command, step 1 once it is under way."""
        if not self.run:
            return [1] if any(folder.glob(self.begun)) else []
        file = folder / self.run / "metrics.jsonl"
        return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


COMMANDS = {
    "gen-db": Command("gen-db --source mail.mbox --db new.db --workers 2", 2, "", "new.db.building"),
    "gen-questions": Command("gen-questions --out new.jsonl", 0.4),
    "rollout": Command(
        "rollout --model nano --limit 100 --num-generations 100 --split all", 6, begun="outputs/rollouts/*"
    ),
    "train": Command("train --model nano --max-steps 500", run="outputs/grpo_masked"),
    "train --nproc 2": Command("train --model nano --max-steps 500 --nproc 2", run="outputs/grpo_masked"),
    "sft": Command("sft --model nano --max-steps 500 --workers 1", run="outputs/grpo_sft"),
    "sft --experts demo": Command("sft --model nano --experts demo --max-steps 500", run="outputs/grpo_sft"),
    "benchmark": Command(
        "benchmark --model nano --samples 300 --limit 300 --temperature 1", 8, begun="outputs/benchmark*/*"
    ),
    "quickstart": Command("quickstart", run="quickstart/outputs/grpo_masked", last=4),  # it ends at its aim after six
}


def kill_all(pid: int, number: int) -> None:
    """Signal the process and all below it, as SLURM and systemd do."""
    for process in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]:
        process.send_signal(number)


HOW = {
    "SIGTERM to the group": (signal.SIGTERM, os.killpg),
    "SIGINT to the group": (signal.SIGINT, os.killpg),
    "SIGTERM to the command": (signal.SIGTERM, os.kill),
    "SIGTERM to all": (signal.SIGTERM, kill_all),
}


@pytest.fixture(scope="session")
def mailbox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``demo.db``, its questions, and a mailbox that takes seconds to read."""
    folder = tmp_path_factory.mktemp("mailbox")
    write_demo(folder / "demo.db", seed=42, settings=StoreSettings())
    emails = list(demo_emails(42))
    with (folder / "mail.mbox").open("w") as mbox:
        for copy in range(60):
            for number, mail in enumerate(emails):
                head = f"From: {mail.from_address}\nTo: a@example.org\nMessage-ID: <{copy}-{number}@example.org>"
                mbox.write(f"From a@example.org Thu Jan  1 00:00:00 2015\n{head}\n\n{mail.body}\n\n")
    return folder


def catches(process: subprocess.Popen[bytes], number: int) -> bool:
    """Whether the process handles the signal yet."""
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def check(name: str, how: str, seed: int, mailbox: Path, folder: Path) -> str:
    """Signal the command at a random moment and return how it ended; raises AssertionError if not as it should."""
    command, (number, send) = COMMANDS[name], HOW[how]
    rng = random.Random(f"{name}/{how}/{seed}")
    steps = rng.choice([0, 1, 3, command.last] if command.run else [0, 1])
    moment = rng.uniform(0, command.seconds if steps or not command.run else START_SECONDS)
    begun = time.monotonic()
    for file in mailbox.iterdir():
        (folder / file.name).symlink_to(file) if file.suffix == ".mbox" else shutil.copy(file, folder)
    mark = f"{folder}/{seed}"
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "emailrl", *command.line.split()], cwd=folder, stdout=output, stderr=output,
            env=os.environ | SMALL | {"SIGNALS_TEST_MARK": mark}, start_new_session=True,
        )  # fmt: skip
        while not catches(process, number) or len(command.steps(folder)) < steps:
            if process.poll() is not None or time.monotonic() - begun > 600:
                process.kill()
                raise AssertionError(f"step {steps} never came\n{(folder / 'output.txt').read_text()}")
            time.sleep(0.01)
        time.sleep(moment)
        send(process.pid, number)
        begun = time.monotonic()
        try:
            code = process.wait(300)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # prints the stacks
            code = None
        seconds = time.monotonic() - begun
        time.sleep(0.2)
        left = [one for one in psutil.process_iter() if of(one, mark)]
        for one in left:
            one.kill()
        process.wait()
    said = (folder / "output.txt").read_text()
    saved = [
        item.metadata.step
        for item in list_checkpoints(folder / command.run)
        if item.path.name.startswith("checkpoint-")
    ]
    done, kept = max(command.steps(folder) if command.run else [0], default=0), max(saved, default=0)
    ended = f"{code} after {seconds:.1f} s; sent {moment:.1f} s after step {steps}; {done} done, {kept} saved"
    assert not left, f"{ended}: {left}\n{said}"
    busy = max(4.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    assert code == 130 and seconds < SECONDS * busy, f"{ended}\n{said}"
    assert "Traceback" not in said and said.count("interrupted\n") == 1, said
    assert done == kept, f"{ended}\n{said}"
    assert not any(folder.glob("*.building")), ended
    return ended


def of(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get("SIGNALS_TEST_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here")
@pytest.mark.parametrize(
    ("name", "how", "seed"),
    [
        ("sft", "SIGTERM to all", 12),
        ("sft", "SIGINT to the group", 0),
        *(("gen-db", how, 0) for how in HOW),
        *(
            pytest.param(name, how, seed, marks=pytest.mark.slow)
            for name in COMMANDS
            for how in HOW
            for seed in range(1, 11)
        ),
    ],
)
def test_a_command_ends_in_seconds_with_its_steps_saved(
    name: str, how: str, seed: int, mailbox: Path, tmp_path: Path
) -> None:
    print(name, how, seed, check(name, how, seed, mailbox, tmp_path))
