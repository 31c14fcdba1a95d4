"""The sections of the tree about what a run leaves: output, tracking, benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from emailrl.settings.fields import Env, Flag, Positive, Section, Written


class OutputSettings(Section):
    output_dir: Annotated[Path, Written()] = Path("outputs/grpo")
    """Root of the runs; the mode is appended, unless it already ends in it."""
    save_steps: Positive = 10
    """Steps from one checkpoint to the next."""
    save_total_limit: Positive = 3
    """Checkpoints kept, best and final apart."""
    resume: Annotated[str | None, Written()] = None
    """Go on with a run: auto (the latest, if any), latest, best, or a run's or checkpoint's folder; None begins one."""
    export_dir: Annotated[Path | None, Written()] = None
    """Where train, when it is done, exports its best model (the last, where none is best); None exports nothing."""
    export_format: Literal["adapter", "merged"] = "adapter"
    """What EXPORT_DIR gets: the adapter, or weights that any program loads."""
    verbose: Annotated[bool, Env("VERBOSE"), Flag("--verbose", "-v")] = False
    """Say more on the console."""


class TrackingSettings(Section):
    wandb_project: str = "email-agent-grpo"
    """Weights & Biases project."""
    wandb_entity: str | None = None
    """Weights & Biases user or team."""
    wandb_name: str = "grpo-{mode}"
    """Run name; {mode} is filled in."""
    wandb_mode: Annotated[Literal["online", "offline", "disabled"], Flag("--wandb")] = "online"
    """Where runs are tracked; online without a login goes on offline."""
    tensorboard: bool = False
    """Also write TensorBoard events (needs the extra)."""
    tensorboard_dir: Annotated[Path | None, Written()] = None
    """Folder that gets a folder of TensorBoard events a run; None writes them into the run's own."""
    logging_steps: Positive = 1
    """Steps from one line on the console, and at W&B and TensorBoard, to the next; metrics.jsonl has every step."""


class BenchmarkSettings(Section):
    bench_samples: Annotated[Positive, Flag("--samples")] = 1
    """Samples of each test question: above 1, pass@k and the majority's answer are measured too."""
    bench_sequential: Annotated[bool, Flag("--sequential")] = False
    """One question at a time: latency unaffected by batching."""
    show_trajectory_details: bool = False
    """Print every trajectory of a benchmark."""
