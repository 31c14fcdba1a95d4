"""Asynchronous rollouts on two GPUs: trainer on one, `emailrl serve` on the other, MAX_STALENESS 0 against 1.

    python tests/gpu/bench_async.py                                             # 2 GPUs, the packaged nano
    python tests/gpu/bench_async.py --model smol-base --smol-base FOLDER        # SmolLM2-135M
    python tests/gpu/bench_async.py --smoke                                     # a rehearsal on CPUs, with a CPU vLLM

Both runs use the same server, questions and seeds, on the demo mailbox, with all groups trained. First the checks: no
rollout is older than MAX_STALENESS, and the server has no adapter left after each run. Then the table. ``step`` is the
median of the steps after the second; ``bound`` is what full overlap would make of the step that takes turns,
max(rollout, update) of its medians; ``cut`` the share of tokens whose importance weight was bounded. UPDATE_EPOCHS
(--update-epochs) makes updates about as long as rollouts, which small models' are not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

SETTINGS = """\
model_name = "{model}"
emailrl_db = "mail.db"
emailrl_questions = "questions.jsonl"
judge = "offline"
wandb_mode = "disabled"
max_turns = {turns}
max_tokens = 96
max_model_len = 4096
temperature = 1.0
lora_rank = 16
min_group_std = 0.0
eval_dataset_size = 4
eval_steps = 1000
save_steps = 1000
max_steps = {steps}
per_device_train_batch_size = {questions}
num_generations = {rollouts}
max_batch_trajectories = 256
update_epochs = {update_epochs}
learning_rate = 1e-4
warmup_steps = 0
"""


def main() -> None:
    """Prepare, serve, train twice, check, print."""
    given = arguments()
    work = given.out or Path(tempfile.mkdtemp(prefix="bench_async."))
    work.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    prepare(work, given)
    print(f"work in {work}; prepared after {time.monotonic() - begun:.0f} s", flush=True)
    with server(work, given) as url:
        print(f"server ready after {time.monotonic() - begun:.0f} s", flush=True)
        runs = {lag: train(work, url, lag, given) for lag in given.staleness}
    print(f"all done after {time.monotonic() - begun:.0f} s\n")
    for lag, steps in runs.items():
        ages = [step["policy_age_max"] for step in steps]
        assert max(ages) <= lag, f"MAX_STALENESS={lag}, but rollouts of age {max(ages)}"
    table(runs)
    (work / "bench_async.json").write_text(json.dumps(runs, indent=1))


def arguments() -> argparse.Namespace:
    """What was asked for; a rehearsal is small."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nano", help="nano, smol-base or a folder")
    parser.add_argument("--smol-base", type=Path, help="folder of smol-base")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--questions", type=int, default=16, help="per step")
    parser.add_argument("--rollouts", type=int, default=8, help="per question")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--update-epochs", type=int, default=4)
    parser.add_argument("--train-gpu", default="0")
    parser.add_argument("--serve-gpu", default="1")
    parser.add_argument("--port", type=int, default=8317)
    parser.add_argument("--out", type=Path, default=Path(os.environ["OUT"]) if "OUT" in os.environ else None)
    parser.add_argument("--limit", type=float, default=150, help="seconds a command may take")
    parser.add_argument("--smoke", action="store_true", help="CPUs, few short rollouts: figures mean nothing")
    given = parser.parse_args()
    if given.smoke:
        given.train_gpu = given.serve_gpu = ""
        given.steps, given.questions, given.rollouts, given.turns, given.update_epochs = 4, 2, 3, 2, 1
        given.limit = 600
    return given


def emailrl(*words: object) -> list[str]:
    """The command line of a command."""
    return [sys.executable, "-m", "emailrl", *map(str, words)]


def environment(given: argparse.Namespace, gpu: str) -> dict[str, str]:
    """The environment of a command that sees one GPU, or none."""
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    found = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    if given.smol_base:
        found["SMOL_BASE"] = str(given.smol_base.absolute())
    if gpu:
        found["CUDA_VISIBLE_DEVICES"] = gpu
    elif given.smoke:
        found |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    return found


def prepare(work: Path, given: argparse.Namespace) -> None:
    """Mail, questions and settings."""
    names = ("model", "turns", "steps", "questions", "rollouts", "update_epochs")
    (work / "emailrl.toml").write_text(SETTINGS.format(**{name: getattr(given, name) for name in names}))
    for command in (
        emailrl("gen-db", "--source", "demo", "--db", "mail.db", "--overwrite"),
        emailrl("gen-questions", "--db", "mail.db", "--out", "questions.jsonl", "--limit", 400, "--overwrite"),
    ):
        done = subprocess.run(command, cwd=work, env=environment(given, ""), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]


@contextmanager
def server(work: Path, given: argparse.Namespace) -> Iterator[str]:
    """`emailrl serve` on its GPU; its URL."""
    command = emailrl(
        "serve", "--port", given.port, "--log-dir", work / "servers", "--max-staleness", max(given.staleness)
    )
    command += ["--json", "--start-timeout", str(given.limit)]
    command += ["--enforce-eager", "--gpu-memory-utilization", "0.3"] if given.smoke else []
    process = subprocess.Popen(
        command, cwd=work, env=environment(given, given.serve_gpu), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "emailrl serve ended"
        yield json.loads(line)["vllm_urls"]
    finally:
        process.terminate()
        process.wait(30)


def train(work: Path, url: str, lag: int, given: argparse.Namespace) -> list[dict[str, Any]]:
    """One run with this MAX_STALENESS; its lines of metrics.jsonl."""
    command = emailrl("train", "--engine", "vllm", "--output-dir", f"staleness-{lag}", "--overwrite", "--json")
    environ = environment(given, given.train_gpu) | {"VLLM_URLS": url, "MAX_STALENESS": str(lag)}
    begun = time.monotonic()
    done = subprocess.run(command, cwd=work, env=environ, capture_output=True, text=True, timeout=given.limit)
    (work / f"staleness-{lag}.log").write_text(done.stderr)
    assert done.returncode == 0, done.stderr[-3000:]
    print(f"MAX_STALENESS={lag}: {given.steps} steps in {time.monotonic() - begun:.0f} s with start-up", flush=True)
    models = httpx.get(f"{url}/v1/models").json()["data"]
    assert len(models) == 1, f"left on the server: {[model['id'] for model in models]}"
    lines = (Path(json.loads(done.stdout.splitlines()[-1])["run_dir"]) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def median(steps: Sequence[dict[str, Any]], name: str) -> float:
    """Of a phase's seconds over the steps after the second; 0 where a run has no such phase."""
    return statistics.median(step["seconds"].get(name, 0.0) for step in steps[2:])


def mean(steps: Sequence[dict[str, Any]], name: str) -> float:
    """Of a metric over the steps that have it."""
    values = [step[name] for step in steps if step.get(name) is not None]
    return statistics.fmean(values) if values else float("nan")


def table(runs: dict[int, list[dict[str, Any]]]) -> None:
    """One line a run, then how the step times compare."""
    names = ("rollout", "update", "trainer_wait", "sampler_wait")
    print(f"{'S':>2} {'step s':>7}", *(f"{name:>12}" for name in names), "   age  ratio min   max    cut   reward")
    seconds = {}
    for lag, steps in runs.items():
        seconds[lag] = median(steps, "rollout") + median(steps, "update")
        extremes = (min(s.get("correction_min", 1) for s in steps), max(s.get("correction_max", 1) for s in steps))
        print(
            f"{lag:>2} {seconds[lag]:>7.2f}", *(f"{median(steps, name):>12.2f}" for name in names),
            f"{mean(steps, 'policy_age_mean'):>6.2f} {extremes[0]:>10.3f} {extremes[1]:>5.2f}"
            f" {mean(steps, 'correction_cut_fraction'):>6.4f} {mean(steps[2:], 'reward_mean'):>8.3f}",
        )  # fmt: skip
    if 0 in runs:
        bound = max(median(runs[0], "rollout"), median(runs[0], "update"))
        for lag in set(runs) - {0}:
            speed, most = seconds[0] / seconds[lag], seconds[0] / bound
            print(
                f"S={lag}: {speed:.2f} x the speed of taking turns; full overlap {most:.2f} x; share {speed / most:.2f}"
            )


if __name__ == "__main__":
    main()
