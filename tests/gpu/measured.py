"""What was measured: seconds and memory of the GPU's work, rows as they come, and their table."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def settle() -> None:
    """Wait until the GPU, if there is one, has done what it was given."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def now() -> float:
    """Seconds, once the GPU has done what it was given."""
    settle()
    return time.perf_counter()


def peak_gib() -> float:
    """The most that torch has allocated on the GPU since ``forget_peak``; 0 on a CPU."""
    import torch

    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def forget_peak() -> None:
    """Begin to look for a new peak."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def note(row: Row, out: Path | None, *, unseen: Sequence[str] = ()) -> None:
    """Add a row to a file of JSON lines, if there is one, and show it on stderr without its ``unseen`` columns."""
    if out:
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    shown = {name: value for name, value in row.items() if name not in unseen}
    print(json.dumps(shown), file=sys.stderr, flush=True)


def records(path: Path) -> list[Row]:
    """The records of a file of JSON lines; none where there is no file."""
    from emailrl.records import read_records

    return list(read_records(path)) if path.exists() else []


def markdown(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; a row that is too short gets empty cells."""
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [f"| {' | '.join(map(str, row))} |" + " |" * (len(columns) - len(row)) for row in rows]
    return "\n".join(lines)
