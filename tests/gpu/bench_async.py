"""Asynchronous rollouts: trainers on some GPUs, `emailrl serve` on others, MAX_STALENESS 0 against 1.

    python tests/gpu/bench_async.py                                             # 2 GPUs, the packaged nano
    python tests/gpu/bench_async.py --model smol-base --smol-base FOLDER        # SmolLM2-135M
    python tests/gpu/bench_async.py --staleness --one --train-gpus 2            # one GPU with vLLM in process
    python tests/gpu/bench_async.py --shape 4B --train-gpus 0,1 --serve-gpus 2,3 --turns-gpus 0,1,2,3

All runs have the same questions and seeds, on the demo mailbox, with all groups trained, and ``--questions`` per step
however many ranks share them. Runs with a staleness share the servers, one per GPU. ``one`` trains on the first
training GPU with vLLM in process; ``turns`` on all of ``--turns-gpus``, an engine on each. Checked: no rollout is older
than MAX_STALENESS, and no server has an adapter left after each run.

Figures are means over the steps after the second, without the last MAX_STALENESS ones, which share the servers with no
later rollouts. ``step`` is the total without evaluation; ``cut`` the share of tokens whose importance weight was
bounded. Servers, and vLLM in process, have ``--start`` seconds to start, and a run ``--run-limit`` seconds besides.
What a run has reached counts.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
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
METRICS = {"age": "policy_age_mean", "cut": "correction_cut_fraction", "reward": "reward_mean"}


def cases(given: Given) -> list[Row]:
    wanted = {"staleness": given.staleness, "one": given.one, "turns": given.turns_gpus}
    return [{"case": name} for name, asked in wanted.items() if asked]


def measure(given: Given, case: Row) -> list[Row]:
    values = vars(given) | {"tolerance": 0.1}
    if given.shape:  # random weights amplify rounding
        values |= {"model": given.folder / given.shape, "tolerance": 0.3}
    (given.out / "emailrl.toml").write_text(SETTINGS.format(**values))
    for words in ("gen-db --source demo --db mail.db", "gen-questions --db mail.db --out questions.jsonl --limit 400"):
        subprocess.run([*emailrl(*words.split()), "--overwrite"], cwd=given.out, env=seen_by(given, []), check=True)
    if case["case"] != "staleness":
        gpus = given.turns_gpus if case["case"] == "turns" else given.train_gpus[:1]
        return [train(given, "", case["case"], gpus)]
    with serving(given) as urls:
        return [train(given, urls, str(lag), given.train_gpus) for lag in given.staleness]


def emailrl(*words: object) -> list[str]:
    return [sys.executable, "-m", "emailrl", *map(str, words)]


def seen_by(given: Given, gpus: Sequence[str]) -> dict[str, str]:
    """The environment of a command that sees these GPUs, or none in a rehearsal."""
    more = {"SMOL_BASE": str(given.smol_base.absolute())} if given.smol_base else {}
    return environment("" if given.smoke else ",".join(gpus), VLLM_USE_FLASHINFER_SAMPLER="0", **more)


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
    questions, left = divmod(given.questions, len(gpus))
    assert not left, f"{given.questions} questions, {len(gpus)} ranks"
    for old in given.out.glob(f"run-{name}_*"):
        shutil.rmtree(old)
    command = emailrl("train", "--engine", "vllm", "--out", f"run-{name}", "--json", "--batch-size", questions)
    command += ["--nproc", str(len(gpus))] if len(gpus) > 1 else []
    environ = seen_by(given, gpus) | ({"VLLM_URLS": urls, "MAX_STALENESS": name} if urls else {})
    log, limit = given.out / f"run-{name}.log", given.run_limit + (0 if urls else given.start)
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
    return {"run": name, "all": len(steps)} | figures(steps, name)


def figures(steps: Sequence[Row], name: str) -> Row:
    """Means of the steps that count: compiled, and with the rollouts of as many later steps beside their own."""
    counted = steps[2 : len(steps) - (int(name) if name.isdigit() else 0)]
    row: Row = {"steps": len(counted)}
    if not counted:
        return row
    clocks = [step["seconds"] for step in counted]
    row["step"] = statistics.fmean(one["total"] - one.get("evaluation", 0.0) for one in clocks)
    row |= {phase: statistics.fmean(one.get(phase, 0.0) for one in clocks) for phase in PHASES[1:]}
    for title, metric in METRICS.items():
        values = [step[metric] for step in counted if step.get(metric) is not None]
        row[title] = statistics.fmean(values) if values else None
    row["ratio_min"] = min(step.get("correction_min", 1) for step in counted)
    return row | {"ratio_max": max(step.get("correction_max", 1) for step in counted)}


GPUS = {"type": lambda text: text.split(","), "metavar": "0,1"}
BENCH = Bench(
    __file__,
    __doc__,
    measure,
    {"run": "run", "steps": "steps", "of": "all"} | {phase: f"{phase}:.2f" for phase in PHASES} | {
        "age": "age:.2f", "ratio min": "ratio_min:.3f", "max": "ratio_max:.2f", "cut": "cut:.4f",
        "reward": "reward:.3f",
    },
    {
        "--model": {"default": "nano", "help": "nano, smol-base or a folder"},
        "--smol-base": {"type": Path, "help": "folder of smol-base"},
        "--shape": {"help": "random weights instead"},
        "--staleness": {"type": int, "nargs": "*", "default": [0, 1]},
        "--one": {"action": "store_true", "help": "also a run on the first training GPU alone"},
        "--steps": {"type": int, "default": 8},
        "--questions": {"type": int, "default": 16, "help": "per step, of all ranks together"},
        "--rollouts": {"type": int, "default": 8, "help": "per question"},
        "--turns": {"type": int, "default": 6},
        "--max-tokens": {"type": int, "default": 96, "help": "per turn"},
        "--update-epochs": {"type": int, "default": 4, "help": "4: updates take about as long as rollouts"},
        "--train-gpus": GPUS | {"default": ["0"], "help": "a rank on each"},
        "--serve-gpus": GPUS | {"default": ["1"], "help": "a server on each"},
        "--turns-gpus": GPUS | {"default": [], "help": "also a run on these in turns"},
        "--port": {"type": int, "default": 8317},
        "--run-limit": {"type": float, "default": 200, "help": "seconds a run may take, without vLLM's start"},
        "--start": {"type": float, "default": 240, "help": "seconds that vLLM may take to start"},
    },
    cases,
    smoke={"steps": 4, "questions": 2, "rollouts": 3, "turns": 2, "update_epochs": 1, "run_limit": 600},
    shapes=lambda given: [given.shape] if given.shape else [],
    gpus="all",
    limit=900,
)  # fmt: skip

if __name__ == "__main__":
    BENCH.main()
