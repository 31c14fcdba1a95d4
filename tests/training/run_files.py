"""Settings of a run in a folder, and checkpoints as a run writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from emailrl.checkpoints import Metadata, write_checkpoint
from emailrl.settings import OutputSettings, Settings, TrainingSettings
from emailrl.training.run.resume import save_state, take_snapshot
from emailrl.training.run.state import RunState


def settings(output_dir: Path, mode: Any = "masked") -> Settings:
    return Settings(output=OutputSettings(output_dir=output_dir), training=TrainingSettings(mode=mode))


def write(
    path: Path, kind: str = "checkpoint", step: int = 1, state: RunState | None = None, *, mode: str = "masked"
) -> None:
    def fill(directory: Path) -> None:
        (directory / "adapter_model.safetensors").write_text(f"weights of step {step}")
        save_state(directory / "trainer_state.pt", take_snapshot(state or RunState(step)), {"kl_coef": 0.5})

    metadata = Metadata(
        run_id="r", kind=kind, step=step, mode=mode, algorithm="grpo", base_model="nano", lora={}, metrics={},
        settings={}, parent=None, seed=1, versions={}, database_fingerprint="d", questions_fingerprint="q",
        git_commit=None,
    )  # fmt: skip
    write_checkpoint(path, metadata, fill)
