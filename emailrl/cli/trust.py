"""Trust the current settings files of a folder: servers, keys, code, and paths outside it.

Until then, commands refuse an emailrl.toml, .env or wandb/settings that would send keys or emails to a server of its
choice, run code, or write outside the folder (docs/reference/security.md). Each such setting is shown for confirmation.
If one of them changes, or a code file it names, trust must be granted again. Trust is recorded outside the folder, in
$XDG_CONFIG_HOME/emailrl/trusted.json (default: ~/.config).

Examples:

\b
  emailrl trust .
  emailrl trust ~/work/mail --yes
  emailrl trust . --revoke
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from emailrl.base.errors import UsageError
from emailrl.base.plain import one_line, tell
from emailrl.cli.options import Json
from emailrl.cli.output import confirm, print_json


def trust(
    folder: Annotated[Path | None, Argument(metavar="dir", help="Folder to trust. Default: the current one.")] = None,
    yes: Annotated[bool, Option("--yes", "-y", help="Skip the confirmation.")] = False,
    revoke: Annotated[bool, Option("--revoke", help="Revoke trust in the folder.")] = False,
    json: Json = False,
) -> None:
    from emailrl.settings import folder_risks, trust_folder
    from emailrl.settings.trust import remember

    here = (folder or Path()).absolute()
    if not here.is_dir():
        raise UsageError(f"{here} is not a folder.", "Name the folder whose settings you trust.")
    if revoke:
        was = remember(here, None)
        tell(f"{here} {'is no longer trusted' if was else 'was not trusted'}.")
        if json:
            print_json({"folder": here, "revoked": was})
        return
    found = folder_risks(here)
    tell(f"{here}: {'nothing in it requires trust.' if not found else ''}")
    for risk in found:
        print(f"  {one_line(str(risk))}", file=sys.stderr)
    needed = "Trusting a folder", "Add --yes once you have read the list."
    if found and not yes and not confirm("Trust the folder with all of this?", *needed):
        tell("Not trusted.")
        raise typer.Exit(1)
    if found and folder_risks(here) != found:
        raise UsageError("The folder's files changed while you were reading.", "Run it again.")
    if found:
        trust_folder(here)
        tell("Trusted. To undo: `emailrl trust --revoke`.")
    if json:
        names = ("file", "setting", "value", "effect")
        print_json({"folder": here, "trusted": [{name: getattr(risk, name) for name in names} for risk in found]})
