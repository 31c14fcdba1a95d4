"""Short conversations about leases in several inboxes, as trajectory files hold them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from emailrl.records import write_trajectories
from emailrl.records.trajectory import Message, Scenario, StopReason, Trajectory, Turn
from emailrl.settings import Settings, load_settings

SEARCH = """<tool_call>
{"name": "search_emails", "arguments": {"keywords": ["lease"]}}
</tool_call>"""


def trajectory(
    question: str, *, inbox: str, reward: float = 1.0, says: str = "31 May 2002", split: str | None = None, **more: Any
) -> Trajectory:
    """A question, a search, its result and an answer."""
    scenario = Scenario(
        question, f"When does lease {question} end?", "31 May", ["<m0@x>"], inbox, "2001-06-01", split=split
    )
    messages = [
        Message("system", f"You search the mail of {inbox}."),
        Message("user", scenario.question),
        Message("assistant", SEARCH),
        Message("tool", "The lease ends on 31 May 2002."),
        Message("assistant", f"{says}."),
    ]
    name = f"{question}-{inbox}-{reward}"
    turns = [Turn([1], [0.0], "stop"), Turn([1], [0.0], "stop")]
    given = {"stop_reason": StopReason.ANSWERED} | more
    return Trajectory(name, name, scenario, messages=messages, turns=turns, reward=reward, **given)


def write(path: Path, trajectories: Sequence[Trajectory]) -> Path:
    """Write them to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_trajectories(path, trajectories)
    return path


def settings_for(folder: Path, model: Path, **changes: Any) -> Settings:
    """Settings of a run on the 24 conversations of six inboxes in ``folder``."""
    file = folder / "talk.jsonl"
    if not file.exists():
        write(file, [trajectory(f"q{n}", inbox=f"i{n % 6}@x", says=f"It ends on {n} May") for n in range(24)])
    given = {
        "model_name": str(model), "trajectories": [file], "lora_rank": 4, "sft_batch_size": 4, "sft_steps": 8,
        "sft_eval_steps": 2, "sft_learning_rate": 1e-2, "output_dir": folder / "outputs" / "grpo",
        "wandb_mode": "disabled",
    }  # fmt: skip
    return load_settings(given | changes, environ={}, cwd=folder)
