"""Plans to test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from emailrl.plan import Plan, find_device, make_plan
from emailrl.settings import Settings, load_settings

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
H200 = find_device("H200")


def settings_with(tmp_path: Path, **values: Any) -> Settings:
    return load_settings(values, cwd=tmp_path, environ={})


def plan_for(tmp_path: Path, gpu: str = "H200", **values: Any) -> Plan:
    return make_plan(settings_with(tmp_path, **values), find_device(gpu))


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
