"""Show a trajectory turn by turn: question, tool calls and results, answer, and reward terms.

--verbose adds the prompt, the rubric and every token, coloured by the loss mask. Sampled tokens show their
log-probability and, if advantages differ per token (PPO, whitening), their advantage.

Examples:

\b
  emailrl inspect-trajectory --verbose
  emailrl inspect-trajectory outputs/grpo_masked --index 0
  emailrl inspect-trajectory outputs/grpo_masked/trajectories/eval-000010.jsonl
  emailrl inspect-trajectory outputs/grpo_masked --follow
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from emailrl.cli.options import Overrides, setting_options
from emailrl.cli.output import progress_console, result_console
from emailrl.errors import EmailRLError

if TYPE_CHECKING:
    from emailrl.settings import Settings
    from emailrl.trajectory import Trajectory


@setting_options("verbose")
def inspect_trajectory(
    *,
    path: Annotated[
        Path | None, typer.Argument(help="Trajectory file or run folder. Default: the newest under OUTPUT_DIR.")
    ] = None,
    index: Annotated[int, typer.Option("--index", help="Position in the file: 0 is the first, -1 the last.")] = -1,
    overrides: Overrides,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show each new trajectory as it is written.")] = False,
) -> None:
    from emailrl.inspection import locate
    from emailrl.plain import plain_line
    from emailrl.settings import load_settings

    settings = load_settings(overrides, looks_only=True)
    if follow:
        roots = locate.output_roots(settings.output.output_dir) if path is None else [locate.existing(path)]
        for file, position, trajectory in locate.follow(roots):
            _show(file, f"number {position + 1}", trajectory, settings)
    else:
        file = _newest(settings) if path is None else locate.find_file(path)
        if (torn := locate.torn_line(file)) is not None:
            note = f"{file}, line {torn}: incomplete (still being written, or cut off); skipped"
            progress_console().print(plain_line(note), style="yellow", soft_wrap=True)
        position, count, trajectory = locate.pick(file, index)
        _show(file, f"{position + 1} of {count} (--index {position})", trajectory, settings)


def _newest(settings: Settings) -> Path:
    from emailrl.inspection.locate import newest_file, output_roots

    newest = newest_file(output_roots(settings.output.output_dir))
    if newest is None:
        hint = "Record one (emailrl rollout or emailrl train), or name a file."
        raise EmailRLError(f"No trajectory under {settings.output.output_dir}*.", hint)
    return newest


def _show(file: Path, where: str, trajectory: Trajectory, settings: Settings) -> None:

    from emailrl.cli.trajectory import render_trajectory
    from emailrl.inspection.locate import fitting_tokenizer, origin, tokenizer_folders, training_note

    verbose = settings.output.verbose
    rendered = render_trajectory(
        trajectory,
        title=f"{file}, {where}",
        verbose=verbose,
        tokens=fitting_tokenizer(tokenizer_folders(file, settings.model.name), trajectory) if verbose else None,
        note=training_note(file, trajectory),
        origin=origin(file, trajectory),
    )
    result_console().print(rendered)
