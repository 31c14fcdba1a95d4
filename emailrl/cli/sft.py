"""Fine-tune a policy on conversations before any reward is seen: scripted experts', or recorded trajectories.

With --questions, experts play the training questions on --db. With --trajectories, the best recorded trajectory of
each question is imitated, whoever played it: an earlier policy, or a chat server as teacher. With neither, experts
play demo worlds. Only the assistant's own tokens are learned. Inboxes of the split val (else a tenth of them) are
held out: their loss chooses best_model, which `emailrl train --adapter` goes on from (--full: --model).

Examples:

\b
  emailrl sft --model Qwen/Qwen3-0.6B --questions data/mine_questions.jsonl --db data/mine.db
  emailrl sft --model Qwen/Qwen3-0.6B --trajectories outputs/teacher.jsonl --best-of 8 --min-reward 1
  emailrl sft --model Qwen/Qwen3-0.6B --questions data/mine_questions.jsonl --full --steps 200
  emailrl sft --from-scratch --steps 1800 --batch-size 128 --out outputs/small
  emailrl sft --resume latest
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from emailrl.cli.inputs import check_inputs
from emailrl.cli.options import Json, Overrides, Trust, path_option, setting_options
from emailrl.cli.output import print_json, print_next, say, say_loading


@setting_options(
    "model_name adapter full_finetuning from_scratch experts questions db train_dataset_size eval_dataset_size",
    "best_of min_reward",
    "sft_steps sft_batch_size sft_learning_rate sft_eval_steps sft_patience",
    "output_dir seed wandb_mode tensorboard allow_shared_inbox verbose",
)
def sft(
    overrides: Overrides,
    trajectories: Annotated[
        list[Path] | None, typer.Option(metavar="<path>", help="A file of trajectories to imitate; may be repeated.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes that play demo worlds; all cores.")] = None,
    out: Annotated[Path | None, path_option("--out", help="The run's folder; <output-dir>_sft without it.")] = None,
    resume: Annotated[
        str | None, typer.Option(help="auto (the run, if there is one), latest, or a run's or its checkpoint's folder.")
    ] = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    from emailrl.settings import load_settings

    given = overrides | {"trajectories": trajectories or None}
    settings = load_settings(given, trust=trust)
    from emailrl.sft.place import find_place

    place = find_place(settings, out, resume)
    if place.checkpoint is not None:
        say(f"Going on with {place.checkpoint.path} and the options recorded there.")
        settings = load_settings(given, recorded=place.checkpoint.metadata.settings)
        out = place.directory
    from emailrl.sft.data import source_of

    if source_of(settings) == "questions":
        check_inputs(settings)
    say_loading()
    from emailrl.sft.assemble import sft as run

    result = run(settings, out=out, resume=resume, workers=workers, progress=say)
    if json:
        print_json(result)
    else:
        whole = settings.sft.full_finetuning or settings.sft.from_scratch
        print_next(["train", "--model" if whole else "--adapter", str(result.out)])
