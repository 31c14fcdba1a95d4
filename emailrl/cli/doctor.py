"""Show what is installed, what is missing and what to do about it.

Reads this machine alone: no network, no secret shown. Exits 1 only where something essential is broken.

Examples:

\b
  emailrl doctor
  emailrl doctor --deep
  emailrl doctor --json
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from emailrl.cli.options import Json
from emailrl.cli.output import print_json, result_console

if TYPE_CHECKING:
    from rich.table import Table

    from emailrl.doctor import Check

_STYLES = {"ok": "green", "note": "yellow", "missing": "red", "broken": "bold red"}


def doctor(
    deep: Annotated[bool, typer.Option("--deep", help="Also import every package (ten seconds or so).")] = False,
    json: Json = False,
) -> None:
    from emailrl.doctor import examine

    checks = examine(deep=deep)
    fatal = [check for check in checks if check.fatal]
    if json:
        print_json({"ok": not fatal, "checks": checks})
    else:
        result_console().print(_table(checks))
    if fatal:
        raise typer.Exit(1)


def _table(checks: list[Check]) -> Table:
    from rich.table import Table
    from rich.text import Text

    from emailrl.plain import plain_line

    table = Table.grid(padding=(0, 2))
    area = ""
    for check in checks:
        if check.area != area:
            area = check.area
            table.add_row(Text(area, style="bold"))
        found = Text(plain_line(check.found), overflow="fold")
        if check.remedy:
            found.append(f"\n→ {plain_line(check.remedy)}", style="dim")
        table.add_row(Text(f"  {check.status}", style=_STYLES[check.status]), Text(plain_line(check.name)), found)
    return table
