"""Remove a mailbox from the databases, questions, runs, caches and pages below a folder.

Every mail that its address sent, got or stands in goes, and every question and trajectory that names it. Pages, tables,
logs and caches that emailrl made there are deleted, to be made again. Other files that name the address, such as the
archive that gen-db read, and .eval logs, which are compressed, are listed and left, with exit code 1. Weights trained
on the mail keep what they learned: delete the run to be rid of it.

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
from emailrl.cli.output import confirm, print_json, result_console, say

_ELSEWHERE = """Note: what went elsewhere stays there: W&B or Trackio, servers of judge, question writer and policy, \
hubs, other folders; redacted conversions name no address, but keep text."""


def forget(
    inbox: Annotated[str, Option("--inbox", help="Address of the mailbox.")],
    folder: Annotated[Path | None, path_option("--folder", help="Where to look. Default: this folder.")] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Only say what would go.")] = False,
    yes: Annotated[bool, Option("--yes", "-y", help="Skip the confirmation.")] = False,
    json: Json = False,
) -> None:
    from emailrl.measure.forget import forget as forget_mailbox

    place = (folder or Path()).absolute()
    if "@" not in inbox or not place.is_dir():
        raise UsageError(f"{inbox} is no address, or {place} no folder.", "Name both: --inbox, --folder.")
    found = forget_mailbox(inbox, place, dry=True)
    for path, count in [*found.removed.items(), *dict.fromkeys(found.deleted, 0).items()]:
        say(f"{path}: {counted(count, 'record') if count else 'the whole file'}", result_console(json=json))
    if not dry_run:
        if not yes and not confirm("Remove all of it?", "Forgetting a mailbox"):
            raise typer.Abort
        found = forget_mailbox(inbox, place, dry=False)
    for path, reason in found.left.items():
        say(f"left: {path} ({reason})")
    say(_ELSEWHERE)
    if json:
        print_json(found)
    if found.left and not dry_run:
        raise EmailRLError(f"{counted(len(found.left), 'file')} could not be cleared.", "See the lines above.")
