"""Command output: results on stdout (with ``--json`` one JSON value), everything else on stderr, errors on one line."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from emailrl.base.plain import cut, one_line, tell
from emailrl.base.process import report

if TYPE_CHECKING:
    from rich.console import Console

    from emailrl.settings import PolicySettings

LONGEST_ERROR: Final = 2000
"""In characters; the name of a tensor or a key may be a megabyte long."""


def print_json(value: object) -> None:
    """Print ``value`` as one JSON value on one line of stdout: paths absolute, dataclasses as objects, NaN as null.

    In ASCII only, which works on every terminal and for undecodable file names.
    """
    print(json.dumps(_jsonable(value), allow_nan=False), flush=True)


def print_next(arguments: Sequence[str], comment: str = "", *, folder: Path | None = None) -> None:
    """Print the suggested next emailrl command, run in ``folder``, on stderr, ready to paste into a shell."""
    there = f"cd {shlex.quote(str(folder))} && " if folder else ""
    note = f" # {comment}" if comment else ""
    tell(f"Next: {there}{program(folder or Path.cwd())} {shlex.join(arguments)}{note}")


def progress_console() -> Console:
    """The console for progress and notes: on stderr."""
    from emailrl.cli.console import PlainConsole

    return PlainConsole(stderr=True)


def result_console(*, json: bool = False) -> Console:
    """The console for a command's results: stdout, or stderr with ``json``, as stdout holds only the JSON value."""
    from emailrl.cli.console import PlainConsole

    return PlainConsole(stderr=json)


def say(line: str, console: Console | None = None) -> None:
    """Print a line without control characters, on stderr by default; wraps at words on a terminal."""
    from rich.text import Text

    console = console or progress_console()
    console.print(Text(one_line(line)), soft_wrap=not console.is_terminal)


def say_loading(settings: PolicySettings, *names: str) -> None:
    """Announce the delay of importing torch and loading the models with these names.

    Raises EmailRLError first if one is ``smol`` or ``smol-base``, and its base model is missing.
    """
    from emailrl.model.smol_base import check_base

    for name in names:
        check_base(name, settings.model.smol_base)
    say("Loading the model ...")


def program(folder: Path) -> str:
    """How a shell in ``folder`` calls this command: by name if it is on PATH, else by path."""
    script = Path(sys.executable).with_name("emailrl")
    found = shutil.which("emailrl")
    if found and script.exists() and os.path.samefile(found, script):
        return "emailrl"
    if not script.exists():
        return f"{shlex.quote(sys.executable)} -m emailrl"
    return shlex.quote(min(str(script), os.path.relpath(script, folder), key=len))


def fail(message: str, hint: str, exit_code: int) -> NoReturn:
    """Exit with one line on stderr, ``error: message hint``; with several ranks, one per host prints it."""
    report(cut(one_line(f"error: {message} {hint}"), LONGEST_ERROR))
    sys.exit(exit_code)


def _jsonable(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value.parent.resolve() / value.name if ".." in value.parts else value.absolute())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
