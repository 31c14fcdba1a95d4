"""Reward against steps and wall time for MAX_STALENESS 0, 1 and 2: whole runs of `nano` on the demo mailbox.

    python tests/gpu/staleness_curves.py --work work --parallel 3 --seconds 240    # 2 GPUs: trainers on 0, server on 1
    python tests/gpu/staleness_curves.py --work work --cpu --steps 10              # a CPU build of vLLM
    python tests/gpu/staleness_curves.py --work work --report --figure curves.svg  # what there is, drawn again

All runs have the quickstart's questions and settings (8 questions x 6 rollouts) and a learning rate that decays
linearly to 0; they differ in MAX_STALENESS and SEED alone. Only 100 % stops one early. With ``--parallel``, runs of one
seed share the cards, each with a server of its own, so that their seconds compare but say little by themselves. After
``--seconds`` no run begins and those under way are interrupted; the table shows the steps that each has made. Seconds
include evaluations, during which later steps are sampled; those of a step are means as in ``bench_async``.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import time
from collections import deque
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from async_table import counted, seconds
from bench_async import emailrl, environment, listed, starting, urls_of
from measured import markdown, records
from processes import end

COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red")


def main() -> None:
    """Run what is asked for, print the table, draw."""
    given = arguments()
    if not given.report:
        deadline = time.monotonic() + given.seconds
        prepare(given)
        if any(given.serve_gpus):  # the servers share it
            os.environ |= {"KV_CACHE_GIB": "8", "VLLM_GPU_MEMORY_UTILIZATION": f"{0.8 / given.parallel:.2f}"}
        with starting(given.work, given, replicas=given.parallel) as process:
            urls = urls_of(process)
            print(f"ready, {deadline - time.monotonic():.0f} s left", flush=True)
            play(given, urls.split(","), deadline)
    runs = [run for lag in given.staleness for seed in given.seeds if (run := read(given.work, lag, seed)).steps]
    if given.figure and runs:
        draw(runs, given.figure)
    print_table(runs)


def arguments() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--eval-questions", type=int, default=75)
    parser.add_argument("--eval-steps", type=int, default=5)
    parser.add_argument("--parallel", type=int, default=1, help="runs at once")
    parser.add_argument("--seconds", type=float, default=3600, help="for everything, the server's start included")
    parser.add_argument("--cpu", dest="smoke", action="store_true", help="no GPU: a CPU build of vLLM")
    parser.add_argument("--train-gpus", type=listed, default=["0"], metavar="0", help="shared by all runs")
    parser.add_argument("--serve-gpus", type=listed, default=["1"], metavar="1", help="shared by all servers")
    parser.add_argument("--port", type=int, default=8318)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--report", action="store_true", help="only read what is in --work")
    given = parser.parse_args()
    given.work = given.work.absolute()
    given.smol_base, given.start = None, min(given.seconds, 300)
    if given.smoke:
        given.train_gpus = given.serve_gpus = [""]
    return given


def prepare(given: argparse.Namespace) -> None:
    """The demo's mailbox and questions, and the quickstart's settings without early stop."""
    from emailrl.questions.beside import write_demo
    from emailrl.quickstart import SETTINGS
    from emailrl.settings import load_settings

    given.work.mkdir(parents=True, exist_ok=True)
    text = SETTINGS.format(steps=given.steps)
    for before, after in (
        ("eval_dataset_size = 75", f"eval_dataset_size = {given.eval_questions}"),
        ("eval_steps = 3", f"eval_steps = {given.eval_steps}\npatience = 1000\ntarget_accuracy = 1.0"),
        ('model_name = "nano"', 'model_name = "nano"\nmax_model_len = 4096'),
        ("warmup_steps = 1", 'warmup_steps = 1\nlr_scheduler = "linear"'),
    ):
        assert before in text, before
        text = text.replace(before, after)
    (given.work / "emailrl.toml").write_text(text)
    write_demo(
        given.work / "demo.db", settings=load_settings(environ={}, cwd=given.work).store, seed=42, overwrite=True
    )


def play(given: argparse.Namespace, urls: list[str], deadline: float) -> None:
    """All runs, so many at once, until the deadline; those that fail say why."""
    waiting = deque((lag, seed) for seed in given.seeds for lag in given.staleness)
    under_way: dict[tuple[int, int], subprocess.Popen[bytes]] = {}
    used: dict[tuple[int, int], str] = {}
    try:
        while time.monotonic() < deadline and (waiting or under_way):
            while waiting and urls:
                run = waiting.popleft()
                used[run] = urls.pop()
                under_way[run] = start(given, used[run], *run)
            for run, process in list(under_way.items()):
                if process.poll() is not None:
                    del under_way[run]
                    urls.append(used[run])
                    tell(given.work, name_of(*run), process.returncode)
            time.sleep(0.2)
    finally:
        for process in under_way.values():
            process.send_signal(signal.SIGINT)
        for run, process in under_way.items():
            end(process)
            tell(given.work, name_of(*run), process.returncode)


def tell(work: Path, name: str, code: int) -> None:
    """Say how a run ended, and what it said last if it failed."""
    lines = (work / f"{name}.log").read_text(errors="replace").splitlines()
    print(f"{name} ended with {code}" + ("" if code in (0, 130) else ":\n  " + "\n  ".join(lines[-8:])), flush=True)


def name_of(lag: int, seed: int) -> str:
    """What a run's files are called."""
    return f"staleness-{lag}-seed-{seed}"


def start(given: argparse.Namespace, url: str, lag: int, seed: int) -> subprocess.Popen[bytes]:
    """Begin a run in the background."""
    name = name_of(lag, seed)
    command = emailrl("train", "--mode", "masked", "--engine", "vllm", "--out", name, "--overwrite")
    environ = environment(given, given.train_gpus) | {"VLLM_URLS": url, "MAX_STALENESS": str(lag), "SEED": str(seed)}
    with (given.work / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, cwd=given.work, env=environ, stdout=log, stderr=subprocess.STDOUT)


@dataclass(frozen=True)
class Run:
    """What a run recorded."""

    lag: int
    seed: int
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]

    @property
    def seconds(self) -> list[float]:
        """Seconds at the end of each step."""
        return list(accumulate(step["seconds"]["total"] for step in self.steps))


def read(work: Path, lag: int, seed: int) -> Run:
    """The records of a run; none where it has not begun."""
    folder = work / f"{name_of(lag, seed)}_masked"
    return Run(lag, seed, records(folder / "metrics.jsonl"), records(folder / "evaluations.jsonl"))


def print_table(runs: list[Run]) -> None:
    """A row for each MAX_STALENESS: means over the seeds, and the last accuracy of each."""
    common = min((len(run.steps) for run in runs), default=0)
    columns = ["S", "runs", "steps", f"reward, steps 1 to {common}", "reward, last third",
               "last greedy accuracy, by seed", "s a step", "oldest", "ratio min, max", "cut"]  # fmt: skip
    rows: list[list[object]] = []
    for lag in sorted({run.lag for run in runs}):
        these = [run for run in runs if run.lag == lag]
        rewards = [[step["reward_mean"] for step in run.steps] for run in these]
        firsts = [each[:common] for each in rewards]
        thirds = [each[-max(1, len(each) // 3) :] for each in rewards]
        last = [f"{run.evaluations[-1]['accuracy']:.0%}" for run in these if run.evaluations]
        steps = [step for run in these for step in run.steps]
        times = [seconds(those, "total") for run in these if (those := counted(run.steps, lag))]
        ratios = (
            min(step.get("correction_min", 1.0) for step in steps),
            max(step.get("correction_max", 1.0) for step in steps),
        )
        rows.append([
            lag, len(these), ", ".join(str(len(run.steps)) for run in these),
            *(f"{statistics.fmean(statistics.fmean(each) for each in part):.3f}" for part in (firsts, thirds)),
            ", ".join(last), f"{statistics.fmean(times):.2f}" if times else "–",
            max(step.get("policy_age_max", 0) for step in steps), f"{ratios[0]:.2f}, {ratios[1]:.2f}",
            f"{statistics.fmean(step.get('correction_cut_fraction', 0.0) for step in steps):.4f}",
        ])  # fmt: skip
    print(markdown(columns, rows))


def draw(runs: list[Run], path: Path) -> None:
    """Training reward over steps and seconds, greedy accuracy over steps: means, with thin lines or bars for seeds."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    rcParams["svg.hashsalt"] = "emailrl"  # the same rows draw the same bytes
    figure = Figure(figsize=(10.4, 3.4), layout="constrained")
    by_step, by_time, judged = figure.subplots(1, 3)
    for lag, colour in zip(sorted({run.lag for run in runs}), COLOURS, strict=False):
        these = [run for run in runs if run.lag == lag]
        common = range(min(len(run.steps) for run in these))
        rewards = [statistics.fmean(run.steps[n]["reward_mean"] for run in these) for n in common]
        times = [statistics.fmean(run.seconds[n] for run in these) for n in common]
        for run in these:
            each = [step["reward_mean"] for step in run.steps]
            by_step.plot([step["step"] for step in run.steps], each, color=colour, alpha=0.25, lw=0.8)
            by_time.plot(run.seconds, each, color=colour, alpha=0.25, lw=0.8)
        by_step.plot([n + 1 for n in common], rewards, color=colour, lw=2, label=f"MAX_STALENESS={lag}")
        by_time.plot(times, rewards, color=colour, lw=2)
        accuracy: dict[int, list[float]] = {}
        for one in (one for run in these for one in run.evaluations):
            accuracy.setdefault(one["step"], []).append(one["accuracy"])
        beside = [step + 0.25 * (lag - 1) for step in accuracy]  # points that would hide each other
        means = [statistics.fmean(values) for values in accuracy.values()]
        ranges = [[m - min(v), max(v) - m] for m, v in zip(means, accuracy.values(), strict=True)]
        judged.errorbar(
            beside, means, list(zip(*ranges, strict=True)), color=colour, marker="o", ms=4, capsize=3, lw=1.5
        )
    by_step.set(xlabel="step", ylabel="mean training reward")
    by_time.set(xlabel="seconds, evaluations included", ylabel="mean training reward")
    judged.set(xlabel="step", ylabel="greedy validation accuracy", ylim=(0, 1.04))
    judged.yaxis.set_major_formatter(PercentFormatter(1))
    by_step.legend(loc="lower right", fontsize=8, frameon=False)
    for axes in (by_step, by_time, judged):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
