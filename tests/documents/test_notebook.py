"""The notebook of the quickstart: valid, saved without outputs, and every cell runs in order."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from documents.pages import DOCS
from documents.scratch import make_home, run

NOTEBOOK = json.loads((DOCS / "start/quickstart.ipynb").read_text(encoding="utf-8"))
CELLS = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_is_saved_without_outputs() -> None:
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])
    for cell in NOTEBOOK["cells"]:
        assert cell["cell_type"] == "markdown" or (cell["outputs"], cell["execution_count"]) == ([], None)


@pytest.mark.slow
def test_every_cell_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Cells share a namespace; a line that begins with ``!`` goes to the shell, its ``{names}`` filled in."""
    home = make_home(tmp_path)
    monkeypatch.chdir(home)
    for name in list(os.environ):
        if name.startswith("EMAILRL_"):
            monkeypatch.delenv(name)
    names: dict[str, Any] = {}

    def shell(line: str) -> None:
        done = run(line.format(**names), home)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"

    names["shell"] = shell
    for cell in CELLS:
        cell = cell.replace("STEPS = 15", "STEPS = 1")
        exec(re.sub(r"^!(.+)$", lambda line: f"shell({line[1]!r})", cell, flags=re.MULTILINE), names)
    printed = capsys.readouterr().out
    assert re.search(r"^before: \d+\.\d%.*\nafter: ", printed, re.MULTILINE)
    assert "reference:" in printed
