"""Planned figures in the documents are those of ``emailrl plan``; a failure shows the rows to write."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from documents.pages import DOCS

from emailrl.plan import Plan, find_device, make_plan
from emailrl.settings import load_settings

SCALING = (DOCS / "guides/scaling.md").read_text(encoding="utf-8")
PERFORMANCE = (DOCS / "evidence/performance.md").read_text(encoding="utf-8")


def plan_of(tmp_path: Path, *, gpus: int = 1, nodes: int = 1, **values: Any) -> Plan:
    """Qwen3-14B on H200s, 8 questions × 6 rollouts."""
    given = {"model_name": "Qwen/Qwen3-14B", "per_device_train_batch_size": 8, "num_generations": 6} | values
    settings = load_settings(given, cwd=tmp_path, environ={})
    return make_plan(settings, find_device("H200"), num_gpus=gpus, nodes=nodes, network=400)


def row_of(tmp_path: Path, gpus: int) -> str:
    """A row of the table in ``docs/guides/scaling.md``."""
    hosts = {"gpus": min(gpus, 8), "nodes": max(gpus // 8, 1)}
    apart, shared = plan_of(tmp_path, **hosts), plan_of(tmp_path, **hosts, engine="vllm")
    assert apart.split is not None
    both = [apart.tokens_per_second, shared.tokens_per_second]
    shown = [f"**{one:,.0f}**" if one == max(both) else f"{one:,.0f}" for one in both]
    cells = [
        f"{gpus:,}", f"{apart.split.trainers} + {apart.split.servers}", f"{apart.tokens.trajectories:,}",
        f"{apart.seconds.rollout:.1f}", f"{apart.seconds.update:.1f}", f"{apart.seconds.step:.1f}", shown[0],
        f"{both[0] / gpus:,.0f}", f"{shared.seconds.step:.1f}", shown[1],
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def test_the_table_of_several_gpus(tmp_path: Path) -> None:
    rows = re.findall(r"^\| [\d,]+ \| \d+ \+ \d+ \| .*\|$", SCALING, re.MULTILINE)
    assert rows == [row_of(tmp_path, gpus) for gpus in (2, 8, 64, 1000)]


def test_what_the_text_compares_it_with(tmp_path: Path) -> None:
    one, small = plan_of(tmp_path, engine="vllm"), {"per_device_train_batch_size": 4, "num_generations": 3}
    assert f"a step takes {one.seconds.step:.0f} s, {one.tokens_per_second:,.0f} tokens/s" in SCALING
    few, many = plan_of(tmp_path, gpus=8, **small), plan_of(tmp_path, gpus=8)
    assert f"reach {few.tokens_per_second:,.0f} tokens/s instead of {many.tokens_per_second:,.0f}" in SCALING
    defaults = load_settings({}, cwd=tmp_path, environ={}).training
    assert {name: getattr(defaults, name) for name in small} == small


def test_the_plan_beside_the_measured_step(tmp_path: Path) -> None:
    planned = plan_of(tmp_path, engine="vllm", max_model_len=16384).seconds
    table = PERFORMANCE.partition("## A full step")[2].partition("The plan is for")[0]
    for phase, seconds in (
        ("sampling", planned.rollout), ("log-probabilities of the reference", planned.score),
        ("update: forward, the old log-probabilities with it", planned.train), ("**a step**", planned.step),
    ):  # fmt: skip
        [shown] = re.findall(rf"^\| {re.escape(phase)} \|.*\| ([\d.]+)[^|]*\|$", table, re.MULTILINE)
        assert shown == f"{seconds:.0f}", phase
    [adapter] = re.findall(r"^\| adapter: save.*\| ([\d.]+)[^|]*\|$", table, re.MULTILINE)
    assert adapter == f"{planned.handover:.1f}"
