"""The runner of the benchmarks: every case in a process of its own, its rows written as it ends, one short table last.

All benchmarks on it have ``--out`` (a folder for rows and logs; rows that earlier calls left there are in the table
too), ``--report`` (only that table), ``--smoke`` (a rehearsal on a CPU, whose figures mean nothing), ``--seconds``
(after which no further case begins), ``--limit`` (of a case), ``--gpus`` (each runs a case at a time), ``--folder``
(where the models are or are written) and ``--tokenizer`` (written beside them; default: the packaged policy's).
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from emailrl.model.resolve import NANO_DIR
from emailrl.records import read_records

Row = dict[str, Any]
Given = argparse.Namespace
HERE = Path(__file__).parent


def shapes_and_sides(given: Given) -> list[Row]:
    """The cases of a benchmark that has several sides and shapes."""
    return [{"case": f"{shape}-{side}", "shape": shape, "side": side} for shape in given.shape for side in given.sides]


@dataclass(frozen=True)
class Bench:
    """A benchmark: what is measured, how, and what of it is shown."""

    file: str
    doc: str | None
    measure: Callable[[Given, Row], Row | list[Row]]
    columns: Mapping[str, str]  # by title the key of a row, with a format behind a colon
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    cases: Callable[[Given], Sequence[Row]] = shapes_and_sides  # one word of each (``case``) names its log
    smoke: Mapping[str, Any] = field(default_factory=dict)  # what options are in a rehearsal
    shapes: Callable[[Given], Sequence[str]] = lambda given: given.shape  # the random models it needs (see ``shapes``)
    launcher: Callable[[Row], Sequence[str]] = lambda case: [sys.executable]  # what runs the script for a case
    add: Callable[[list[Row]], None] = lambda rows: None  # adds to the rows what compares them
    gpus: str = "0"
    seconds: float = 600
    limit: float = 300

    def main(self, argv: Sequence[str] | None = None, *, apart: bool = True) -> list[Row]:
        words = list(sys.argv[1:] if argv is None else argv)
        given = self.arguments(words)
        if given.case:
            self._one(given, json.loads(given.case))
        given.out.mkdir(parents=True, exist_ok=True)
        name, begun, free = Path(self.file).stem, time.monotonic(), SimpleQueue[str]()
        file = given.out / f"{name}.jsonl"

        def run(case: Row) -> None:
            left, rows = begun + given.seconds - time.monotonic(), [{"error": "no time left"}]
            if not apart:
                rows = listed(self.measure(given, case))
            elif left > 0:
                command = [*self.launcher(case), self.file, *words, "--out", given.out, "--case", json.dumps(case)]
                log, gpu = given.out / f"{name}-{case['case']}.log".replace(" ", "-"), free.get()
                rows = rows_of(list(map(str, command)), log, min(given.limit, left + 60), environment(gpu))
                free.put(gpu)
            for row in rows:
                line = json.dumps(case | row | {"of": begun, "date": time.strftime("%Y-%m-%d")})
                with file.open("a", encoding="utf-8") as lines:
                    lines.write(f"{line}\n")
                print(line, file=sys.stderr, flush=True)

        if not given.report:
            for shape in self.shapes(given):
                write_model(given, shape, apart=apart)
            for gpu in given.gpus:
                free.put(gpu)
            if apart:
                with ThreadPoolExecutor(len(given.gpus)) as pool:
                    list(pool.map(run, self.cases(given)))
            else:
                list(map(run, self.cases(given)))
        rows = records(file)
        last = {row["case"]: row["of"] for row in rows}
        rows = [row for row in rows if row["of"] == last[row["case"]]]
        self.add(rows)
        print(self.table(rows))
        if any("error" in row for row in rows):
            sys.exit(1)
        return rows

    def arguments(self, argv: Sequence[str]) -> Given:
        parser = argparse.ArgumentParser(
            description=self.doc, epilog=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        add = parser.add_argument
        add("--out", type=Path, default=os.environ.get("OUT"), help="default: OUT, or a new folder")
        add("--report", action="store_true")
        add("--smoke", action="store_true")
        add("--seconds", type=float, default=self.seconds)
        add("--limit", type=float, default=self.limit)
        add("--gpus", nargs="+", default=[self.gpus])
        add("--folder", type=Path, help="default: --out")
        add("--tokenizer", type=Path, default=NANO_DIR)
        add("--case", help=argparse.SUPPRESS)
        for name, how in self.options.items():
            add(name, **how)
        given = parser.parse_args(argv)
        given.out = Path(given.out or tempfile.mkdtemp(prefix="bench.")).absolute()
        given.folder = (given.folder or given.out).absolute()
        if given.smoke:
            vars(given).update(self.smoke)
            given.gpus = [""]
        return given

    def _one(self, given: Given, case: Row) -> None:
        """A case's process: its rows are the last line of stdout."""
        faulthandler.dump_traceback_later(0.9 * given.limit)
        rows = listed(self.measure(given, case))
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps([row | {"machine": machine(), "versions": versions()} for row in rows]))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # vLLM's own end may hang

    def table(self, rows: Sequence[Row]) -> str:
        """Machines and versions, then Markdown; a row with an error has it in place of figures."""
        lines = {f"{one['machine']}, {one['date']}, {one['versions']}": None for one in rows if "machine" in one}
        table = [[*self.columns], ["---"] * len(self.columns)]
        for row in rows:
            figures = [shown(row, key) for key in self.columns.values()]
            table.append([row["case"], row["error"]] if "error" in row else figures)
        return "\n".join(["", *lines, "", *(f"| {' | '.join(cells)} |" for cells in table)])


def shown(row: Row, key: str) -> str:
    """A cell: a value in its format, – where there is none."""
    name, _, spec = key.partition(":")
    value = row.get(name)
    return "–" if value is None else format(value, spec)


def listed(found: Row | list[Row]) -> list[Row]:
    return found if isinstance(found, list) else [found]


def torchrun(case: Row) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case["ranks"])]


def records(path: Path) -> list[Row]:
    """The records of a file of JSON lines; none where there is no file."""
    return list(read_records(path)) if path.exists() else []


def machine() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()


def versions() -> str:
    names = ("torch", "transformers", "vllm", "trl", "unsloth")
    return ", ".join(f"{name} {version(name)}" for name in names if name in sys.modules)


# -- the GPU


def now() -> float:
    """Seconds, once the GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_gib() -> float:
    """The most that torch has allocated on the GPU since ``forget_peak``; 0 on a CPU."""
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def forget_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def write_model(given: Given, shape: str, *, apart: bool) -> None:
    """Write a shape's random weights, if need be, in a process that leaves nothing on the GPU."""
    folder: Path = given.folder / shape
    if (folder / "tokenizer_config.json").exists():  # written last
        return
    folder.mkdir(parents=True, exist_ok=True)
    words = [shape, str(given.tokenizer), str(folder)]
    if apart:
        subprocess.run([sys.executable, str(HERE / "shapes.py"), *words], env=environment(given.gpus[0]), check=True)
    else:
        from shapes import save_model

        save_model(*words)


# -- processes


def environment(gpu: str, **more: str) -> dict[str, str]:
    """The environment of a process on GPUs (``"0"``, ``"0,1"``, ``"all"``) or without any (``""``, in a rehearsal)."""
    from emailrl.engines.vllm.local import ENVIRONMENT

    path = os.pathsep.join(filter(None, [str(HERE.parents[1]), os.environ.get("PYTHONPATH")]))
    where = {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    where = {} if gpu == "all" else where
    kept = {"HF_HUB_OFFLINE": "1", "NCCL_NVLS_ENABLE": "0"} | os.environ
    return ENVIRONMENT | kept | more | where | {"PYTHONPATH": path}


def rows_of(command: Sequence[str], log: Path, limit: float, environ: Mapping[str, str]) -> list[Row]:
    """The rows (JSON) in the last line that a command prints, with its seconds as ``wall``; an error is a row as well.
    The command is interrupted after ``limit`` seconds. What it writes to stderr is in ``log``."""
    begun = time.monotonic()
    with log.open("wb") as errors, tempfile.TemporaryFile("w+") as lines:
        process = subprocess.Popen(command, stdout=lines, stderr=errors, env=environ)
        in_time = ended_in_time(process, limit)
        lines.seek(0)
        said = lines.read().splitlines()
    wall = {"wall": round(time.monotonic() - begun, 1)}
    if in_time and process.returncode == 0 and said:
        return [row | wall for row in json.loads(said[-1])]
    show_end(log, f"ended with {process.returncode}" if in_time else f"over {limit:.0f} s")
    told = log.read_text(errors="replace").splitlines()
    errors_told = [line for line in told if "Error" in line and "ChildFailed" not in line] or told or ["?"]
    return [{"error": errors_told[-1].strip()[-200:] if in_time else f"over {limit:.0f} s"} | wall]


def show_end(log: Path, what: str) -> None:
    """Say on stderr what became of a process, with the last lines of its log."""
    lines = log.read_text(errors="replace").splitlines()[-15:]
    print("\n  ".join([f"{log.stem} {what}:", *lines]), file=sys.stderr, flush=True)


def ended_in_time(process: subprocess.Popen[Any], seconds: float, *, grace: float = 15) -> bool:
    """Wait so long for a process, then interrupt it, and later kill it; whether it ended by itself."""
    for wait, stop in ((max(0.0, seconds), signal.SIGINT), (grace, signal.SIGKILL)):
        try:
            process.wait(wait)
            return stop == signal.SIGINT
        except subprocess.TimeoutExpired:
            process.send_signal(stop)
    process.wait()
    return False
