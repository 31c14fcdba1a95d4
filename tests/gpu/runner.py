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

from emailrl.model.resolve import NANO_DIR
from emailrl.records import read_records

Row = dict[str, Any]
Given = argparse.Namespace
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Bench:
    """A benchmark: what is measured, how, and what of it is shown."""

    file: str
    doc: str | None
    cases: Callable[[Given], Sequence[Row]]  # what tells the cases apart: one word of each (``case``) names its log
    measure: Callable[[Given, Row], Row | list[Row]]
    columns: Mapping[str, str]  # by title the key of a row, with a format behind a colon
    options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    smoke: Mapping[str, Any] = field(default_factory=dict)  # what options are in a rehearsal
    shapes: Callable[[Given], Sequence[str]] = lambda given: ()  # the random models it needs (see ``shapes``)
    launcher: Callable[[Row], Sequence[str]] = lambda case: [sys.executable]  # what runs the script for a case
    add: Callable[[list[Row]], None] = lambda rows: None  # adds to the rows what compares them
    check: Callable[[list[Row]], Sequence[str]] = lambda rows: ()  # what is not as it must be: the exit code is 1 then
    gpus: str = "0"
    seconds: float = 600
    limit: float = 300

    @property
    def name(self) -> str:
        return Path(self.file).stem

    def main(self, argv: Sequence[str] | None = None, *, apart: bool = True) -> list[Row]:
        given = self.arguments(sys.argv[1:] if argv is None else argv)
        if given.case:
            self._one(given, json.loads(given.case))
        given.out.mkdir(parents=True, exist_ok=True)
        file, begun = given.out / f"{self.name}.jsonl", time.monotonic()
        words = list(sys.argv[1:] if argv is None else argv)

        def run(case: Row, gpu: str) -> None:
            left = begun + given.seconds - time.monotonic()
            rows: list[Row] = [{"error": "no time left"}]
            if not apart:
                measured = self.measure(given, case)
                rows = measured if isinstance(measured, list) else [measured]
            elif left > 0:
                command = [*self.launcher(case), self.file, *words, "--out", given.out, "--case", json.dumps(case)]
                log = given.out / f"{self.name}-{case['case']}.log".replace(" ", "-")
                limit = min(given.limit, left + 60)
                rows = rows_of([str(word) for word in command], log=log, limit=limit, environ=environment(gpu))
            for row in rows:
                note(case | row | {"of": begun, "date": time.strftime("%Y-%m-%d")}, file)

        if not given.report:
            for shape in self.shapes(given):
                write_model(given, shape, apart=apart)
            hand_out(self.cases(given), given.gpus, run)
        rows = last_of_each(records(file))
        self.add(rows)
        print(self.table(rows))
        if problems := [*self.check(rows)]:
            sys.exit("\n".join(problems))
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
        self.options(parser)
        given = parser.parse_args(argv)
        given.out = Path(given.out or tempfile.mkdtemp(prefix=f"{self.name}.")).absolute()
        given.folder = (given.folder or given.out).absolute()
        if given.smoke:
            vars(given).update(self.smoke)
            given.gpus = [""]
        return given

    def _one(self, given: Given, case: Row) -> None:
        """A case's process: its rows are the last line of stdout."""
        faulthandler.dump_traceback_later(0.9 * given.limit)
        measured = self.measure(given, case)
        rows = measured if isinstance(measured, list) else [measured]
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps([row | {"machine": machine(), "versions": versions()} for row in rows]))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # vLLM's own end may hang

    def table(self, rows: Sequence[Row]) -> str:
        heads = {f"{one['machine']}, {one['date']}, {one['versions']}": None for one in rows if "machine" in one}
        cells = [
            [shown(row, key) for key in self.columns.values()] if "error" not in row else [row["case"], row["error"]]
            for row in rows
        ]
        return "\n".join(["", *heads, "", markdown([*self.columns], cells)])


def shown(row: Row, key: str) -> str:
    """A cell: a value in its format, – where there is none."""
    name, _, spec = key.partition(":")
    value = row.get(name)
    return "–" if value is None else format(value, spec)


def last_of_each(rows: Sequence[Row]) -> list[Row]:
    last = {row["case"]: row["of"] for row in rows}
    return [row for row in rows if row["of"] == last[row["case"]]]


def torchrun(case: Row) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case["ranks"])]


def markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; a row that is too short gets empty cells."""
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [f"| {' | '.join(map(str, row))} |" + " |" * (len(columns) - len(row)) for row in rows]
    return "\n".join(lines)


def note(row: Row, file: Path) -> None:
    """Add a row to a file of JSON lines, and show it on stderr."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(row) + "\n")
    print(json.dumps(row), file=sys.stderr, flush=True)


def records(path: Path) -> list[Row]:
    """The records of a file of JSON lines; none where there is no file."""
    return list(read_records(path)) if path.exists() else []


def machine() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()


def versions() -> str:
    names = ("torch", "transformers", "vllm", "trl", "unsloth")
    return ", ".join(f"{name} {version(name)}" for name in names if name in sys.modules)


# -- the GPU


def now() -> float:
    """Seconds, once the GPU has done what it was given."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_gib() -> float:
    """The most that torch has allocated on the GPU since ``forget_peak``; 0 on a CPU."""
    import torch

    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def forget_peak() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def write_model(given: Given, shape: str, *, apart: bool = True) -> Path:
    """Where a shape's random weights are; written, if need be, by a process that leaves nothing on the GPU."""
    folder: Path = given.folder / shape
    if (folder / "tokenizer_config.json").exists():  # written last
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    begun, words = time.perf_counter(), [shape, str(given.tokenizer), str(folder)]
    if apart:
        subprocess.run([sys.executable, str(HERE / "shapes.py"), *words], env=environment(given.gpus[0]), check=True)
    else:
        from shapes import save_model

        save_model(*words)
    print(f"weights of {shape} written in {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
    return folder


# -- processes


def hand_out(cases: Sequence[Any], gpus: Sequence[str], run: Callable[[Any, str], Any]) -> list[Any]:
    """Call ``run(case, gpu)`` for every case, one at a time on each GPU; the results in the order of the cases."""
    free: SimpleQueue[str] = SimpleQueue()
    for gpu in gpus:
        free.put(gpu)

    def on_a_free_gpu(case: Any) -> Any:
        gpu = free.get()
        try:
            return run(case, gpu)
        finally:
            free.put(gpu)

    if len(gpus) == 1:
        return [run(case, gpus[0]) for case in cases]
    with ThreadPoolExecutor(len(gpus)) as workers:
        return list(workers.map(on_a_free_gpu, cases))


def environment(gpu: str, **more: str) -> dict[str, str]:
    """The environment of a process on GPUs (``"0"``, ``"0,1"``, ``"all"``) or without any (``""``, in a rehearsal)."""
    from emailrl.engines.vllm.local import ENVIRONMENT

    path = os.pathsep.join(filter(None, [str(HERE.parents[1]), os.environ.get("PYTHONPATH")]))
    where = {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    where = {} if gpu == "all" else where
    kept = {"HF_HUB_OFFLINE": "1", "NCCL_NVLS_ENABLE": "0"} | os.environ
    return ENVIRONMENT | kept | more | where | {"PYTHONPATH": path}


def rows_of(command: Sequence[str], *, log: Path, limit: float, environ: Mapping[str, str] | None = None) -> list[Row]:
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
        found = json.loads(said[-1])
        return [row | wall for row in (found if isinstance(found, list) else [found])]
    show_end(log, f"ended with {process.returncode}" if in_time else f"over {limit:.0f} s")
    told = log.read_text(errors="replace").splitlines()
    errors_told = [line for line in told if "Error" in line and "ChildFailed" not in line] or told or ["?"]
    return [{"error": errors_told[-1].strip()[-200:] if in_time else f"over {limit:.0f} s"} | wall]


def show_end(log: Path, what: str) -> None:
    """Say on stderr what became of a process, with the last lines of its log."""
    lines = log.read_text(errors="replace").splitlines()[-15:]
    print("\n  ".join([f"{log.stem} {what}:", *lines]), file=sys.stderr, flush=True)


def ended_in_time(process: subprocess.Popen[Any], seconds: float, *, grace: float = 15) -> bool:
    """Wait so long for a process, then end it (see ``end``); whether it ended by itself."""
    try:
        process.wait(max(0.0, seconds))
        return True
    except subprocess.TimeoutExpired:
        end(process, grace=grace)
        return False


def end(process: subprocess.Popen[Any], *, grace: float = 15) -> None:
    """Interrupt a process; kill it if it has not ended after ``grace`` seconds."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(grace)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
