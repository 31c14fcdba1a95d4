"""Asynchronous rollouts: trainers on some GPUs, `emailrl serve` on others, MAX_STALENESS 0 against 1.

    python tests/gpu/bench_async.py                                             # 2 GPUs, the packaged nano
    python tests/gpu/bench_async.py --shape 4B --tokenizer qwen_tokenizer       # random weights of that shape
    python tests/gpu/bench_async.py --model smol-base --smol-base FOLDER        # SmolLM2-135M
    python tests/gpu/bench_async.py --staleness --one --train-gpus 2            # one GPU with vLLM in process
    python tests/gpu/bench_async.py --shape 4B --tokenizer qwen_tokenizer --train-gpus 0,1,2,3 --serve-gpus 4,5,6,7 \\
        --turns-gpus 0,1,2,3,4,5,6,7                                            # and all eight in turns
    python tests/gpu/bench_async.py --smoke                                     # a rehearsal on CPUs, with a CPU vLLM
    python tests/gpu/bench_async.py --out FOLDER --report                       # the table of what is there

All runs have the same questions and seeds, on the demo mailbox, with all groups trained, and ``--questions`` per step
however many ranks share them. Runs with a staleness share the servers, one per GPU. ``one`` trains on the first
training GPU with vLLM in process, while the servers start; ``turns`` on all of ``--turns-gpus``, an engine on each,
once the servers have ended. First the checks: no rollout is older than MAX_STALENESS, and no server has an adapter left
after each run.
Then the table: means over the steps after the second, without the last MAX_STALENESS ones, which share the servers
with no later rollouts. ``step`` is the total without evaluation; ``cut`` the share of tokens whose importance weight
was bounded. What the clocks of taking turns let expect is (rollout + update) / max(rollout, update). That is no bound:
loading the adapter is part of ``rollout`` there, and overlaps with sampling once MAX_STALENESS is above 0.

UPDATE_EPOCHS (--update-epochs) makes updates about as long as rollouts. Servers, and vLLM in process, have ``--start``
seconds to start, and a run ``--limit`` seconds besides; nothing goes on after ``--seconds``. What a run has reached
counts, after SIGTERM as well. Runs that earlier calls left in ``--out`` are in the table too.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
from async_table import ONE, RECORD, TURNS, Step, recorded, table
from bench_sampling import write_model
from processes import end, in_time, show_end

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


def main() -> None:
    """Prepare, serve, train, check, print."""
    given = arguments()
    work = given.out or Path(tempfile.mkdtemp(prefix="bench_async."))
    work.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, stop)
    try:
        if not given.report:
            measure(work, given)
    finally:
        table(recorded(work))


def stop(*_: object) -> None:
    """End at SIGTERM as after an error: what was started ends, and what was recorded is kept."""
    sys.exit(128 + signal.SIGTERM)


def measure(work: Path, given: argparse.Namespace) -> None:
    """All runs that are asked for."""
    begun = time.monotonic()
    given.deadline = begun + given.seconds
    prepare(work, given)
    print(f"work in {work}; prepared after {time.monotonic() - begun:.0f} s", flush=True)
    if given.staleness:
        with starting(work, given, replicas=len(given.serve_gpus)) as process:
            if given.one:
                train(work, "", ONE, given.train_gpus[:1], given)
            urls = urls_of(process)
            print(f"servers ready after {time.monotonic() - begun:.0f} s", flush=True)
            for lag in map(str, given.staleness):
                train(work, urls, lag, given.train_gpus, given)
    elif given.one:
        train(work, "", ONE, given.train_gpus[:1], given)
    if given.turns_gpus:
        train(work, "", TURNS, given.turns_gpus, given)
    print(f"all done after {time.monotonic() - begun:.0f} s\n")


def arguments() -> argparse.Namespace:
    """What was asked for; a rehearsal is small."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nano", help="nano, smol-base or a folder")
    parser.add_argument("--smol-base", type=Path, help="folder of smol-base")
    parser.add_argument("--shape", choices=["0.6B", "4B", "14B"], help="random weights instead; needs --tokenizer")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer with a chat template")
    parser.add_argument("--folder", type=Path, help="where the shape's weights are, or are written")
    parser.add_argument("--staleness", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--one", action="store_true", help="also a run on the first training GPU alone")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--questions", type=int, default=16, help="per step, of all ranks together")
    parser.add_argument("--rollouts", type=int, default=8, help="per question")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=96, help="per turn")
    parser.add_argument("--update-epochs", type=int, default=4)
    parser.add_argument("--train-gpus", type=listed, default=["0"], metavar="0,1", help="a rank on each")
    parser.add_argument("--serve-gpus", type=listed, default=["1"], metavar="2,3", help="a server on each")
    parser.add_argument("--turns-gpus", type=listed, default=[], metavar="0,1", help="also a run on these in turns")
    parser.add_argument("--port", type=int, default=8317)
    parser.add_argument("--out", type=Path, default=Path(os.environ["OUT"]) if "OUT" in os.environ else None)
    parser.add_argument("--limit", type=float, default=200, help="seconds a run may take, without vLLM's start")
    parser.add_argument("--start", type=float, default=240, help="seconds that vLLM may take to start")
    parser.add_argument("--seconds", type=float, default=500, help="for all of it")
    parser.add_argument("--smoke", action="store_true", help="CPUs, few short rollouts: figures mean nothing")
    parser.add_argument("--report", action="store_true", help="only read what is in --out")
    given = parser.parse_args()
    if given.smoke:
        given.train_gpus, given.serve_gpus = [""] * len(given.train_gpus), [""] * len(given.serve_gpus)
        given.turns_gpus = [""] * len(given.turns_gpus)
        given.steps, given.questions, given.rollouts, given.turns, given.update_epochs = 4, 2, 3, 2, 1
        given.limit = given.seconds = 600
    for gpus in (given.train_gpus, given.turns_gpus):
        if gpus and given.questions % len(gpus):
            parser.error(f"{given.questions} questions cannot be shared by {len(gpus)} ranks")
    given.tolerance = 0.3 if given.shape else 0.1  # random weights amplify rounding
    if given.shape:
        if given.tokenizer is None:
            parser.error("--tokenizer is needed")
        given.model = str((given.folder or Path(tempfile.gettempdir())).absolute() / given.shape)
    return given


def listed(text: str) -> list[str]:
    """GPUs by number, separated by commas."""
    return text.split(",")


def emailrl(*words: object) -> list[str]:
    """The command line of a command."""
    return [sys.executable, "-m", "emailrl", *map(str, words)]


def environment(given: argparse.Namespace, gpus: Sequence[str]) -> dict[str, str]:
    """The environment of a command that sees these GPUs, or none."""
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    found = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    found |= {"NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE", "0")}
    if given.smol_base:
        found["SMOL_BASE"] = str(given.smol_base.absolute())
    if any(gpus):
        found["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    elif given.smoke:
        found |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    return found


def prepare(work: Path, given: argparse.Namespace) -> None:
    """Mail, questions and settings, and the shape's weights if they are not there yet."""
    if given.shape:
        write_model(given.shape, given.tokenizer.absolute(), Path(given.model), given.train_gpus[0])
    names = ("model", "turns", "max_tokens", "tolerance", "steps", "rollouts", "update_epochs")
    (work / "emailrl.toml").write_text(SETTINGS.format(**{name: getattr(given, name) for name in names}))
    for command in (
        emailrl("gen-db", "--source", "demo", "--db", "mail.db", "--overwrite"),
        emailrl("gen-questions", "--db", "mail.db", "--out", "questions.jsonl", "--limit", 400, "--overwrite"),
    ):
        done = subprocess.run(command, cwd=work, env=environment(given, []), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]


@contextmanager
def starting(work: Path, given: argparse.Namespace, *, replicas: int) -> Iterator[subprocess.Popen[str]]:
    """`emailrl serve` on its GPUs, which replicas share if they are fewer, until the end of the block."""
    command = emailrl("serve", "--port", given.port, "--log-dir", work / "servers", "--json", "--replicas", replicas)
    command += ["--max-staleness", str(max(given.staleness)), "--start-timeout", str(given.start)]
    command += ["--enforce-eager", "--gpu-memory-utilization", "0.3"] if given.smoke else []
    gpus = [given.serve_gpus[number % len(given.serve_gpus)] for number in range(replicas)]
    command += ["--gpus", ",".join(gpus)] if any(gpus) else []
    environ = environment(given, given.serve_gpus)
    process = subprocess.Popen(command, cwd=work, env=environ, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


def urls_of(process: subprocess.Popen[str]) -> str:
    """The servers' URLs, separated by commas, once all are ready."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "emailrl serve ended"
    urls: str = json.loads(line)["vllm_urls"]
    return urls


def train(work: Path, urls: str, name: str, gpus: Sequence[str], given: argparse.Namespace) -> None:
    """One run, until its time is up; its steps are recorded however it ends."""
    for old in work.glob(f"run-{name}_*"):
        shutil.rmtree(old)
    command = emailrl("train", "--engine", "vllm", "--out", f"run-{name}", "--json")
    command += ["--batch-size", str(given.questions // len(gpus))]
    command += ["--nproc", str(len(gpus))] if len(gpus) > 1 else []
    environ = environment(given, gpus)
    environ |= {"VLLM_URLS": urls, "MAX_STALENESS": name} if urls else {}
    begun, log = time.monotonic(), work / f"run-{name}.log"
    limit = max(1.0, min(given.limit + (0 if urls else given.start), given.deadline - begun))
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=work, env=environ, stdout=subprocess.DEVNULL, stderr=file)
        try:
            in_time(process, limit)
        finally:
            if process.poll() is None:  # stopped while waiting
                end(process)
            steps = record(work, name)
    if late := time.monotonic() - begun >= limit:
        print(f"{name}: ended after {limit:.0f} s", flush=True)
    elif process.returncode:
        show_end(log, f"ended with {process.returncode}")
    print(f"{name}: {len(steps)} steps in {time.monotonic() - begun:.0f} s with start-up", flush=True)
    rollouts = given.questions * given.rollouts
    assert all(step["num_trajectories"] == rollouts for step in steps), f"{name}: not {rollouts} rollouts per step"
    if urls and steps:
        oldest = max(step["policy_age_max"] for step in steps)
        assert oldest <= int(name), f"MAX_STALENESS={name}, but rollouts of age {oldest}"
        for url in urls.split(","):
            models = httpx.get(f"{url}/v1/models").json()["data"]
            assert late or len(models) == 1, f"left on the server: {[model['id'] for model in models]}"


def record(work: Path, name: str) -> list[Step]:
    """The lines of a run's metrics.jsonl, also kept in a file of their own."""
    (lines,) = [*work.glob(f"run-{name}_*/metrics.jsonl")] or [None]
    steps = [json.loads(line) for line in lines.read_text().splitlines()] if lines else []
    (work / f"{RECORD}{name}.json").write_text(json.dumps(steps))
    return steps


if __name__ == "__main__":
    main()
