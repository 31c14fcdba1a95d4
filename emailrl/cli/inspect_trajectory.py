"""Show a trajectory turn by turn: question, tool calls and results, answer, and reward terms.

--verbose adds the prompt, the rubric and every token, colored by the loss mask. Sampled tokens show a probability
below 99% and, if advantages differ per token (PPO, whitening), their advantage. The tokenizer is that of the
run, benchmark or rollout that wrote the file; --model names another. --list shows one line per trajectory, --json
prints the trajectory, or the list, for programs. --html writes one page that opens in a browser without network: of the
run if the path is its folder, else of the file, or with --index of that trajectory alone.

Examples:

\b
  emailrl inspect-trajectory --verbose
  emailrl inspect-trajectory outputs/grpo_masked --list
  emailrl inspect-trajectory rollout-001.jsonl --index 0
  emailrl inspect-trajectory outputs/grpo_masked --follow
  emailrl inspect-trajectory outputs/grpo_masked --html run.html
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from emailrl.base.disk import check_out
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.plain import plain_line
from emailrl.cli.inputs import check_searchable
from emailrl.cli.options import Json, Overrides, Overwrite, setting_options
from emailrl.cli.output import print_json, print_next, result_console, warn
from emailrl.cli.report import HtmlFile, Redact, write_page
from emailrl.settings import Settings, load_settings

if TYPE_CHECKING:
    from emailrl.records import TrajectoryIndex


@setting_options("verbose model_name", verbose="Show the prompt, the rubric and every token.")
def inspect_trajectory(
    *,
    path: Annotated[Path | None, Argument(help="Trajectory file or run folder. Default: newest in OUTPUT_DIR.")] = None,
    index: Annotated[int | None, Option(help="Position in the file: 0 is the first, -1 the last. Default: -1.")] = None,
    overrides: Overrides,
    follow: Annotated[bool, Option("--follow", "-f", help="Show each new trajectory as it is written.")] = False,
    listing: Annotated[
        bool, Option("--list", help="List trajectories, one per line, from --index on (default: the last ones).")
    ] = False,
    limit: Annotated[int, Option("--limit", min=1, help="Trajectories to list.")] = 50,
    html: HtmlFile = None,
    redact: Redact = False,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    from emailrl.page import place
    from emailrl.records import TrajectoryIndex, trajectory_to_dict

    if follow + listing + (html is not None) > 1:
        raise UsageError("--follow, --list and --html are mutually exclusive.", "Choose one.")
    if json and follow:
        raise UsageError("--json prints one value; --follow goes on.", "Choose one.")
    if redact and html is None:
        raise UsageError("--redact applies to the page.", "Add --html FILE.")
    settings = load_settings(overrides, looks_only=True)
    check_searchable(path)
    if follow:
        roots = place.output_roots(settings.output.output_dir) if path is None else [place.existing(path)]
        for growing, position in place.follow(roots):
            try:
                _show(growing, position, settings, f"number {position + 1}")
            except EmailRLError as error:
                warn(plain_line(error.message))
        return
    if html is not None:
        subject = path or place.newest_in(settings.output.output_dir)
        check_out(html, may_exist=overwrite, option="--html")
        write_page([subject], html, settings, index=index, redact=redact, json=json)
        return
    found = TrajectoryIndex(place.newest_in(settings.output.output_dir) if path is None else place.find_file(path))
    count, wanted = len(found), -1 if index is None else index
    # A bad line that is the only one will be the command's error.
    is_bad = not listing and found.unreadable == [count + wanted if wanted < 0 else wanted]
    warn(*map(plain_line, [*([] if is_bad else found.bad_lines), *found.torn]))
    position = place.position_in(found, wanted)
    first = max(count - limit, 0) if wanted == -1 else position
    if json and listing:
        entries = enumerate(found.entries(first, first + limit), first)
        print_json([{"index": at} | entry._asdict() for at, entry in entries if entry.id is not None])
    elif json:
        print_json({"file": found.path, "index": position} | trajectory_to_dict(found.trajectory(position)))
    elif listing:
        from emailrl.cli.trajectory import trajectory_list

        result_console().print(trajectory_list(found, first, limit, result_console().width))
    else:
        _show(found, position, settings)
        if not settings.output.verbose:
            print_next(["inspect-trajectory", str(found.path), "--index", str(position), "--verbose"], "token by token")


def _show(index: TrajectoryIndex, position: int, settings: Settings, where: str = "") -> None:
    from emailrl.cli.trajectory import show_in_full
    from emailrl.records import training_notes

    shown, notes = [index.trajectory(position)], training_notes(index.path)[0]
    where = f", {where or f'{position + 1} of {len(index)} (--index {position})'}"
    show_in_full(index.path, shown, settings, result_console(), where=where, notes=notes)
