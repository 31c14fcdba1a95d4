"""Planned figures on the pages are those of ``emailrl plan``; a failure shows them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from documents.pages import DOCS, blocks

from emailrl.plan import Known, Plan, find_device, make_plan
from emailrl.plan.devices import GIB
from emailrl.settings import PRESETS, load_settings
from emailrl.settings.names import by_name

ONE_GPU = (DOCS / "start/one_gpu.md").read_text(encoding="utf-8")
[ONE_GPU_SETTINGS] = [block.text for block in blocks("docs/start/one_gpu.md") if block.file == "emailrl.toml"]
ROWS = re.findall(
    r"^\| (\S+) \| (\S+) \| (?:`(\S+)` )?\| ([\d.]+) \| (\d+) \| ([\d.]+) \| (\d+) \| (.+?) \|$", ONE_GPU, re.MULTILINE
)


def test_the_stages_are_those_of_the_presets() -> None:
    stages = re.findall(r"`--preset (\w+)` \| ([\d,]+), (\d+) .*\| (?:(\d+) )?steps? \|", ONE_GPU)
    assert [stage[0] for stage in stages] == ["quick", "small", "medium", "recommended"]
    for name, *shown in stages:
        keys = ("train_dataset_size", "eval_dataset_size", "eval_steps")
        values = [PRESETS[name].get(key, by_name()[key].default) for key in keys]
        assert [int(each.replace(",", "") or 1) for each in shown] == values


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(filter(None, row[:3])))
def test_planned_figures(row: tuple[str, ...], tmp_path: Path) -> None:
    size, gpu, setting, *figures = row
    (tmp_path / "emailrl.toml").write_text(ONE_GPU_SETTINGS, encoding="utf-8")
    environ = dict([setting.split("=")]) if setting else {}
    planned = make_plan(
        load_settings({"model_name": f"Qwen/Qwen3-{size}"}, "recommended", cwd=tmp_path, environ=environ),
        find_device(gpu),
    )
    assert planned.fits
    use, hours = planned.use, planned.run_seconds / 3600
    seconds = [f"{use.rollout:.0f}", f"{use.handover:.1f}", f"{use.score + use.train:.0f}"]
    shown = f"{hours * 60:.0f} min" if hours < 2 else f"{hours:.1f} h"
    assert figures == [f"{planned.memory.peak / GIB:.1f}", *seconds, shown]


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
        f"{apart.use.rollout:.1f}", f"{apart.use.update:.1f}", f"{apart.use.step:.1f}", shown[0],
        f"{both[0] / gpus:,.0f}", f"{shared.use.step:.1f}", shown[1],
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def test_the_table_of_several_gpus(tmp_path: Path) -> None:
    rows = re.findall(r"^\| [\d,]+ \| \d+ \+ \d+ \| .*\|$", SCALING, re.MULTILINE)
    assert rows == [row_of(tmp_path, gpus) for gpus in (2, 8, 64, 1000)]


def test_what_the_text_compares_it_with(tmp_path: Path) -> None:
    one, small = plan_of(tmp_path, engine="vllm"), {"per_device_train_batch_size": 4, "num_generations": 3}
    assert f"a step takes {one.use.step:.0f} s, {one.tokens_per_second:,.0f} tokens/s" in SCALING
    few, many = plan_of(tmp_path, gpus=8, **small), plan_of(tmp_path, gpus=8)
    assert f"reach {few.tokens_per_second:,.0f} tokens/s instead of {many.tokens_per_second:,.0f}" in SCALING
    defaults = load_settings({}, cwd=tmp_path, environ={}).training
    assert {name: getattr(defaults, name) for name in small} == small


def test_the_plan_beside_the_measured_step(tmp_path: Path) -> None:
    planned = plan_of(tmp_path, engine="vllm", max_model_len=16384).use
    table = PERFORMANCE.partition("## A full step")[2].partition("The plan is for")[0]
    for phase, seconds in (
        ("sampling", planned.rollout), ("log-probabilities of the reference", planned.score),
        ("update: forward, the old log-probabilities with it", planned.train), ("**a step**", planned.step),
    ):  # fmt: skip
        [shown] = re.findall(rf"^\| {re.escape(phase)} \|.*\| ([\d.]+)[^|]*\|$", table, re.MULTILINE)
        assert shown == f"{seconds:.0f}", phase
    [adapter] = re.findall(r"^\| adapter: save.*\| ([\d.]+)[^|]*\|$", table, re.MULTILINE)
    assert adapter == f"{planned.handover:.1f}"


def test_the_cpu_settings_take_the_time_of_the_page(tmp_path: Path) -> None:
    page = (DOCS / "start/tutorial.md").read_text()
    section = page.partition("### On a CPU")[2].partition("## 4.")[0]
    [block] = re.findall(r"```toml\n(.*?)```", section, re.DOTALL)
    [minutes] = map(int, re.findall(r"about (\d+) minutes", section))
    [tokens] = map(int, re.findall(r"--tokens-per-trajectory (\d+)", section))
    tomllib.loads(block)
    (tmp_path / "emailrl.toml").write_text(block)
    settings = load_settings({}, environ={}, cwd=tmp_path)
    planned = make_plan(settings, find_device("CPU"), known=Known(tokens))
    assert planned.runs and abs(planned.run_seconds / 60 - minutes) <= 0.1 * minutes
    usual = make_plan(settings, find_device("CPU"))
    assert round(usual.run_seconds / 3600) == 5 and usual.tokens.per_trajectory == 3800
