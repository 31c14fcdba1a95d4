"""The Python blocks of the pages and the cells of the notebook run as written, on demo mail with ``nano``."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from documents.pages import DOCS, DOCUMENTS, Block, blocks
from documents.scratch import LIMITS, make_home, run

ELSEWHERE = {"docs/guides/custom.md", "docs/guides/clients.md", "docs/guides/trl.md"}
BLOCKS = [block for page in DOCUMENTS for block in blocks(page) if block.language == "python"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the databases which the blocks name."""
    folder = make_home(tmp_path_factory.mktemp("python"))
    for name in ("quickstart", "data"):
        (folder / name).mkdir()
    shutil.copy(folder / "demo.db", folder / "quickstart/demo.db")
    shutil.copy(folder / "demo.db", folder / "data/mail.db")
    shutil.copy(folder / "demo_questions.jsonl", folder / "data/mail_questions.jsonl")
    done = run("emailrl gen-db --source mail.mbox --db data/mine.db", folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_block_is_run_here_or_elsewhere() -> None:
    pages = {block.page for block in BLOCKS}
    assert (
        pages == {"README.md", "docs/reference/agent.md", "docs/guides/data.md", "docs/guides/experts.md"} | ELSEWHERE
    )


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.page not in ELSEWHERE], ids=lambda block: block.page
)
def test_it_runs(block: Block, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    for name, value in LIMITS.items():
        monkeypatch.setenv(name, value)
    exec(block.text.replace("quickstart/outputs/grpo_masked/best_model", "nano"), {"__name__": "__main__"})


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
