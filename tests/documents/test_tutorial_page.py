"""The CPU settings of the tutorial take the time that it states."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from documents.pages import DOCS

from emailrl.plan import Known, find_device, make_plan
from emailrl.settings import load_settings


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
