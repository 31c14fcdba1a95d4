"""Export a checkpoint (default: the best) to a folder that transformers, PEFT and vLLM load as is.

Files are verified against their hashes. The folder also gets the tokenizer, the generation config, and a README with
accuracy, settings, and how to load and serve the model.

Examples:

\b
  emailrl export --format merged --out mail-agent
  emailrl export --checkpoint smol --format gguf
  emailrl export --questions mail_questions.jsonl --push-to-hub ann/questions
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Option

from emailrl.base.errors import UsageError
from emailrl.cli.inputs import note_runs_without_best
from emailrl.cli.options import Checkpoint, Json, Overwrite, Trust, path_option
from emailrl.cli.output import print_json, print_next, result_console, say, warn


def export(
    checkpoint: Checkpoint = None,
    format: Annotated[
        Literal["adapter", "merged", "gguf", "gguf-lora"],
        Option(help="LoRA adapter or merged weights, each also for llama.cpp."),
    ] = "adapter",
    questions: Annotated[
        Path | None, path_option("--questions", help="Export this question file as a dataset, and no checkpoint.")
    ] = None,
    out: Annotated[Path | None, path_option(help="Output folder. Default: in exports/ next to the runs.")] = None,
    push_to_hub: Annotated[
        str | None, Option("--push-to-hub", metavar="<name>", help="Upload it to this repository, private if new.")
    ] = None,
    overwrite: Overwrite = False,
    trust: Trust = False,
    json: Json = False,
) -> None:
    from emailrl.base.hub import push_folder
    from emailrl.checkpoints import find_checkpoint
    from emailrl.measure.export import export_checkpoint, export_questions
    from emailrl.model.resolve import SMOL, SMOL_DIR, untrained_note
    from emailrl.questions.load import read_questions
    from emailrl.settings import load_settings

    settings = load_settings(trust=trust)
    output_dir = settings.output.output_dir
    written: Any
    if questions is not None:
        if checkpoint is not None:
            raise UsageError("--checkpoint and --questions exclude each other.", "Export one, then the other.")
        found, form, target = questions, "questions", out or output_dir.parent / "exports" / questions.stem
        counts = export_questions(read_questions(questions, settings.data).scenarios, target, overwrite=overwrite)
        written, then = {"out": target, "format": form, "questions": counts}, ["benchmark", "--questions"]
    else:
        if checkpoint in (None, "best"):
            note_runs_without_best(output_dir)
        chosen = find_checkpoint(SMOL_DIR if checkpoint == SMOL else checkpoint or "best", output_dir)
        if note := untrained_note(chosen.path, output_dir):
            warn(note)
        found, form = chosen.path, format
        target = out or output_dir.parent / "exports" / "-".join([*found.absolute().parts[-2:], format])
        written = export_checkpoint(chosen, target, format=format, overwrite=overwrite)
        then = ["ask", "--checkpoint" if format == "adapter" else "--model"]
    said = f"{found} → {target} ({form}, {len(list(target.iterdir()))} files)"
    result_console(json=json).print(said, soft_wrap=True)
    if push_to_hub is not None:
        url = push_folder(target, push_to_hub, "dataset" if questions else "model")
        say(f"→ {url}", result_console(json=json))
    if json:
        print_json(written)
    elif "gguf" not in form:
        print_next([*then, str(target)])
