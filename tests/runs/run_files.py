"""Settings of a run in a folder, checkpoints as a run writes them, and what a stranger may put in their place."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Any

from tiny import make_metadata

from emailrl.checkpoints import write_checkpoint
from emailrl.measure.evaluation import Evaluation
from emailrl.records.trajectory import Scenario, Trajectory
from emailrl.runs.run import save_state, take_snapshot
from emailrl.settings import OutputSettings, Settings, TrainingSettings
from emailrl.training.state import RunState


def settings(output_dir: Path, mode: Any = "masked") -> Settings:
    return Settings(output=OutputSettings(output_dir=output_dir), training=TrainingSettings(mode=mode))


def evaluation(correct: int, total: int, step: int = 30) -> Evaluation:
    """An evaluation in which the first answers are right."""
    played = []
    for n in range(total):
        rubric = {"answer_correct": n < correct, "num_turns": 3, "sources_correct": n < correct}
        asked = Scenario(str(n), "?", "!", [], "a@x", "2001-01-01")
        played.append(Trajectory(str(n), str(n), asked, reward=0.5, rubric=rubric))
    return Evaluation(played, step)


def write(
    path: Path, kind: str = "checkpoint", step: int = 1, state: RunState | None = None, *, mode: str = "masked"
) -> None:
    def fill(directory: Path) -> None:
        (directory / "adapter_model.safetensors").write_text(f"weights of step {step}")
        save_state(directory / "trainer_state.pt", take_snapshot(state or RunState(step)), {"kl_coef": 0.5})

    write_checkpoint(path, make_metadata(kind=kind, step=step, mode=mode), fill)


PLANTED = ("link to a file", "link to a folder", "broken link", "pipe", "hard link")
"""What may be in the place of a file or folder that a command writes."""


def plant(path: Path, kind: str, victim: Path) -> None:
    """Put one of ``PLANTED`` in place of ``path``; links lead to the same name in ``victim`` if it has one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    same = victim / path.name
    file = same if same.is_file() else next(each for each in victim.iterdir() if each.is_file())
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "hard link":
        path.hardlink_to(file)
    else:
        folder = same if same.is_dir() else victim
        path.symlink_to({"link to a file": file, "link to a folder": folder}.get(kind, victim / "gone"))


def tree(folder: Path) -> dict[str, tuple[int, int, str | bytes]]:
    """Everything below a folder: type and mode, time of change, and content or target of a link."""
    found = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = (status.st_mode, status.st_mtime_ns, content)
    assert found and all(stat.S_IFMT(mode) for mode, *_ in found.values())
    return found
