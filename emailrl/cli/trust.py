"""Trust the current settings files of a folder: servers, keys, code, and paths outside it.

Until then, commands refuse an emailrl.toml, .env or wandb/settings that would send keys or emails to a server of its
choice, run code, or write outside the folder (docs/reference/security.md). Each such setting is shown for confirmation.
If one of them changes, or a code file it names, trust must be granted again. Trust is recorded outside the folder, in
$XDG_CONFIG_HOME/emailrl/trusted.json (default: ~/.config).

Examples:

\b
  emailrl trust .
  emailrl trust ~/work/mail --yes
  emailrl trust --list
  emailrl trust . --revoke
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from emailrl.base.errors import UsageError
from emailrl.base.plain import one_line
from emailrl.cli.options import Json
from emailrl.cli.output import print_json

if TYPE_CHECKING:
    from emailrl.settings.trust import Risk


def trust(
    folder: Annotated[
        Path | None, typer.Argument(metavar="dir", help="Folder to trust. Default: the current one.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation.")] = False,
    revoke: Annotated[bool, typer.Option("--revoke", help="Revoke trust in the folder.")] = False,
    list_all: Annotated[bool, typer.Option("--list", help="List the trusted folders.")] = False,
    json: Json = False,
) -> None:
    here = (folder or Path()).absolute()
    if not list_all and not here.is_dir():
        raise UsageError(f"{here} is not a folder.", "Name the folder whose settings you trust.")
    if list_all:
        _list(json)
    elif revoke:
        _revoke(here, json)
    else:
        _trust(here, is_agreed=yes, json=json)


def _trust(folder: Path, *, is_agreed: bool, json: bool) -> None:
    from emailrl.settings import folder_risks, trust_folder

    found = folder_risks(folder)
    _say(f"{folder}: {'nothing in it requires trust.' if not found else ''}")
    for risk in found:
        _say(f"  {risk}")
    if found and not is_agreed and not _agrees():
        _say("Not trusted.")
        raise typer.Exit(1)
    if found and folder_risks(folder) != found:
        raise UsageError("The folder's files changed while you were reading.", "Run it again.")
    if found:
        trust_folder(folder)
        _say("Trusted. To undo: `emailrl trust --revoke`.")
    if json:
        print_json({"folder": folder, "trusted": [_record(risk) for risk in found]})


def _agrees() -> bool:
    if not sys.stdin.isatty():
        raise UsageError("Trusting a folder needs confirmation.", "Add --yes once you have read the list.")
    return typer.confirm("Trust the folder with all of this?", err=True)


def _revoke(folder: Path, json: bool) -> None:
    from emailrl.settings.trust import remember

    was = remember(folder, None)
    _say(f"{folder} {'is no longer trusted' if was else 'was not trusted'}.")
    if json:
        print_json({"folder": folder, "revoked": was})


def _list(json: bool) -> None:
    from emailrl.settings.trust import folders, record_file

    known = sorted(folders())
    for name in known if not json else ():
        print(one_line(name))
    if not known:
        _say(f"No trusted folders ({record_file()}).")
    if json:
        print_json({"folders": known})


def _record(risk: Risk) -> dict[str, str]:
    return {"file": risk.file, "setting": risk.setting, "value": risk.value, "effect": risk.effect}


def _say(line: str) -> None:
    print(line[: len(line) - len(line.lstrip())] + one_line(line), file=sys.stderr)
