"""``emailrl warm-start``: supervised start from scripted expert trajectories."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from emailrl.cli.options import Db, Json, Model, Questions, Seed, Trust
from emailrl.cli.output import print_json, progress_console, say_loading
from emailrl.errors import UsageError
from emailrl.plain import one_line


def warm_start(
    model: Model = None,
    out: Annotated[Path, typer.Option(help="Folder to write; it must not exist.")] = Path("outputs/warm_start"),
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 1500,
    batch_size: Annotated[int, typer.Option(min=1, help="Trajectories a step.")] = 128,
    learning_rate: Annotated[float | None, typer.Option(help="Peak; 2e-3 for a new model, 2e-4 for LoRA.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes that play the experts; all cores.")] = None,
    questions: Questions = None,
    db: Db = None,
    seed: Seed = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Teach a policy the form of the work: experts search, read and answer on demo mail, and the policy imitates them.

    With --model a LoRA adapter of that model is trained; without it a new model of 5 million parameters and its
    tokenizer are made from nothing. The experts err on purpose, so that reinforcement learning has something to find.
    With --questions they play one's own training questions on --db instead: search, read the source, answer.

    Examples:

    \b
      emailrl warm-start --out outputs/small
      emailrl warm-start --model Qwen/Qwen3-0.6B --steps 50 --batch-size 16
      emailrl warm-start --model Qwen/Qwen3-0.6B --questions data/mine_questions.jsonl --db data/mine.db
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from emailrl.settings import load_settings

    settings = load_settings({"model_name": model, "questions": questions, "db": db, "seed": seed}, trust=trust)
    if out.exists():  # as `training.warm_start` does, before torch is loaded for nothing
        raise UsageError(f"{out} exists.", "Name another folder with --out.")
    say_loading()
    from emailrl.sft.warm_start import warm_start as run

    columns = (TextColumn("warm start"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.4f}"),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=progress_console()) as progress:
        task = progress.add_task("", total=steps, loss=float("nan"))
        loss = run(
            settings, out, from_scratch=model is None, own_questions=questions is not None, steps=steps,
            batch_size=batch_size, learning_rate=learning_rate, workers=workers,
            report=lambda step, value: progress.update(task, completed=step, loss=value),
        )  # fmt: skip
    if json:
        print_json({"out": out, "steps": steps, "loss": loss})
    else:
        print(one_line(f"Wrote {out}: loss {loss:.4f}"))
