"""Save batches with a non-finite loss or gradient for inspection: tensors, described in JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from torch import Tensor

from emailrl.disk import replace_bytes
from emailrl.policy.tensors import write_tensors
from emailrl.training.step.prepared import Prepared


def save_skipped(folder: Path, name: str, prepared: Sequence[Prepared], step: int, broken: Mapping[str, float]) -> Path:
    """Write ``NAME.safetensors``, then ``NAME.json``, into ``folder``; returns the latter's path.

    Tensors are named ``<micro-batch>.<field>``, as in ``Prepared`` and ``MicroBatch``. The JSON has the step, the
    non-finite values, and each row's trajectory.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for n, item in enumerate(prepared):
        for part in (item, item.batch):
            for field in fields(part):
                value = getattr(part, field.name)
                if isinstance(value, Tensor):
                    tensors.setdefault(f"{n}.{field.name}", value.detach().cpu().contiguous())
    rows = [
        {"micro_batch": n, "row": row, "trajectory_id": sample.trajectory_id}
        for n, item in enumerate(prepared)
        for row, sample in enumerate(item.samples)
    ]
    beside = folder / f".{name}.safetensors"
    write_tensors(beside, tensors)
    beside.rename(folder / f"{name}.safetensors")
    found = {key: str(value) for key, value in broken.items()}
    text = json.dumps({"step": step, "not_finite": found, "rows": rows}, indent=2)
    described = folder / f"{name}.json"
    replace_bytes(described, (text + "\n").encode())
    return described
