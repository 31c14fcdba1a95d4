"""One short GRPO run on a base in 4 bits (QLoRA) and in 16, side by side on one GPU: curves, memory, time.

    python tests/gpu/qlora_run.py --work work                              # nano on the demo mailbox, under 90 s
    python tests/gpu/qlora_run.py --work work --data data/small --base FOLDER --adapter SFT_ADAPTER --steps 6
    python tests/gpu/qlora_run.py --work work --bits 16 --steps 1          # a rehearsal on a CPU

Both runs are ``emailrl train`` with the same settings but LOAD_IN_4BIT, in processes of their own; after ``--seconds``
they get SIGINT, and the table shows the steps that they reached. ``--data`` is the folder of ``small_questions.py``,
``--base`` one with SmolLM2-135M-Instruct: that model then begins from ``--adapter``. Peak memory is what torch
allocated in each process; ``base`` is the frozen model alone, in the same process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from measured import markdown, records
from processes import in_time

from emailrl.questions.beside import write_demo
from emailrl.quickstart import SETTINGS
from emailrl.settings import load_settings

COMMAND = """
import json, torch
from transformers import AutoModelForCausalLM
from emailrl.cli.app import main
plain, memory = AutoModelForCausalLM.from_pretrained, {}
def loaded(*given, **named):
    model = plain(*given, **named)
    memory["base_gib"] = round(model.get_memory_footprint() / 2**30, 4)
    return model
AutoModelForCausalLM.from_pretrained = loaded
try:
    main()
finally:
    if torch.cuda.is_available():
        memory["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
    with open("memory.json", "w") as file:
        json.dump(memory, file)
"""
SMOL = """\
model_name = "smol-base"
smol_base = "{base}"
db = "{data}/mail.db"
questions = "{data}/questions.jsonl"
judge = "offline"
wandb_mode = "disabled"
output_dir = "outputs/grpo"
max_turns = 10
max_tokens = 192
max_model_len = 8192
temperature = 1.0
eval_dataset_size = 64
max_steps = {steps}
per_device_train_batch_size = 8
num_generations = 8
learning_rate = 3e-4
warmup_steps = 1
beta = 0.0
eval_steps = 3
max_batch_trajectories = 128
kv_cache_gib = 8
"""


def main() -> None:
    """Run the sides and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--bits", type=int, nargs="+", default=[16, 4], choices=[16, 4])
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=80)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--base", type=Path)
    parser.add_argument("--adapter", type=Path)
    given = parser.parse_args()
    sides = {bits: start(given.work / f"{bits}-bits", bits, given) for bits in given.bits}
    deadline = time.monotonic() + given.seconds
    for side in sides.values():
        in_time(side, deadline - time.monotonic(), grace=20)
    print_table(
        {bits: given.work / f"{bits}-bits" for bits in sides}, {bits: one.returncode for bits, one in sides.items()}
    )


def start(folder: Path, bits: int, given: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Begin one side in its folder; what it prints goes to ``train.log``."""
    folder.mkdir(parents=True)
    settings = folder / "emailrl.toml"
    four = f"load_in_4bit = {str(bits == 4).lower()}\n"
    if given.data:
        settings.write_text(
            four + SMOL.format(base=given.base.absolute(), data=given.data.absolute(), steps=given.steps)
        )
    else:
        settings.write_text(SETTINGS.format(steps=given.steps).replace("[model]\n", f"[model]\n{four}"))
        write_demo(folder / "demo.db", settings=load_settings(environ={}, cwd=folder).store, seed=42)
    begun = ["--adapter", str(given.adapter.absolute())] if given.adapter else []
    with (folder / "train.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-c", COMMAND, "train", "--mode", "masked", *begun],
            cwd=folder, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"EMAILRL_DTYPE": "bf16"},
        )  # fmt: skip


def print_table(folders: dict[int, Path], codes: dict[int, int]) -> None:
    """A row a side, then a row an evaluated step."""
    runs = {bits: read(folder) for bits, folder in folders.items()}
    columns = ["base", "peak GiB", "base GiB", "steps", "seconds a step", "rollout", "update", "exit"]
    rows: list[list[object]] = []
    for bits, (metrics, _, memory) in runs.items():
        later = metrics[1:] or metrics  # the first step compiles kernels
        means = [mean([one["seconds"][name] for one in later]) for name in ("total", "rollout", "update")]
        used = [memory.get("peak_gib", "–"), memory.get("base_gib", "–")]
        rows.append([f"{bits} bits", *used, len(metrics), *means, codes[bits]])
    print(markdown(columns, rows), end="\n\n")
    steps = sorted({one["step"] for _, evaluations, _ in runs.values() for one in evaluations})
    columns = ["step", *(f"{bits} bits: validation (95 %), training reward" for bits in runs)]
    print(markdown(columns, [[step, *(at(step, *run[:2]) for run in runs.values())] for step in steps]))
    for bits, folder in folders.items():
        if codes[bits] not in (0, 130):
            print(f"{bits} bits failed:\n" + "\n".join((folder / "train.log").read_text().splitlines()[-8:]))


def read(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """A side's steps, evaluations and memory."""
    run = next(iter((folder / "outputs").glob("grpo*")), folder)
    metrics, evaluations = (records(run / f"{name}.jsonl") for name in ("metrics", "evaluations"))
    memory = folder / "memory.json"
    return metrics, evaluations, json.loads(memory.read_text()) if memory.exists() else {}


def at(step: int, metrics: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> str:
    """What a run had come to at a step."""
    found = next((one for one in evaluations if one["step"] == step), None)
    if found is None:
        return "–"
    reward = next((f"{one['reward_mean']:.2f}" for one in metrics if one["step"] == step), "–")
    return f"{found['accuracy']:.1%} ({found['accuracy_low']:.1%} to {found['accuracy_high']:.1%}), {reward}"


def mean(values: list[float]) -> float:
    """The mean, in hundredths."""
    return round(sum(values) / max(len(values), 1), 2)


if __name__ == "__main__":
    main()
