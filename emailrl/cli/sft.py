"""Supervised fine-tuning on conversations: scripted experts or recorded trajectories.

With --questions, or a question file beside --db, scripted experts answer the training questions on --db. With
--trajectories, the best recorded trajectory of each question is imitated, whether an earlier policy, a teacher on a
chat server or another program produced it (ATIF documents, chat messages in OpenAI's form). With neither, experts
answer demo questions. Only the assistant's own tokens are trained. Inboxes of the split val (else of a tenth of the
conversations) are held out; their loss selects best_model, the starting point for `emailrl train --adapter` (--full:
--model). --nproc N divides every batch among N ranks.

Examples:

\b
  emailrl sft --model Qwen/Qwen3-0.6B --questions mine.jsonl --db mine.db
  emailrl sft --trajectories teacher.jsonl --best-of 8 --min-reward 1
  emailrl sft --model Qwen/Qwen3-0.6B --questions mine.jsonl --full
  emailrl sft --nproc 8 --model Qwen/Qwen3-4B --questions mine.jsonl
  emailrl sft --from-scratch --max-steps 1800 --batch-size 128 --out small
  emailrl sft --resume latest
"""

from __future__ import annotations

from os.path import lexists
from pathlib import Path
from typing import Annotated

from typer import Option

from emailrl.cli.inputs import check_inputs, suggest, with_inputs
from emailrl.cli.options import Json, Overrides, Trust, path_option, setting_options
from emailrl.cli.output import print_json, say
from emailrl.cli.train import does_other_work
from emailrl.ranks.launch import Launch
from emailrl.settings import load_settings


@setting_options(
    "model_name adapter full_finetuning from_scratch experts questions db train_dataset_size eval_dataset_size",
    "best_of min_reward thinking chat_template_kwargs",
    "sft_steps sft_batch_size sft_learning_rate sft_eval_steps sft_patience",
    "nproc seed wandb_mode tensorboard trackio allow_shared_inbox verbose",
    verbose="Log debug messages in training.log.",
)
def sft(
    overrides: Overrides,
    trajectories: Annotated[
        list[Path] | None, Option(metavar="<path>", help="File or folder to imitate; repeatable.")
    ] = None,
    workers: Annotated[int | None, Option(min=1, help="Processes for demo conversations. Default: all cores.")] = None,
    out: Annotated[Path | None, path_option(help="Folder of the run. Default: OUTPUT_DIR_sft.")] = None,
    resume: Annotated[
        str | None, Option(help="auto (the run, if there is one), latest, or the folder of a run or checkpoint.")
    ] = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    given = overrides | {"trajectories": trajectories or None}
    settings = load_settings(given, trust=trust)
    if does_other_work(Launch(settings.training.nproc), "emailrl.sft.loop", settings.training, settings.model.device):
        return
    from emailrl.cli.live import LiveRun
    from emailrl.model.resolve import check_base
    from emailrl.questions.load import questions_file
    from emailrl.sft.data import source_of
    from emailrl.sft.loop import find_run
    from emailrl.sft.loop import sft as run

    directory, checkpoint = find_run(settings.output.output_dir, out, resume)
    if checkpoint is not None:
        say(f"Resuming from {checkpoint.path} with the options recorded there.")
        settings = load_settings(given, recorded=checkpoint.metadata.settings)
        if resume in ("auto", "latest"):  # this run, even if another one starts in between
            out = directory
    db, wanted = settings.store.db, settings.sft
    asks = source_of(settings) == "questions"
    undecided = wanted.experts == "auto" and not (wanted.from_scratch or wanted.trajectories)
    if checkpoint is not None:  # a resumed run keeps its questions
        if asks:
            check_inputs(settings)
    elif asks or (undecided and lexists(questions_file(db))):
        settings = with_inputs(settings)
    elif undecided and "db" in settings.store.model_fields_set:
        say(f"Note: {db} is not used: it has no questions next to it ({questions_file(db).name}), nor --questions.")
    if not settings.sft.from_scratch:
        check_base(settings.model.name, settings.model.smol_base)
    with LiveRun(settings, json=json) as live:
        result = run(settings, out=out, resume=resume, workers=workers, display=live)
    if json:
        print_json(result)
    else:
        whole = settings.sft.full_finetuning or settings.sft.from_scratch
        start = ["--model" if whole else "--adapter", str(result.out)]
        suggest(["train", *start], settings, load_settings({}, trust=trust))
