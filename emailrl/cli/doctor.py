"""Show what is installed, what is missing, and how to fix it.

The first line says whether emailrl train can start in this folder, or what to do first. Checks only this machine: no
network access, no secrets shown. Exits 1 only if something essential is broken.

Examples:

\b
  emailrl doctor
  emailrl doctor --deep
  emailrl doctor --json
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text
from typer import Option

from emailrl.base.plain import plain_line
from emailrl.cli.options import Json
from emailrl.cli.output import print_json, result_console, say

STYLES = {"ok": "green", "note": "yellow", "missing": "red", "broken": "bold red"}


def doctor(
    deep: Annotated[bool, Option("--deep", help="Also import every package (about ten seconds).")] = False,
    json: Json = False,
) -> None:
    from emailrl.measure.doctor import examine, verdict

    checks = examine(deep=deep)
    is_broken = any(check.fatal for check in checks)
    is_ready, sentence = verdict(checks)
    table = Table.grid(padding=(0, 2))
    area = ""
    for check in checks:
        if check.area != area:
            area = check.area
            table.add_row(Text(area, style="bold"))
        found = Text(plain_line(check.found), overflow="fold")
        if check.remedy:
            found.append(f"\n→ {plain_line(check.remedy)}", style="dim")
        table.add_row(Text(f"  {check.status}", style=STYLES[check.status]), Text(plain_line(check.name)), found)
    if json:
        print_json({"ok": not is_broken, "ready": is_ready, "verdict": sentence, "checks": checks})
    else:
        say(sentence, result_console())
        result_console().print(table)
    if is_broken:
        raise typer.Exit(1)
