"""Options for training on several ranks, and the behavior of the launcher and of ranks other than 0."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from emailrl.base.errors import UsageError
from emailrl.base.process import INTERRUPTED, leave
from emailrl.cli.output import say
from emailrl.ranks.alone import Place
from emailrl.ranks.launch import Launch, launch, restarts

if TYPE_CHECKING:
    from emailrl.settings import OutputSettings, TrainingSettings


SMALLEST_RANK: Final = 1 << 28
"""Bytes of memory that a rank needs at least, for its libraries."""

LaunchOf = Callable[[Any], Launch]
"""Builds a launch from settings (NPROC, NNODES) and options that exist only on the command line."""


def _options(
    node_rank: Annotated[
        int | None, typer.Option("--node-rank", min=0, help="Number of this host, from 0.", rich_help_panel="Cluster")
    ] = None,
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(
            "--rdzv-endpoint",
            metavar="<host:port>",
            help="First host and a free port on it.",
            rich_help_panel="Cluster",
        ),
    ] = None,
    max_restarts: Annotated[
        int,
        typer.Option(
            "--max-restarts",
            min=0,
            help="Restarts from the last checkpoint after a rank has failed.",
            rich_help_panel="Cluster",
        ),
    ] = 0,
) -> LaunchOf:
    def launch_of(own: TrainingSettings) -> Launch:
        return Launch(own.nproc, own.nnodes, node_rank, rdzv_endpoint, max_restarts, own.rank_start_timeout)

    return launch_of


def launch_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameter ``ranks`` with options; it receives the `Launch` built from them and settings."""
    signature, options = (inspect.signature(function, eval_str=True) for function in (command, _options))
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        parameters += options.parameters.values() if parameter.name == "ranks" else [parameter]

    @functools.wraps(command)
    def with_ranks(**given: Any) -> None:
        own = {name: given.pop(name) for name in options.parameters if name in given}
        command(ranks=_options(**own), **given)

    with_ranks.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    )
    return with_ranks


def does_other_work(launch_of: LaunchOf, training: TrainingSettings, device: str) -> bool:
    """Launch the ranks, or run as one other than 0, and return True when done; False if this process trains."""
    ranks = launch_of(training)
    if ranks.is_needed:
        from emailrl.model.layout import total_memory

        if ranks.nproc > (most := total_memory() // SMALLEST_RANK):
            raise UsageError(
                f"--nproc {ranks.nproc} needs more memory than this host has: {total_memory() / 2**30:.1f} GiB.",
                f"Use {max(1, most)} or fewer.",
            )
        own = [argument for argument in sys.argv[1:] if argument != "--trust"]  # already trusted
        code = launch(ranks, own, say)
        if code == INTERRUPTED:
            leave()  # the ranks have ended; torch may leave behind threads that do not
        if code:
            sys.exit(code)  # no further line: the reason has been printed
        return True
    if Place.here().rank == 0:
        return False
    from emailrl.training.team import follow

    follow(training, device)
    return True


def after_restart(training: TrainingSettings, output: OutputSettings, *, overwrite: bool) -> tuple[str | None, bool]:
    """The values of ``--resume`` and ``--overwrite`` in a process that may have been restarted.

    A restart resumes the run that the command had started or resumed; if there was none, the options apply unchanged.
    """
    resume = output.resume
    if not restarts():
        return resume, overwrite
    import psutil  # type: ignore[import-untyped]

    from emailrl.checkpoints import list_checkpoints
    from emailrl.runs.resume import run_to_resume

    any_mode = resume is not None and "mode" not in training.model_fields_set  # a new run has that of the settings
    run = run_to_resume(resume or "auto", output.output_dir, training.mode, any_mode=any_mode)
    log = run / "training.log" if run else None
    if run is None or log is None or not log.exists():
        return resume, overwrite
    if log.stat().st_mtime < psutil.Process(os.getppid()).create_time():
        return resume, overwrite
    return (str(run) if list_checkpoints(run) else "auto"), False
