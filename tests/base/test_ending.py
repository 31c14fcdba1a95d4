"""A process that hangs on its way out is gone in time, with the exit code of what it did."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import atexit, sys, threading, time, types
from emailrl.base.ending import bounded, ending_with

class Hangs:
    def __del__(self):
        time.sleep(60)

def run(how):
    if how != "without":
        sys.modules["vllm"] = types.ModuleType("vllm")
    if how == "destructor":
        sys.modules["vllm"].kept = Hangs()
    if how == "thread":
        threading.Thread(target=time.sleep, args=(60,)).start()
    if how == "handler":
        atexit.register(time.sleep, 60)
    if how == "close":
        with bounded(1):
            time.sleep(60)
    if how == "error":
        sys.modules["vllm"].kept = Hangs()
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
    started = time.monotonic()
    command = [sys.executable, "-c", PROGRAM, how]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50, cwd=Path(__file__).parents[2])
    assert time.monotonic() - started < 40
    assert ended.returncode == code and trace in ended.stderr
    assert ended.stdout in (out, "said\n") if how == "handler" else ended.stdout == out
