"""Export a checkpoint (default: the best) to a folder that transformers, PEFT and vLLM load as is.

Files are verified against their hashes. The folder also gets the tokenizer, the generation config, and a README with
accuracy, settings, and how to load and serve the model.

Examples:

\b
  emailrl export --format merged --out mail-agent
  emailrl export --checkpoint latest --format adapter --json
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from emailrl.cli.inputs import note_runs_without_best
from emailrl.cli.options import Checkpoint, Json, Overwrite, Trust, path_option
from emailrl.cli.output import print_json, print_next, result_console, warn


def export(
    checkpoint: Checkpoint = None,
    format: Annotated[
        Literal["adapter", "merged", "gguf", "gguf-lora"],
        Option(help="LoRA adapter or merged weights, each also for llama.cpp."),
    ] = "adapter",
    out: Annotated[Path | None, path_option(help="Output folder. Default: in exports/ next to the runs.")] = None,
    overwrite: Overwrite = False,
    trust: Trust = False,
    json: Json = False,
) -> None:
    from emailrl.checkpoints import find_checkpoint
    from emailrl.measure.export import export_checkpoint
    from emailrl.model.resolve import untrained_note
    from emailrl.settings import load_settings

    output_dir = load_settings(trust=trust).output.output_dir
    if checkpoint in (None, "best"):
        note_runs_without_best(output_dir)
    found = find_checkpoint(checkpoint or "best", output_dir)
    if note := untrained_note(found.path, output_dir):
        warn(note)
    run, name = found.path.absolute().parts[-2:]
    target = out or output_dir.parent / "exports" / f"{run}-{name}-{format}"
    written = export_checkpoint(found, target, format=format, overwrite=overwrite)
    count = len(list(written.out.iterdir()))
    said = f"{found.path} → {written.out} ({format}, {count} files)"
    result_console(json=json).print(said, soft_wrap=True)
    if json:
        print_json(written)
    else:
        print_next(["ask", "--checkpoint" if format == "adapter" else "--model", str(written.out)])
