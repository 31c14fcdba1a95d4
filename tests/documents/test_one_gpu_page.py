"""The planned figures of ``docs/start/one_gpu.md`` are those of ``emailrl plan`` with the page's settings."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from documents.pages import DOCS, blocks
from documents.scratch import run_plainly

from emailrl.settings import PRESETS
from emailrl.settings.names import by_name

PAGE = (DOCS / "start/one_gpu.md").read_text(encoding="utf-8")
[SETTINGS] = [block.text for block in blocks("docs/start/one_gpu.md") if block.file == "emailrl.toml"]
ROWS = re.findall(
    r"^\| (\S+) \| (\S+) \| (?:`(\S+)` )?\| ([\d.]+) \| (\d+) \| ([\d.]+) \| (\d+) \| (.+?) \|$", PAGE, re.MULTILINE
)


def test_the_stages_are_those_of_the_presets() -> None:
    stages = re.findall(r"`--preset (\w+)` \| ([\d,]+), (\d+) .*\| (?:(\d+) )?steps? \|", PAGE)
    assert [stage[0] for stage in stages] == ["quick", "small", "medium", "full"]
    for name, *shown in stages:
        keys = ("train_dataset_size", "eval_dataset_size", "eval_steps")
        values = [PRESETS[name].get(key, by_name()[key].default) for key in keys]
        assert [int(each.replace(",", "") or 1) for each in shown] == values


def test_the_table_has_both_models_on_a_small_and_a_large_card() -> None:
    assert {(row[0], row[1]) for row in ROWS} >= {(model, gpu) for model in ("0.6B", "4B") for gpu in ("4090", "H100")}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(filter(None, row[:3])))
def test_planned_figures(row: tuple[str, ...], tmp_path: Path) -> None:
    size, gpu, setting, *figures = row
    (tmp_path / "emailrl.toml").write_text(SETTINGS, encoding="utf-8")
    environment = dict([setting.split("=")]) if setting else {}
    line = ["plan", "--gpu", gpu, "--model", f"Qwen/Qwen3-{size}", "--json"]
    planned = json.loads(run_plainly(line, tmp_path, environment).splitlines()[-1])
    assert planned["fits"]
    seconds = planned["seconds"]
    hours = seconds["run"] / 3600
    shown = f"{hours * 60:.0f} min" if hours < 2 else f"{hours:.1f} h"
    peak, sampling, update = planned["memory"]["peak"], seconds["rollout"], seconds["score"] + seconds["train"]
    adapter = f"{seconds['handover']:.1f}"
    assert figures == [f"{peak:.1f}", str(int(sampling + 0.5)), adapter, str(int(update + 0.5)), shown]
