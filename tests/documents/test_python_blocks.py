"""The Python blocks of the pages run as written, with the packaged policy and the demo's mail in place of the reader's.

Those of ``docs/guides/custom.md`` have a test of their own; that of ``docs/guides/scaling.md`` needs a Ray cluster:
it is compiled.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from documents.pages import DOCUMENTS, Block, blocks
from documents.scratch import make_home, run

ELSEWHERE = {"docs/guides/custom.md", "docs/guides/scaling.md"}
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
def test_it_runs(block: Block, home: Path) -> None:
    source = block.text.replace("quickstart/outputs/grpo_masked/best_model", "nano")
    (home / "block.py").write_text(source, encoding="utf-8")
    done = run(f"'{sys.executable}' block.py", home)
    assert done.returncode == 0, done.stderr
