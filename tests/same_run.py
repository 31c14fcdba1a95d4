"""Whether two runs are the same run: everything they leave that does not depend on the clock, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from emailrl.checkpoints import incomplete_checkpoints, list_checkpoints, verify
from emailrl.records import read_records

TIMINGS = {"seconds", "tool_seconds", "duration", "latency_seconds", "eval_latency_seconds", "run_id"}


def without_timings(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_timings(item) for name, item in value.items() if name not in TIMINGS}
    return [without_timings(item) for item in value] if isinstance(value, list) else value


def lines(path: Path) -> list[Any]:
    return without_timings(list(read_records(path)))


def everything(run: Path) -> dict[str, Any]:
    """All a run leaves that does not depend on the clock: every recorded line, and the final weights and state."""
    recorded = [run / "metrics.jsonl", run / "evaluations.jsonl"]
    recorded += [*run.glob("trajectories/*.jsonl"), *run.glob("training/*.jsonl")]
    left: dict[str, Any] = {str(path.relative_to(run)): lines(path) for path in sorted(recorded)}
    for checkpoint in list_checkpoints(run):
        weights = {name: sha for name, sha in checkpoint.metadata.files.items() if name.endswith(".safetensors")}
        assert weights
        left[checkpoint.path.name] = checkpoint.metadata.step, weights
    left["versions"] = sorted(path.name for path in (run / "policy").iterdir())
    return left


def state_of(path: Path) -> dict[str, Any]:
    """The trainer state of a checkpoint."""
    return torch.load(path / "trainer_state.pt", weights_only=True)


def same(left: Any, right: Any) -> bool:
    """Whether two states are equal, tensors bit for bit."""
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left if key not in TIMINGS)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def assert_same_run(run: Path, other: Path) -> None:
    left, right = everything(run), everything(other)
    assert left.keys() == right.keys()
    for name in left:
        assert left[name] == right[name], name
    assert same(state_of(run / "final"), state_of(other / "final"))


def assert_nothing_torn(run: Path) -> None:
    """Whatever carries its name is whole: every checkpoint by its hashes, every record of a step to its last line."""
    assert [path for path in incomplete_checkpoints(run) if path.exists()] == []  # others are being filled, hidden
    for checkpoint in list_checkpoints(run):
        verify(checkpoint)
    for path in (*run.glob("trajectories/[!.]*.jsonl"), *run.glob("training/[!.]*.jsonl")):
        content = path.read_bytes()
        assert content.endswith(b"\n"), path
        assert all(isinstance(json.loads(line), dict) for line in content.splitlines()), path
    for path in run.glob("policy/[!.]*"):
        assert (path / "adapter_model.safetensors").is_file(), path
