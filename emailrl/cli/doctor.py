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

from emailrl.cli.options import Json
from emailrl.cli.output import print_json, result_console, say
from emailrl.cli.tables import checks_table


def doctor(
    deep: Annotated[bool, typer.Option("--deep", help="Also import every package (about ten seconds).")] = False,
    json: Json = False,
) -> None:
    from emailrl.measure.doctor import examine, verdict

    checks = examine(deep=deep)
    fatal = [check for check in checks if check.fatal]
    is_ready, sentence = verdict(checks)
    if json:
        print_json({"ok": not fatal, "ready": is_ready, "verdict": sentence, "checks": checks})
    else:
        say(sentence, result_console())
        result_console().print(checks_table(checks))
    if fatal:
        raise typer.Exit(1)
