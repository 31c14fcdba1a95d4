"""Show a trajectory turn by turn: question, tool calls and results, answer, and reward terms.

--verbose adds the prompt, the rubric and every token, colored by the loss mask. Sampled tokens show their
log-probability and, if advantages differ per token (PPO, whitening), their advantage. The tokenizer is that of the
run, benchmark or rollout that wrote the file; --model names another. --list shows one line per trajectory, --page
goes through the file. --html writes one page that opens in a browser without network: of the run if the path is its
folder, else of the file, or with --index of that trajectory alone.

Examples:

\b
  emailrl inspect-trajectory --verbose
  emailrl inspect-trajectory outputs/grpo_masked --index 0
  emailrl inspect-trajectory outputs/grpo_masked --list
  emailrl inspect-trajectory rollout-001.jsonl --page --index 0
  emailrl inspect-trajectory outputs/grpo_masked --follow
  emailrl inspect-trajectory outputs/grpo_masked --html run.html
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.cli.inputs import check_searchable
from emailrl.cli.options import Overrides, Overwrite, setting_options
from emailrl.cli.output import progress_console, result_console, say
from emailrl.cli.report import HtmlFile, Redact, write_page

if TYPE_CHECKING:
    from emailrl.records import TrajectoryIndex
    from emailrl.records.trajectory import Trajectory

    Show = Callable[[Path, str, Trajectory], None]


@setting_options("verbose model_name", verbose="Show the prompt, the rubric and every token.")
def inspect_trajectory(
    *,
    path: Annotated[
        Path | None, typer.Argument(help="Trajectory file or run folder. Default: the newest under OUTPUT_DIR.")
    ] = None,
    index: Annotated[
        int | None, typer.Option("--index", help="Position in the file: 0 is the first, -1 the last. Default: -1.")
    ] = None,
    overrides: Overrides,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show each new trajectory as it is written.")] = False,
    listing: Annotated[
        bool, typer.Option("--list", help="List trajectories, one per line, from --index on (default: the last ones).")
    ] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Trajectories to list.")] = 50,
    page: Annotated[bool, typer.Option("--page", help="Go through the file, one trajectory at a time.")] = False,
    html: HtmlFile = None,
    redact: Redact = False,
    overwrite: Overwrite = False,
) -> None:
    from emailrl.page import place
    from emailrl.records import TrajectoryIndex
    from emailrl.settings import load_settings

    if follow + listing + page + (html is not None) > 1:
        raise UsageError("--follow, --list, --page and --html are mutually exclusive.", "Choose one.")
    if redact and html is None:
        raise UsageError("--redact applies to the page.", "Add --html FILE.")
    settings = load_settings(overrides, looks_only=True)
    output_dir, show = settings.output.output_dir, partial(_show, settings.model.name, settings.output.verbose)
    if path is not None:
        check_searchable(path)
    if follow:
        roots = place.output_roots(output_dir) if path is None else [place.existing(path)]
        for growing, position in place.follow(roots):
            _show_next(growing, position, show)
        return
    if html is not None:
        write_page(
            path or _newest(output_dir), html, settings=settings, index=index, redact=redact, overwrite=overwrite
        )
        return
    wanted = -1 if index is None else index
    found = TrajectoryIndex(_newest(output_dir) if path is None else place.find_file(path))
    _warn(*(found.complaints if listing else _complaints(found, wanted)))
    if listing:
        _list(found, wanted, limit)
    elif page:
        _page(found, wanted, show)
    else:
        _show_one(found, wanted, show)


def _newest(output_dir: Path) -> Path:
    from emailrl.page.place import newest_file, output_roots

    newest = newest_file(output_roots(output_dir))
    if newest is None:
        hint = "Record one (emailrl rollout or emailrl train), or name a file."
        raise UsageError(f"No trajectory under {output_dir.parent}.", hint)
    say(f"Newest trajectory file: {newest}")
    return newest


def _warn(*lines: str) -> None:
    from emailrl.base.plain import plain_line

    for line in lines:
        progress_console().print(plain_line(line), style="yellow", soft_wrap=True)


def _complaints(index: TrajectoryIndex, wanted: int) -> list[str]:
    """Problems with the file, without a bad line that is the only one and will be the command's error."""
    position = len(index) + wanted if wanted < 0 else wanted
    return index.torn if index.unreadable == [position] else index.complaints


def _show_next(index: TrajectoryIndex, position: int, show: Show) -> None:
    """Show a newly written trajectory, or say why it cannot be read."""
    from emailrl.page.place import pick

    try:
        _, trajectory = pick(index, position)
    except EmailRLError as error:
        _warn(error.message)
    else:
        show(index.path, f"number {position + 1}", trajectory)


def _list(index: TrajectoryIndex, wanted: int, limit: int) -> None:
    from emailrl.cli.trajectory import trajectory_list
    from emailrl.page.place import position_in

    first = position_in(index, wanted)
    if wanted == -1:
        first = max(len(index) - limit, 0)
    console = result_console()
    console.print(trajectory_list(index, first, limit, console.width))


def _page(index: TrajectoryIndex, wanted: int, show: Show) -> None:
    """Show trajectories one by one on request, until end of input or q."""
    position = _show_one(index, wanted, show)
    while True:
        index.refresh()
        console = progress_console()
        keys = "Enter: next, p: previous, number: that index, q: quit"
        console.print(f"Index {position}, last {len(index) - 1}. {keys} > ", end="")
        try:
            answer = input().strip().lower()
        except EOFError:
            answer = "q"
        if answer == "q":
            return
        steps = {"": 1, "n": 1, "p": -1}
        try:
            target = position + steps[answer] if answer in steps else int(answer)
        except ValueError:
            continue
        if not 0 <= target < len(index):
            console.print("No such trajectory.", style="yellow")
            continue
        position = target
        try:
            _show_one(index, position, show)
        except EmailRLError as error:
            _warn(error.message)


def _show_one(index: TrajectoryIndex, wanted: int, show: Show) -> int:
    from emailrl.page.place import pick

    position, trajectory = pick(index, wanted)
    show(index.path, f"{position + 1} of {len(index)} (--index {position})", trajectory)
    return position


def _show(model: str, verbose: bool, file: Path, where: str, trajectory: Trajectory) -> None:
    from emailrl.cli.trajectory import render_trajectory
    from emailrl.page.place import origin
    from emailrl.page.tokens import fitting_tokenizer, tokenizer_folders
    from emailrl.records import training_notes

    rendered = render_trajectory(
        trajectory,
        title=f"{file}, {where}",
        verbose=verbose,
        tokens=fitting_tokenizer(tokenizer_folders(file, model), trajectory) if verbose else None,
        note=training_notes(file)[0].get(trajectory.id),
        origin=origin(file, trajectory),
    )
    result_console().print(rendered)
