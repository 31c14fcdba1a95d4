"""Plans to test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from emailrl.plan import Known, Plan, find_device, make_plan
from emailrl.plan.devices import Device
from emailrl.settings import Settings, load_settings

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
H200 = find_device("H200")
CPU = Device("CPU", 64.0, 0.1, 2e10, is_gpu=False)
HERE = Path(__file__).parent  # without settings files
ASLEEP = {"engine": "vllm", "vllm_enable_sleep": "on"}
SERVED = {"engine": "vllm", "vllm_urls": "http://one:8000"}


def settings_with(**values: Any) -> Settings:
    return load_settings(values, cwd=HERE, environ={})


def plan_for(
    gpu: Device | str = "H200",
    *,
    tokens: int | None = None,
    share: float | None = None,
    known: Known | None = None,
    gpus: int | None = None,
    nodes: int | None = None,
    price: float | None = None,
    here: bool = False,
    model: str = "",
    **values: Any,
) -> Plan:
    """The plan with these settings; ``tokens`` of a trajectory, the ``share`` of them that is trained."""
    if model:
        values["model_name"] = f"Qwen/Qwen3-{model}"
    return make_plan(
        settings_with(**values), gpu if isinstance(gpu, Device) else find_device(gpu), num_gpus=gpus, nodes=nodes,
        price=price, known=known or Known(tokens, share), here=here,
    )  # fmt: skip


def write_metrics(run: Path) -> None:
    common = {"seconds": {"rollout": 4.0, "update": 2.0, "total": 8.0}, "num_trajectories": 12}
    dropped = {"groups_low_std": 1, "trajectories_exception": 5}
    records = [
        common | {"total_tokens": 3000, "trainable_tokens": 600, "groups_kept": 3, "dropped": dropped},
        common | {"total_tokens": 0, "trainable_tokens": 0, "groups_kept": 0, "dropped": {"groups_low_std": 4}},
        common | {"total_tokens": 6000, "trainable_tokens": 1200, "groups_kept": 4, "dropped": {}}
        | {"seconds": {"rollout": 6.0, "update": 2.0, "evaluation": 2.0, "total": 12.0}},
    ]  # fmt: skip
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
