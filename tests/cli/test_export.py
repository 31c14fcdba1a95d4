"""``emailrl export``: where it goes and what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny import make_checkpoint, make_model
from transformers.utils.logging import enable_progress_bar


@pytest.fixture
def best(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "outputs" / "grpo_masked" / "best_model", make_model(tmp_path / "model")).path


def test_bare_it_exports_the_best_adapter(emailrl, best: Path, tmp_path: Path) -> None:
    code, out, error = emailrl("export", "--json")
    assert code == 0 and "(adapter," in error
    record = json.loads(out)
    assert record["out"] == str(tmp_path / "outputs" / "exports" / "grpo_masked-best_model-adapter")
    assert record["format"] == "adapter" and record["checkpoint"] == str(best)
    assert {"adapter_model.safetensors", "README.md", "tokenizer.json"} <= record["files"].keys()


def test_merged_by_path(emailrl, best: Path, tmp_path: Path) -> None:
    enable_progress_bar()  # as it is in a new process
    code, out, error = emailrl("export", "--checkpoint", best, "--format", "merged", "--out", "agent")
    assert code == 0 and error.endswith("ask --model agent\n") and error.count("\n") == 1
    assert out.splitlines() == [f"{best} → agent (merged, {len(list((tmp_path / 'agent').iterdir()))} files)"]
    assert (tmp_path / "agent" / "model.safetensors").is_file()
    code, out, error = emailrl("export", "--format", "merged", "--out", "agent")
    assert (code, out) == (2, "") and "agent exists" in error and "--overwrite" in error
    assert emailrl("export", "--format", "merged", "--out", "agent", "--overwrite")[0] == 0
