"""Work in processes of their own: handed out to GPUs, ended in time, their results read as rows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")


def hand_out(names: Iterable[str], gpus: Sequence[str], run: Callable[[str, str], Result]) -> list[Result]:
    """Call ``run(name, gpu)`` for every name, one at a time on each GPU; the results in the order of the names."""
    free: SimpleQueue[str] = SimpleQueue()
    for gpu in gpus:
        free.put(gpu)

    def on_a_free_gpu(name: str) -> Result:
        gpu = free.get()
        try:
            return run(name, gpu)
        finally:
            free.put(gpu)

    with ThreadPoolExecutor(len(gpus)) as workers:
        return list(workers.map(on_a_free_gpu, names))


def environment(gpu: str, **more: str) -> dict[str, str]:
    """The environment of a process with vLLM on a GPU, or without one (``""``, in a rehearsal)."""
    from emailrl.engines.vllm.local import ENVIRONMENT

    where = {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    return ENVIRONMENT | {"HF_HUB_OFFLINE": "1"} | os.environ | more | where


def itself(*words: object) -> list[str]:
    """The running script's own command line, with further words."""
    return [sys.executable, *sys.argv, *map(str, words)]


def row_of(
    command: Sequence[str], *, log: Path, limit: float, environ: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The row (JSON) in the last line that a command prints, with its seconds as ``wall``; an error is a row as well.

    The command is killed after ``limit`` seconds. What it writes to stderr is in ``log``.
    """
    begun = time.monotonic()
    with log.open("wb") as file:
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=file, env=environ, timeout=limit)
        except subprocess.TimeoutExpired:
            show_end(log, f"over {limit:.0f} s")
            return {"error": f"over {limit:.0f} s"}
    wall = {"wall": round(time.monotonic() - begun, 1)}
    if done.returncode == 0 and done.stdout:
        return json.loads(done.stdout.splitlines()[-1]) | wall
    show_end(log, f"ended with {done.returncode}")
    lines = log.read_text(errors="replace").splitlines()
    errors = [line for line in lines if "Error" in line] or lines or ["?"]
    return {"error": errors[-1].strip()[-200:]} | wall


def show_end(log: Path, what: str) -> None:
    """Say on stderr what became of a process, with the last lines of its log."""
    lines = log.read_text(errors="replace").splitlines()[-15:]
    print("\n  ".join([f"{log.stem} {what}:", *lines]), file=sys.stderr, flush=True)


def in_time(
    process: subprocess.Popen[Any], seconds: float, *, by: signal.Signals = signal.SIGINT, grace: float = 15
) -> bool:
    """Wait so long for a process, then end it; whether it ended by itself."""
    try:
        process.wait(max(0.0, seconds))
        return True
    except subprocess.TimeoutExpired:
        end(process, by=by, grace=grace)
        return False


def end(process: subprocess.Popen[Any], *, by: signal.Signals = signal.SIGINT, grace: float = 15) -> None:
    """Send a process a signal; kill it if it has not ended after ``grace`` seconds."""
    process.send_signal(by)
    try:
        process.wait(grace)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
