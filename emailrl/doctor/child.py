"""Run programs in a fresh interpreter, in case their imports crash it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

_SECONDS = 60


def run_child(program: str, *arguments: str) -> Any:
    """Run ``program`` in a fresh interpreter; return the JSON it prints last, or a string describing the failure."""
    command = [sys.executable, "-P", "-c", program, *arguments]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer in {_SECONDS} s"
    if ended.returncode:
        last = ended.stderr.strip().splitlines()[-1:]
        return last[0] if last else f"the process exited with {ended.returncode}"
    return json.loads(ended.stdout.strip().splitlines()[-1])
