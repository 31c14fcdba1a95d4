"""The figures of ``bench_async``, by hand, and what it keeps of a run that is cut short. No GPU is needed."""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent / "gpu"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    yield importlib.import_module("bench_async")
    for loaded in set(sys.modules) - before:
        if Path(getattr(sys.modules[loaded], "__file__", None) or "").parent == FOLDER:
            del sys.modules[loaded]  # other tests import them as parts of ``gpu``


def step(rollout: float, update: float, rest: float = 0.0, evaluation: float = 0.0) -> dict[str, Any]:
    seconds = {"rollout": rollout, "update": update, "total": rollout + update + rest + evaluation}
    return {"seconds": seconds | {"evaluation": evaluation}, "policy_age_mean": 0.0, "reward_mean": 1.0}


def test_steps_are_totals_without_evaluation_of_the_steps_that_count(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Long and short rollouts alternate; the first two steps compile, the last one has the server to itself."""
    turns = [step(20, 30), step(10, 5), step(10, 5, 0.5), step(10, 5, 0.5, evaluation=7)]
    ahead = [step(20, 30), step(1, 5), step(5, 5, 0.5), step(1, 5, 0.5, evaluation=7), step(1, 5), step(0, 5)]
    for name, steps in (("0", turns), ("1", ahead), ("turns", [step(9, 9)])):
        (tmp_path / f"bench_async-{name}.json").write_text(json.dumps(steps))
    bench.table(bench.recorded(tmp_path))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:5] == ["0", "2", "15.50", "10.00", "5.00"]
    # (10.5 + 6.5 + 6) / 3; medians would have made it 1 + 5.
    assert lines[2].split()[:5] == ["1", "3", "7.67", "2.33", "5.00"]
    assert lines[3].split() == ["turns", "0", "of", "1", "count"]
    assert lines[4] == "S=1: 2.02 x taking turns; expected by its clocks 1.50 x; 1.35 of that"


def given(**more: Any) -> argparse.Namespace:
    values = {"questions": 1, "rollouts": 1, "limit": 60.0, "start": 0.0, "deadline": time.monotonic() + 60}
    return argparse.Namespace(smol_base=None, smoke=True, **values | more)


RUN = """
import os, pathlib, signal, time
folder = pathlib.Path("run-one_masked")
folder.mkdir()
(folder / "metrics.jsonl").write_text('{"num_trajectories": 1}\\n')
%s
time.sleep(60)
"""


def test_a_run_that_takes_too_long_is_recorded(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "emailrl", lambda *words: [sys.executable, "-c", "import time; time.sleep(60)"])
    bench.train(tmp_path, "", "one", [""], given(limit=0.2))
    assert bench.recorded(tmp_path) == {"one": []}


def test_a_bench_that_is_ended_keeps_its_steps(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        bench, "emailrl", lambda *words: [sys.executable, "-c", RUN % "os.kill(os.getppid(), signal.SIGTERM)"]
    )
    before = signal.signal(signal.SIGTERM, bench.stop)
    try:
        with pytest.raises(SystemExit):
            bench.train(tmp_path, "", "one", [""], given())
    finally:
        signal.signal(signal.SIGTERM, before)
    assert bench.recorded(tmp_path) == {"one": [{"num_trajectories": 1}]}
