"""Ctrl-C in the middle of an import, and a process that hangs on its way out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from emailrl.base.process import speaks

INTERRUPTED_IMPORT = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.{signal})
    time.sleep(1)
except KeyboardInterrupt:
    {reaction}
"""
RANK = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}


@pytest.mark.parametrize("name", ["typer", "pydantic"])  # of the entry point, of a command
@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("reaction", ["print('swallowed')", "raise ModuleNotFoundError('Are its requirements there?')"])
def test_an_import_cannot_swallow_it(name: str, number: str, reaction: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text(INTERRUPTED_IMPORT.format(signal=number, reaction=reaction))
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "emailrl", "checkpoints", "list"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": path, "LOCAL_RANK": "3"},  # of another program: it silences none
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # importing emailrl sets nothing


def test_a_parent_that_blocks_signals_does_not_keep_them_from_it(tmp_path: Path) -> None:
    """Ray's workers block SIGINT, by which a rank learns that another is lost."""
    (tmp_path / "typer.py").write_text(INTERRUPTED_IMPORT.format(signal="SIGINT", reaction="pass"))
    done = subprocess.run(
        [sys.executable, "-m", "emailrl", "checkpoints", "list"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT]),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_a_signal_after_the_last_line_ends_the_process_in_silence(tmp_path: Path) -> None:
    late = "lambda: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(9))"
    (tmp_path / "sitecustomize.py").write_text(f"import atexit, os, signal, time\natexit.register({late})")
    done = subprocess.run(
        [sys.executable, "-m", "emailrl", "checkpoints", "list", "nowhere"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 130 and done.stderr.startswith("error: ") and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, True),
        ({"LOCAL_RANK": "3"}, True),  # left behind by another program
        (RANK, False),
        (RANK | {"LOCAL_RANK": "0"}, True),
        (RANK | {"LOCAL_RANK": "x"}, True),
        (RANK | {"WORLD_SIZE": "2"}, True),
        (RANK | {"RANK": "0", "WORLD_SIZE": "1"}, True),
    ],
)
def test_all_but_the_later_ranks_of_a_host_report(environ: dict[str, str], expected: bool) -> None:
    assert speaks(environ) is expected


PROGRAM = """
import atexit, sys, threading, time, types
from emailrl.base.process import bounded, ending_with

class Hangs:
    def __del__(self):
        time.sleep(600)

def run(how):
    if how != "without":
        sys.modules["vllm"] = types.ModuleType("vllm")
    if how in ("destructor", "error"):
        sys.modules["vllm"].kept = Hangs()
    if how == "thread":
        threading.Thread(target=time.sleep, args=(600,)).start()
    if how == "handler":
        atexit.register(time.sleep, 600)
    if how == "close":
        with bounded(1):
            time.sleep(600)
    if how == "error":
        raise ValueError("a mistake of ours")
    print("said")
    atexit.register(print, "handled")
    sys.exit(130)

with ending_with("vllm", seconds=1):
    run(sys.argv[1])
"""


@pytest.mark.parametrize(
    ("how", "code", "out", "trace"),
    [
        ("without", 130, "said\nhandled\n", ""),
        ("destructor", 130, "said\nhandled\n", ""),
        ("thread", 1, "said\n", "Timeout"),
        ("handler", 1, "said\nhandled\n", "Timeout"),
        ("close", 1, "", "Timeout"),
        ("error", 1, "", "ValueError: a mistake of ours"),
    ],
)
def test_the_end_is_bounded(how: str, code: int, out: str, trace: str) -> None:
    command = [sys.executable, "-c", PROGRAM, how]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
    assert ended.returncode == code and trace in ended.stderr
    assert ended.stdout in (out, "said\n") if how == "handler" else ended.stdout == out


@pytest.mark.parametrize("handler", ["SIG_DFL", "SIG_IGN"])
def test_the_end_of_the_terminal_interrupts_unless_it_is_ignored(handler: str) -> None:
    code = f"import os, signal; signal.signal(signal.SIGHUP, signal.{handler}); from emailrl.base import process; "
    code += "process.install(); os.kill(os.getpid(), signal.SIGHUP); print('goes on')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ("goes on" in done.stdout, "KeyboardInterrupt" in done.stderr) == (
        handler == "SIG_IGN",
        handler == "SIG_DFL",
    )
