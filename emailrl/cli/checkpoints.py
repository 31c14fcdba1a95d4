"""``emailrl checkpoints``: list, show and prune the checkpoints under OUTPUT_DIR."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from emailrl.base.errors import UsageError
from emailrl.base.plain import one_line
from emailrl.cli import options
from emailrl.cli.inputs import note_runs_without_best
from emailrl.cli.options import Json, Overrides, Trust, setting_options
from emailrl.cli.output import print_json, progress_console, result_console
from emailrl.cli.tables import checkpoints_table

if TYPE_CHECKING:
    from emailrl.checkpoints import Checkpoint

checkpoints = typer.Typer(invoke_without_command=True, add_completion=False, rich_markup_mode=None)

Run = Annotated[
    Path | None, typer.Argument(help="Folder of a run. Default: all runs of OUTPUT_DIR, such as OUTPUT_DIR_masked-2.")
]


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
    """List the checkpoints of one run, or of all runs of OUTPUT_DIR.

    Examples:

    \b
      emailrl checkpoints list
      emailrl checkpoints list outputs/grpo_masked --json
    """
    from emailrl.checkpoints import list_checkpoints
    from emailrl.settings import load_settings

    root = load_settings(overrides, looks_only=True).output.output_dir
    found = [checkpoint for each in _runs(run, root, overrides["mode"]) for checkpoint in list_checkpoints(each)]
    _say_what_is_not_whole(run, root, overrides["mode"])
    if json:
        print_json([_summary(checkpoint) for checkpoint in found])
    else:
        _print_table(found)


@checkpoints.command("show", short_help="Show a checkpoint's metadata and verify its files.")
@setting_options("output_dir mode")
def show_command(
    overrides: Overrides,
    *,
    which: Annotated[
        str, typer.Argument(help="best, latest, or the folder of a checkpoint.", autocompletion=options.checkpoints)
    ] = "best",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show all settings, including defaults.")] = False,
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
    from dataclasses import asdict

    from rich.json import JSON

    from emailrl.checkpoints import find_checkpoint
    from emailrl.settings import load_settings

    settings = load_settings(overrides, looks_only=True)
    if which == "best":
        note_runs_without_best(settings.output.output_dir, overrides["mode"])
    found = find_checkpoint(which, settings.output.output_dir, overrides["mode"])
    if json:
        print_json({"path": found.path, "metadata": found.metadata})
        return
    console = result_console()
    console.print(f"{found.path}: all {len(found.metadata.files)} files match their recorded hashes", soft_wrap=True)
    shown = asdict(found.metadata)
    if not verbose:
        del shown["settings"]
        shown["non_default_settings"] = _differing(found.metadata.settings)
    console.print(JSON.from_data(shown), soft_wrap=True)


def _differing(recorded: dict[str, Any]) -> dict[str, Any]:
    """The recorded settings, by section, that differ from this version's defaults."""
    from emailrl.settings import Settings

    defaults = Settings().public()
    differing = {
        section: {name: value for name, value in values.items() if defaults.get(section, {}).get(name, ...) != value}
        for section, values in recorded.items()
    }
    return {section: values for section, values in differing.items() if values}


@checkpoints.command("prune", short_help="Remove the oldest checkpoints of each run.")
@setting_options("output_dir mode")
def prune_command(
    *,
    run: Run = None,
    keep: Annotated[
        int | None, typer.Option("--keep", min=0, help="Checkpoints to keep per run. Default: SAVE_TOTAL_LIMIT.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation.")] = False,
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
    from emailrl.base.disk import check_own
    from emailrl.checkpoints import prunable, prune
    from emailrl.settings import load_settings

    output = load_settings(overrides, trust=trust).output
    limit = output.save_total_limit if keep is None else keep
    runs = _runs(run, output.output_dir, overrides["mode"])
    for each in runs:
        check_own(each, "emailrl checkpoints prune")
    paths = [path for each in runs for path in prunable(each, limit)]
    for path in paths:
        progress_console().print(f"to remove: {path}", soft_wrap=True)
    if paths and not yes:
        if not sys.stdin.isatty():
            raise UsageError(f"Removing {_counted(paths)} needs confirmation.", "Add --yes.")
        typer.confirm(f"Remove {_counted(paths)}?", abort=True, err=True)
    removed = [path for each in runs for path in prune(each, limit)]
    if json:
        print_json({"removed": removed, "keep": limit})
    else:
        result_console().print(f"{_counted(removed)} removed, the last {limit} of each run kept")


def _counted(paths: list[Path]) -> str:
    return f"{len(paths)} checkpoint{'s' if len(paths) != 1 else ''}"


def _runs(run: Path | None, output_dir: Path, mode: str | None) -> list[Path]:
    from emailrl.checkpoints import find_runs

    if run is not None:
        if not run.is_dir():
            raise UsageError(f"No such run: {run}.", "See: emailrl checkpoints list")
        return [run]
    return find_runs(output_dir, mode)


def _say_what_is_not_whole(run: Path | None, output_dir: Path, mode: str | None) -> None:
    """List what the table omits: damaged checkpoints, and runs set aside by ``--overwrite``."""
    from emailrl.checkpoints import incomplete_checkpoints, run_folders
    from emailrl.runs.folder import REPLACED, REPLACING

    console = progress_console()
    for each in [run] if run else run_folders(output_dir, mode):
        for path, reason in incomplete_checkpoints(each).items():
            console.print(one_line(f"incomplete: {path}: {reason}"), style="yellow", soft_wrap=True)
        for aside in (each / REPLACED, each / REPLACING):
            if aside.exists():
                told = "set aside by --overwrite until the new run has a checkpoint; if that run died, the next emailrl"
                console.print(one_line(f"{aside}: {told} train restores it"), soft_wrap=True)


def _summary(checkpoint: Checkpoint) -> dict[str, Any]:
    metadata = checkpoint.metadata
    names = ("run_id", "kind", "step", "mode", "algorithm", "base_model", "metrics", "created_at")
    return {"path": checkpoint.path} | {name: getattr(metadata, name) for name in names}


def _print_table(found: list[Checkpoint]) -> None:
    from itertools import groupby

    if not found:
        progress_console().print("No checkpoints yet. Train first: emailrl train")
        return
    console = result_console()
    for run, members in groupby(found, key=lambda checkpoint: checkpoint.path.parent):
        console.print(str(run), soft_wrap=True)
        console.print(checkpoints_table(members))
