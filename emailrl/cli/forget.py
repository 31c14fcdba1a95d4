"""Remove a mailbox from the databases, questions, runs, caches and pages below a folder.

Every mail that its address sent, got or stands in goes, and every line of a JSONL file that names the address or such a
mail, or quotes six words of it. Pages and conversions that do are deleted, and caches of replies. Other files that do,
such as the archive that gen-db read, are listed and left, with exit code 1. Zip, tar, gzip, bzip2, xz, zstandard,
Parquet and Base64 are looked into; 7-Zip, RAR, PDF are not. Weights trained on the mail keep it: delete the run.

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
hubs, other folders, also those that links lead to."""


def forget(
    inbox: Annotated[str, Option("--inbox", help="Address of the mailbox.")],
    folder: Annotated[Path | None, path_option("--folder", help="Where to look. Default: this folder.")] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Only say what would go.")] = False,
    yes: Annotated[bool, Option("--yes", "-y", help="Skip the confirmation.")] = False,
    json: Json = False,
) -> None:
    from emailrl.measure import forget as removing

    place = (folder or Path()).absolute()
    if "@" not in inbox or not place.is_dir():
        raise UsageError(f"{inbox} is no address, or {place} no folder.", "Name both: --inbox, --folder.")

    def agreed(found: removing.Forgotten) -> bool:
        parts = {path: counted(count, "record") for path, count in found.removed.items()}
        for path, part in (parts | dict.fromkeys(found.deleted, "the whole file")).items():
            say(f"{path}: {part}", result_console(json=json))
        if not (dry_run or yes or confirm("Remove all of it?", "Forgetting a mailbox")):
            raise typer.Abort
        return not dry_run

    found = removing.forget(inbox, place, agreed)
    for path, reason in found.left.items():
        say(f"left: {path} ({reason})")
    say(_ELSEWHERE)
    if json:
        print_json(found)
    if found.left and not dry_run:
        raise EmailRLError(f"{counted(len(found.left), 'file')} left.", "Clear them now: later runs know less of it.")
