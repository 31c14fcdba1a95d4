"""Command options: those generated from settings, and others shared by several commands::

@setting_options("model_name db")
def train(overrides: Overrides, trust: Trust = False, json: Json = False) -> None:
    settings = load_settings(overrides, trust=trust)
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer import Context, Option

from emailrl.base.errors import EmailRLError

if TYPE_CHECKING:
    from emailrl.settings.names import Leaf

MAX_INBOXES: Final = 50
Overrides = dict[str, Any]
"""Settings given on the command line, by name; None means not given, and `load_settings` ignores it."""


def path_option(*spellings: str, help: str, group: str | None = None) -> Any:
    """An option for the path of a file or folder; rejects an empty string."""
    return Option(*spellings, parser=_path, metavar="<path>", help=help, rich_help_panel=group)


def several(help: str, completer: Callable[..., list[str]]) -> Any:
    return Option(metavar="<str>", help=help, autocompletion=completer)


def _path(value: str) -> Path:
    if not value.strip():  # as a path it would mean the current folder
        raise typer.BadParameter("must not be empty; name a file or folder.")
    return Path(value)


def setting_options(*names: str, **summaries: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's parameter ``overrides`` with options for the named settings, in this order. Each of ``names``
    lists settings, after ``group:`` those of a group of their own in ``--help``. Spelling, type, bounds, choices and
    help come from the setting's declaration; ``summaries`` override the help for this command."""
    from emailrl.settings.names import by_name  # not at the top: commands without settings do not import pydantic

    options: dict[str, inspect.Parameter] = {}
    for line in names:
        group, _, members = line.rpartition(":")
        for leaf in (by_name()[name] for name in members.split()):
            options[leaf.key] = _parameter(leaf, summaries.get(leaf.key, leaf.summary), group or None)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for parameter in signature.parameters.values():
            is_place = parameter.name == "overrides"
            parameters += options.values() if is_place else [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)]

        @functools.wraps(command)
        def with_overrides(**given: Any) -> None:
            command(overrides={key: given.pop(key, None) for key in options}, **given)

        with_overrides.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return with_overrides

    return decorate


def _parameter(leaf: Leaf, summary: str, group: str | None) -> inspect.Parameter:
    help = summary.replace("`", "")
    kind: Any
    kinds = leaf.kinds - {None}
    (kind,) = kinds if len(kinds) == 1 else {str}  # a number or a word, which the setting tells apart
    words = (*(each.__name__ for each in kinds - {str} if leaf.choices), *leaf.choices)
    if leaf.is_path:
        option = path_option(*leaf.flags, help=help, group=group)
    else:
        kind = list[str] if kind is list else kind
        option = Option(
            *leaf.flags,
            help=help,
            metavar=f"<{'|'.join(words)}>" if words else None,
            min=leaf.minimum,
            max=leaf.maximum,
            autocompletion=one_of(*leaf.choices) if leaf.choices else BY_SETTING.get(leaf.key),
            rich_help_panel=group,
        )
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(leaf.key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def one_of(*choices: str) -> Callable[[str], list[str]]:
    """A completer for fixed choices."""
    return lambda incomplete: [choice for choice in choices if choice.startswith(incomplete)]


def names_of(module: str, table: str) -> Callable[[str], list[str]]:
    """A completer for the names in a module's table, which is imported only then."""
    return lambda incomplete: one_of(*getattr(importlib.import_module(module), table))(incomplete)


presets = names_of("emailrl.settings", "PRESETS")
models = names_of("emailrl.model.resolve", "PACKAGED")  # for anything else, shells complete file names


def checkpoints(incomplete: str) -> list[str]:
    """``best``, ``latest`` and the checkpoints below OUTPUT_DIR."""
    from emailrl.checkpoints import find_runs, list_checkpoints
    from emailrl.settings import load_settings

    found = ["best", "latest"]
    with suppress(EmailRLError):
        runs = find_runs(load_settings(looks_only=True).output.output_dir)
        found += [str(checkpoint.path) for run in reversed(runs) for checkpoint in list_checkpoints(run)]
    return one_of(*found)(incomplete)


def inboxes(context: Context, incomplete: str) -> list[str]:
    from emailrl.settings import load_settings

    with suppress(EmailRLError):
        db = context.params.get("db") or load_settings(looks_only=True).store.db
        return addresses_in(db, incomplete, MAX_INBOXES)
    return []


def addresses_in(db: Path, prefix: str = "", most: int | None = None) -> list[str]:
    """The addresses in a database with this prefix, in order; none if the database is not at hand."""
    from sqlalchemy import select

    from emailrl.mail.database import addresses, opened

    address = addresses.c.address
    wanted = select(address).where(address.startswith(prefix, autoescape=True)).order_by(address).limit(most)
    with suppress(EmailRLError), opened(db) as connection:
        return list(connection.scalars(wanted))
    return []


BY_SETTING: Final[dict[str, Any]] = {"model_name": models, "resume": one_of("auto", "latest", "best")}
"""Completers of settings without a fixed list of choices, by name."""

Json = Annotated[bool, Option("--json", help="Print the result as JSON on the last line of stdout.")]
Preset = Annotated[
    str | None,
    Option(
        "--preset", help="recommended, or a size: quick, small, medium, full, paper or guide.", autocompletion=presets
    ),
]
Checkpoint = Annotated[
    str | None, Option("--checkpoint", help="best, latest, or the folder of a checkpoint.", autocompletion=checkpoints)
]
Inbox = Annotated[
    str | None,
    Option("--inbox", help="Mailbox address. Default: the database's only mailbox.", autocompletion=inboxes),
]
Host = Annotated[str, Option("--host", metavar="<address>", help="Address to listen on.")]
Port = Annotated[int, Option("--port", min=1, max=65535, help="Port to listen on.")]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace existing output.")]
Resume = Annotated[bool, Option("--resume", help="Do the rest of an interrupted run; repeat its options.")]
Trust = Annotated[bool, Option("--trust", help="Trust the folder's settings from now on (docs/reference/security.md).")]
