"""Asynchronous rollouts: trainers on some GPUs, `emailrl serve` on others, MAX_STALENESS 0 against 1.

    python tests/gpu/bench_async.py                                             # 2 GPUs, the packaged nano
    python tests/gpu/bench_async.py --model smol-base --smol-base FOLDER        # SmolLM2-135M
    python tests/gpu/bench_async.py --staleness --one --train-gpus 2            # one GPU with vLLM in process
    python tests/gpu/bench_async.py --shape 4B --tokenizer qwen_tokenizer --train-gpus 0,1,2,3 --serve-gpus 4,5,6,7 \\
        --turns-gpus 0,1,2,3,4,5,6,7                                            # random weights; and all eight in turns

All runs have the same questions and seeds, on the demo mailbox, with all groups trained, and ``--questions`` per step
however many ranks share them. Runs with a staleness share the servers, one per GPU. ``one`` trains on the first
training GPU with vLLM in process; ``turns`` on all of ``--turns-gpus``, an engine on each. Checked: no rollout is older
than MAX_STALENESS, and no server has an adapter left after each run.

Figures are means over the steps after the second, without the last MAX_STALENESS ones, which share the servers with no
later rollouts. ``step`` is the total without evaluation; ``cut`` the share of tokens whose importance weight was
bounded. What the clocks of taking turns let expect is (rollout + update) / max(rollout, update). That is no bound:
loading the adapter is part of ``rollout`` there, and overlaps with sampling once MAX_STALENESS is above 0.

UPDATE_EPOCHS (--update-epochs) makes updates about as long as rollouts. Servers, and vLLM in process, have ``--start``
seconds to start, and a run ``--run-limit`` seconds besides. What a run has reached counts.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
from runner import Bench, Given, Row, ended_in_time, environment, records, show_end

SETTINGS = """\
model_name = "{model}"
emailrl_db = "mail.db"
emailrl_questions = "questions.jsonl"
judge = "offline"
wandb_mode = "disabled"
max_turns = {turns}
max_tokens = {max_tokens}
vllm_probe_tolerance = {tolerance}
max_model_len = 4096
temperature = 1.0
lora_rank = 16
min_group_std = 0.0
eval_dataset_size = 4
eval_steps = 1000
save_steps = 1000
max_steps = {steps}
num_generations = {rollouts}
max_batch_trajectories = 256
update_epochs = {update_epochs}
learning_rate = 1e-4
warmup_steps = 0
"""


PHASES = ("step", "rollout", "update", "trainer_wait", "sampler_wait", "handover", "adapter_load")
SERVED = "staleness"


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="nano", help="nano, smol-base or a folder")
    add("--smol-base", type=Path, help="folder of smol-base")
    add("--shape", help="random weights instead")
    add("--staleness", type=int, nargs="*", default=[0, 1])
    add("--one", action="store_true", help="also a run on the first training GPU alone")
    add("--steps", type=int, default=8)
    add("--questions", type=int, default=16, help="per step, of all ranks together")
    add("--rollouts", type=int, default=8, help="per question")
    add("--turns", type=int, default=6)
    add("--max-tokens", type=int, default=96, help="per turn")
    add("--update-epochs", type=int, default=4)
    add("--train-gpus", type=listed, default=["0"], metavar="0,1", help="a rank on each")
    add("--serve-gpus", type=listed, default=["1"], metavar="2,3", help="a server on each")
    add("--turns-gpus", type=listed, default=[], metavar="0,1", help="also a run on these in turns")
    add("--port", type=int, default=8317)
    add("--run-limit", type=float, default=200, help="seconds a run may take, without vLLM's start")
    add("--start", type=float, default=240, help="seconds that vLLM may take to start")


def listed(text: str) -> list[str]:
    return text.split(",")


def cases(given: Given) -> list[Row]:
    wanted = {SERVED: given.staleness, "one": given.one, "turns": given.turns_gpus}
    return [{"case": name} for name, asked in wanted.items() if asked]


def measure(given: Given, case: Row) -> list[Row]:
    for gpus in (given.train_gpus, given.turns_gpus):
        assert not gpus or given.questions % len(gpus) == 0, f"{given.questions} questions, {len(gpus)} ranks"
    prepare(given)
    if case["case"] != SERVED:
        gpus = given.turns_gpus if case["case"] == "turns" else given.train_gpus[:1]
        return [train(given, "", case["case"], gpus)]
    with serving(given) as urls:
        return [train(given, urls, str(lag), given.train_gpus) for lag in given.staleness]


def seen_by(given: Given, gpus: Sequence[str]) -> dict[str, str]:
    """The environment of a command that sees these GPUs, or none in a rehearsal."""
    more = {"SMOL_BASE": str(given.smol_base.absolute())} if given.smol_base else {}
    return environment("" if given.smoke else ",".join(gpus), VLLM_USE_FLASHINFER_SAMPLER="0", **more)


def emailrl(*words: object) -> list[str]:
    return [sys.executable, "-m", "emailrl", *map(str, words)]


def prepare(given: Given) -> None:
    names = ("turns", "max_tokens", "steps", "rollouts", "update_epochs")
    values = {name: getattr(given, name) for name in names} | {"model": given.model, "tolerance": 0.1}
    if given.shape:  # random weights amplify rounding
        values |= {"model": given.folder / given.shape, "tolerance": 0.3}
    (given.out / "emailrl.toml").write_text(SETTINGS.format(**values))
    for command in (
        emailrl("gen-db", "--source", "demo", "--db", "mail.db", "--overwrite"),
        emailrl("gen-questions", "--db", "mail.db", "--out", "questions.jsonl", "--limit", 400, "--overwrite"),
    ):
        done = subprocess.run(command, cwd=given.out, env=seen_by(given, []), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]


@contextmanager
def serving(given: Given) -> Iterator[str]:
    """The URLs of `emailrl serve` on its GPUs, separated by commas, until the end of the block."""
    command = emailrl("serve", "--port", given.port, "--log-dir", given.out / "servers", "--json")
    command += ["--max-staleness", str(max(given.staleness)), "--start-timeout", str(given.start)]
    command += ["--replicas", str(len(given.serve_gpus))]
    small = ["--enforce-eager", "--gpu-memory-utilization", "0.3"]
    command += small if given.smoke else ["--gpus", ",".join(given.serve_gpus)]
    environ = seen_by(given, given.serve_gpus)
    process = subprocess.Popen(command, cwd=given.out, env=environ, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "emailrl serve ended"
        yield json.loads(line)["vllm_urls"]
    finally:
        process.terminate()
        process.wait(30)


def train(given: Given, urls: str, name: str, gpus: Sequence[str]) -> Row:
    for old in given.out.glob(f"run-{name}_*"):
        shutil.rmtree(old)
    command = emailrl("train", "--engine", "vllm", "--out", f"run-{name}", "--json")
    command += ["--batch-size", str(given.questions // len(gpus))]
    command += ["--nproc", str(len(gpus))] if len(gpus) > 1 else []
    environ = seen_by(given, gpus) | ({"VLLM_URLS": urls, "MAX_STALENESS": name} if urls else {})
    log, limit = given.out / f"run-{name}.log", given.run_limit + (0 if urls else given.start)
    begun = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=given.out, env=environ, stdout=subprocess.DEVNULL, stderr=file)
        late = not ended_in_time(process, limit)
    if late or process.returncode:
        show_end(log, f"ended after {limit:.0f} s" if late else f"ended with {process.returncode}")
    (lines,) = [*given.out.glob(f"run-{name}_*/metrics.jsonl")] or [given.out / "none"]
    steps, rollouts = records(lines), given.questions * given.rollouts
    assert all(step["num_trajectories"] == rollouts for step in steps), f"{name}: not {rollouts} rollouts per step"
    if urls and steps:
        oldest = max(step["policy_age_max"] for step in steps)
        assert oldest <= int(name), f"MAX_STALENESS={name}, but rollouts of age {oldest}"
        for url in urls.split(","):
            models = httpx.get(f"{url}/v1/models").json()["data"]
            assert late or len(models) == 1, f"left on the server: {[model['id'] for model in models]}"
    return {"run": name, "all": len(steps), "ran": time.monotonic() - begun} | figures(steps, name)


def figures(steps: Sequence[Row], name: str) -> Row:
    """Means of the steps that count: compiled, and with the rollouts of as many later steps beside their own."""
    counted = steps[2 : len(steps) - (int(name) if name.isdigit() else 0)]
    row: Row = {"steps": len(counted)}
    if not counted:
        return row
    for phase in PHASES[1:]:
        row[phase] = statistics.fmean(step["seconds"].get(phase, 0.0) for step in counted)
    whole = [step["seconds"]["total"] - step["seconds"].get("evaluation", 0.0) for step in counted]
    row["step"] = statistics.fmean(whole)
    for title, metric in (
        ("age", "policy_age_mean"), ("cut", "correction_cut_fraction"), ("reward", "reward_mean"),
    ):  # fmt: skip
        values = [step[metric] for step in counted if step.get(metric) is not None]
        row[title] = statistics.fmean(values) if values else None
    row["ratio_min"] = min(step.get("correction_min", 1) for step in counted)
    return row | {"ratio_max": max(step.get("correction_max", 1) for step in counted)}


def add_speeds(rows: list[Row]) -> None:
    """How many times as fast as taking turns, and what its clocks let expect."""
    turns = next((row for row in rows if row.get("run") == "0" and "step" in row), None)
    others = {row["run"]: row["step"] for row in rows if row.get("run") in ("one", "turns") and "step" in row}
    for row in rows:
        if "step" not in row or not row["run"].isdigit():
            continue
        row |= {f"x_{name}": seconds / row["step"] for name, seconds in others.items()}
        if turns and row is not turns:
            row["x_0"] = turns["step"] / row["step"]
            row["expected"] = (turns["rollout"] + turns["update"]) / max(turns["rollout"], turns["update"])


BENCH = Bench(
    __file__,
    __doc__,
    cases,
    measure,
    {"run": "run", "steps": "steps", "of": "all"} | {phase: f"{phase}:.2f" for phase in PHASES} | {
        "age": "age:.2f", "ratio min": "ratio_min:.3f", "max": "ratio_max:.2f", "cut": "cut:.4f",
        "reward": "reward:.3f", "x S=0": "x_0:.2f", "expected": "expected:.2f", "x one GPU": "x_one:.2f",
        "x in turns": "x_turns:.2f",
    },
    options,
    smoke={"steps": 4, "questions": 2, "rollouts": 3, "turns": 2, "update_epochs": 1, "run_limit": 600},
    shapes=lambda given: [given.shape] if given.shape else [],
    add=add_speeds,
    gpus="all",
    limit=900,
)  # fmt: skip

if __name__ == "__main__":
    BENCH.main()
