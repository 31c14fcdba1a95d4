"""``emailrl checkpoints``: list, show and prune the checkpoints under OUTPUT_DIR."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from emailrl import checkpoints as registry
from emailrl.base.disk import check_own
from emailrl.base.errors import UsageError
from emailrl.base.plain import counted, one_line
from emailrl.checkpoints import Checkpoint
from emailrl.cli import options
from emailrl.cli.inputs import note_runs_without_best
from emailrl.cli.options import Json, Overrides, Trust, setting_options
from emailrl.cli.output import confirm, near, print_json, progress_console, result_console, say, warn
from emailrl.runs.folder import REPLACED, REPLACING
from emailrl.settings import Settings, load_settings

if TYPE_CHECKING:
    from rich.table import Table

checkpoints = typer.Typer(invoke_without_command=True, add_completion=False, rich_markup_mode=None)

_RUN_HELP = "Run folder, or a folder of runs. Default: the runs of OUTPUT_DIR, such as OUTPUT_DIR_masked-2."
Run = Annotated[Path | None, Argument(help=_RUN_HELP)]


@checkpoints.callback()
def checkpoints_command(context: typer.Context) -> None:
    """List, show and prune the checkpoints of training runs.

    Examples:

    \b
      emailrl checkpoints list
      emailrl checkpoints show best
      emailrl checkpoints prune --keep 1
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


@checkpoints.command("list", short_help="List the checkpoints of one run or all runs.")
@setting_options("output_dir mode")
def list_command(overrides: Overrides, *, run: Run = None, json: Json = False) -> None:
    """List the checkpoints of one run, of a folder of runs, or of the runs of OUTPUT_DIR.

    Examples:

    \b
      emailrl checkpoints list
      emailrl checkpoints list outputs
      emailrl checkpoints list outputs/grpo_masked --json
    """
    root, mode = load_settings(overrides, looks_only=True).output.output_dir, overrides["mode"]
    runs = _runs(run, root, mode)
    found = [checkpoint for each in runs for checkpoint in registry.list_checkpoints(each)]
    for each in runs:  # what the table omits
        for path, reason in registry.incomplete_checkpoints(each).items():
            warn(one_line(f"incomplete: {path}: {reason}"))
        for aside in filter(Path.exists, (each / REPLACED, each / REPLACING)):
            told = "set aside by --overwrite until the new run has a checkpoint; if that run died, the next emailrl"
            say(f"{aside}: {told} train restores it")
    if json:
        names = ("run_id", "kind", "step", "mode", "algorithm", "base_model", "metrics", "created_at")
        print_json([{"path": each.path} | {name: getattr(each.metadata, name) for name in names} for each in found])
        return
    for folder, members in groupby(found, key=lambda checkpoint: checkpoint.path.parent):
        result_console().print(near(str(folder)), soft_wrap=True)
        result_console().print(checkpoints_table(members))
    if not found:
        looked = str(run or f"the runs of OUTPUT_DIR ({root})")
        say(f"No checkpoints yet in {looked}. Train first (emailrl train), or name a folder of runs.")


def checkpoints_table(found: Iterable[Checkpoint]) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, pad_edge=False, collapse_padding=True)
    for title in ("checkpoint", "kind", "step", "mode", "accuracy", "reward", "created (UTC)"):
        table.add_column(title, justify="right" if title in ("step", "accuracy", "reward") else "left")
    for checkpoint in found:
        metadata = checkpoint.metadata
        # A checkpoint between two evaluations records the previous one, which measured other weights.
        own = metadata.metrics.get("evaluated_step", metadata.step) == metadata.step
        accuracy, reward = (metadata.metrics.get(name) if own else None for name in ("accuracy", "reward"))
        numbers = "–" if accuracy is None else f"{accuracy:.1%}", "–" if reward is None else f"{reward:+.3f}"
        created = metadata.created_at[:16].replace("T", " ")
        table.add_row(checkpoint.path.name, metadata.kind, str(metadata.step), metadata.mode, *numbers, created)
    return table


@checkpoints.command("show", short_help="Show a checkpoint's metadata and verify its files.")
@setting_options("output_dir mode")
def show_command(
    overrides: Overrides,
    *,
    which: Annotated[
        str, Argument(help="best, latest, or the folder of a checkpoint.", autocompletion=options.checkpoints)
    ] = "best",
    verbose: Annotated[bool, Option("--verbose", "-v", help="Show all settings, including defaults.")] = False,
    json: Json = False,
) -> None:
    """Show a checkpoint's metadata and verify its files against their hashes.

    Settings that equal their defaults are omitted; --verbose and --json include them.

    Examples:

    \b
      emailrl checkpoints show
      emailrl checkpoints show best --verbose
      emailrl checkpoints show outputs/grpo_masked/checkpoint-20 --json
    """
    from rich.json import JSON

    output_dir = load_settings(overrides, looks_only=True).output.output_dir
    if which == "best":
        note_runs_without_best(output_dir, overrides["mode"])
    found = registry.find_checkpoint(which, output_dir, overrides["mode"])
    if json:
        print_json({"path": found.path, "metadata": found.metadata})
        return
    console = result_console()
    console.print(f"{found.path}: all {len(found.metadata.files)} files match their recorded hashes", soft_wrap=True)
    shown = asdict(found.metadata)
    if not verbose:
        defaults = Settings().public()
        differing = {
            section: {name: value for name, value in given.items() if defaults.get(section, {}).get(name, ...) != value}
            for section, given in shown.pop("settings").items()
        }
        shown["non_default_settings"] = {section: values for section, values in differing.items() if values}
    console.print(JSON.from_data(shown), soft_wrap=True)


@checkpoints.command("prune", short_help="Remove the oldest checkpoints of each run.")
@setting_options("output_dir mode")
def prune_command(
    *,
    run: Run = None,
    keep: Annotated[int | None, Option(min=0, help="Checkpoints to keep per run. Default: SAVE_TOTAL_LIMIT.")] = None,
    yes: Annotated[bool, Option("--yes", "-y", help="Skip the confirmation.")] = False,
    overrides: Overrides,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Remove the oldest checkpoint-N folders of each run; best_model and final are always kept.

    Examples:

    \b
      emailrl checkpoints prune --keep 1
      emailrl checkpoints prune outputs/grpo_masked --yes
    """
    output = load_settings(overrides, trust=trust).output
    limit, runs = output.save_total_limit if keep is None else keep, _runs(run, output.output_dir, overrides["mode"])
    for each in runs:
        check_own(each, "emailrl checkpoints prune")
    paths = [path for each in runs for path in registry.prunable(each, limit)]
    for path in paths:
        progress_console().print(f"to remove: {path}", soft_wrap=True)
    removing = counted(len(paths), "checkpoint")
    if paths and not yes and not confirm(f"Remove {removing}?", f"Removing {removing}"):
        raise typer.Abort
    registry.remove_checkpoints(paths)
    if json:
        print_json({"removed": paths, "keep": limit})
    else:
        result_console().print(f"{removing} removed, the last {limit} of each run kept")


def _runs(run: Path | None, output_dir: Path, mode: str | None) -> list[Path]:
    if run is not None and not run.is_dir():
        raise UsageError(f"No such run: {run}.", "See: emailrl checkpoints list")
    return registry.run_folders(output_dir, mode) if run is None else [run, *sorted(run.glob("[!.]*/"))]
