"""Command output: results on stdout (with ``--json`` one JSON value), everything else on stderr. Markup is disabled,
and printed text cannot control the terminal."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from emailrl.base.errors import UsageError
from emailrl.base.plain import one_line, tell

if TYPE_CHECKING:
    from rich.console import Console

    from emailrl.settings import PolicySettings

LONGEST_ID: Final = 200  # characters shown of a cited message id, which a model may make up


def progress_console() -> Console:
    """The console for progress and notes: on stderr."""
    return result_console(json=True)


def result_console(*, json: bool = False) -> Console:
    """The console for a command's results: stdout, or stderr with ``json``, as stdout holds only the JSON value."""
    from emailrl.cli.console import PlainConsole  # not at the top: ``--help`` does without Rich

    return PlainConsole(stderr=json)


def say(line: str, console: Console | None = None, *, style: str | None = None) -> None:
    """Print a line without control characters, on stderr by default; on a terminal it wraps at words, its paths are
    relative to the working folder, and ``error:`` is red."""
    from rich.text import Text

    console = console or progress_console()
    line = near(line) if console.is_terminal else line
    text = Text(one_line(line), style or "")
    text.highlight_regex("^error:", "red")
    console.print(text, soft_wrap=not console.is_terminal)


def near(text: str) -> str:
    """The text with what lies in the working folder named from there."""
    return re.sub(rf"(?<![\w.-]){re.escape(str(Path.cwd()))}/", "", text)


def warn(*lines: str) -> None:
    """Print lines in yellow on stderr."""
    for line in lines:
        say(line, style="yellow")


def say_loading(settings: PolicySettings, *names: str) -> None:
    """Announce the delay of loading these models, unless a chat server has them; first, ImportError if torch is missing
    or broken, EmailRLError if the base model of one of smol is missing."""
    if settings.is_chat:
        return
    gc.disable()  # a million objects that stay: no collection, not even the last, need look at them
    import torch  # noqa: F401

    from emailrl.model.resolve import check_base

    for name in names:
        check_base(name, settings.model.smol_base)
    say("Loading the model ...")
    import emailrl.model.policy  # noqa: F401

    gc.freeze()
    gc.enable()


def confirm(question: str, what: str, hint: str = "Add --yes.") -> bool:
    """Ask on the terminal; without one, UsageError that ``what`` needs confirmation."""
    if not sys.stdin.isatty():
        raise UsageError(f"{what} needs confirmation.", hint)
    return typer.confirm(question, err=True)


def say_again(what: str, purpose: str, out: Path | None = None) -> None:
    """Print what has happened, and how to go on: with ``--resume``, and ``out`` if that alone would not find it."""
    named = f" --out {shlex.quote(str(out))}" if out else ""
    say(f"{what}; to {purpose}, rerun the same command with --resume{named}")


def print_next(arguments: Sequence[str], comment: str = "", *, folder: Path | None = None) -> None:
    """Print the suggested next emailrl command, run in ``folder``, on stderr, ready to paste into a shell."""
    there = f"cd {shlex.quote(str(folder))} && " if folder else ""
    note = f" # {comment}" if comment else ""
    tell(f"Next: {there}{program(folder or Path.cwd())} {near(shlex.join(arguments))}{note}")


def program(folder: Path) -> str:
    """How a shell in ``folder`` calls this command: by name if it is on PATH, else by path."""
    script = Path(sys.executable).with_name("emailrl")
    found = shutil.which("emailrl")
    if found and script.exists() and os.path.samefile(found, script):
        return "emailrl"
    if not script.exists():
        return f"{shlex.quote(sys.executable)} -m emailrl"
    return shlex.quote(min(str(script), os.path.relpath(script, folder), key=len))


def print_json(value: object) -> None:
    """Print ``value`` as one JSON value on one line of stdout: paths absolute, dataclasses as objects, NaN as null."""
    # In ASCII only, which works on every terminal and for undecodable file names.
    print(json.dumps(_jsonable(value), allow_nan=False), flush=True)


def _jsonable(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value.parent.resolve() / value.name if ".." in value.parts else value.absolute())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_jsonable(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
