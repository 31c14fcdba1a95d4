"""Settings of a run's results: output, tracking and benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from emailrl.settings.fields import Env, Flag, Positive, Section, Written


class OutputSettings(Section):
    output_dir: Annotated[Path, Written(), Flag("--out")] = Path("outputs/grpo")
    """Root folder of runs; the mode is appended unless the name already ends in it."""
    save_steps: Positive = 10
    """Steps between checkpoints."""
    save_total_limit: Positive = 3
    """Checkpoints to keep, besides best and final."""
    resume: Annotated[str | None, Written()] = None
    """Resume a run: latest, best, auto (latest, or a new run if there is none), or the folder of a run or checkpoint;
    default: start a new run."""
    export_dir: Annotated[Path | None, Written()] = None
    """Folder to export the best model to after training (the last if none is best); default: no export."""
    export_format: Literal["adapter", "merged"] = "adapter"
    """Contents of EXPORT_DIR: the adapter, or merged weights that any program loads."""
    verbose: Annotated[bool, Env("VERBOSE"), Flag("--verbose", "-v")] = False
    """Print a line per rollout; log debug messages in training.log; show every token in inspect-trajectory."""
    show_trajectory_details: Annotated[bool, Flag("--show-trajectory-details")] = False
    """Print every trajectory turn by turn, after it is scored; with VERBOSE, token by token."""


class TrackingSettings(Section):
    wandb_project: str = "email-agent-grpo"
    """Weights & Biases project."""
    wandb_entity: str | None = None
    """Weights & Biases user or team."""
    wandb_name: str = "grpo-{mode}"
    """Run name; {mode} is filled in."""
    wandb_mode: Annotated[Literal["online", "offline", "disabled"], Flag("--wandb")] = "online"
    """Weights & Biases mode; online falls back to offline without a login."""
    tensorboard: bool = False
    """Also write TensorBoard events (needs the extra `tensorboard`)."""
    tensorboard_dir: Annotated[Path | None, Written()] = None
    """Folder for TensorBoard events, with a subfolder per run; default: in the run's own folder."""
    logging_steps: Positive = 1
    """Steps between log lines on the console, W&B and TensorBoard; metrics.jsonl has every step."""


class BenchmarkSettings(Section):
    bench_samples: Annotated[Positive, Flag("--samples")] = 1
    """Samples per test question; more than 1 also measures pass@k and the majority answer."""
    bench_sequential: Annotated[bool, Flag("--sequential")] = False
    """One question at a time: latency unaffected by batching."""
