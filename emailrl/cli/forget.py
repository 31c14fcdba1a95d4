"""Remove a mailbox from the databases, questions, runs, caches and pages below a folder.

Every mail that its address sent, got or stands in goes, and every question, trajectory and training record that names
it. Pages, tables, logs and caches of replies below the folder are deleted: they can be made again. Other files that
name the address, such as the archive that gen-db read, are listed and left, with exit code 1. Weights trained on the
mail keep what they learned: delete the run to be rid of it.

Examples:

\b
  emailrl forget --inbox ann@example.com --dry-run
  emailrl forget --inbox ann@example.com --folder ~/mail-agent --yes
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.plain import counted
from emailrl.cli.options import Json, path_option
from emailrl.cli.output import print_json, result_console, say

_ELSEWHERE = (
    "Note: what went elsewhere stays there: W&B or Trackio (tables of trajectories), the servers of judge, question "
    "writer and policy (OPENAI_BASE_URL, JUDGE_BASE_URL, …), hubs, and files converted or exported to other folders; "
    "redacted conversions name no address, but keep text."
)


def forget(
    inbox: Annotated[str, Option("--inbox", help="Address of the mailbox.")],
    folder: Annotated[Path | None, path_option("--folder", help="Where to look. Default: this folder.")] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Only say what would go.")] = False,
    yes: Annotated[bool, Option("--yes", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    from emailrl.measure.forget import Forgotten
    from emailrl.measure.forget import forget as forget_mailbox

    place, console = folder or Path(), result_console(json=json)
    if "@" not in inbox or not place.is_dir():
        raise UsageError(f"{inbox if place.is_dir() else place} is no {'address' if place.is_dir() else 'folder'}.", "")

    def tell(done: Forgotten) -> None:
        for path, count in done.removed.items():
            console.print(f"{path}: {counted(count, 'record')}", soft_wrap=True, markup=False)
        for path in done.deleted:
            console.print(f"{path}: the whole file", soft_wrap=True, markup=False)
        for path, reason in done.left.items():
            say(f"left: {path} ({reason})")

    found = forget_mailbox(inbox, place, dry=True)
    if dry_run or not yes:
        tell(found)
    if not dry_run:
        if not yes:
            typer.confirm("Remove all of it?", abort=True, err=True)
        found = forget_mailbox(inbox, place, dry=False)
        if yes:
            tell(found)
    say(_ELSEWHERE)
    if json:
        files = {str(path): count for path, count in found.removed.items()}
        print_json({"removed": files, "deleted": found.deleted, "left": {str(k): v for k, v in found.left.items()}})
    if found.left and not dry_run:
        raise EmailRLError(f"{counted(len(found.left), 'file')} could not be cleared.", "See the lines above.")
