"""The reference pages made from the code itself: ``python -m emailrl.cli.reference docs`` writes them, a test compares.

``docs/cli.md`` is every command's ``--help``; ``docs/settings.md`` every setting with its names, default and meaning;
``docs/openrlhf.md`` every flag of OpenRLHF with the settings it comes to.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import typer.main

from emailrl.cli.app import app
from emailrl.openrlhf.page import page as openrlhf_page
from emailrl.settings import PRESETS
from emailrl.settings.names import Leaf, by_name, leaves

WIDTH: Final = 100
_GENERATED: Final = "<!-- Made by `make docs`; edit the code instead. -->\n"
_SETTINGS: Final = """# Settings

A value is taken from the first of these that has one: command-line flag, environment variable, `.env`, `emailrl.toml`,
preset (`--preset`), default. `.env` and `emailrl.toml` are read from the directory a command is run in.

- **Environment and `.env`**: the names below; an empty value counts as not set, `none` empties an optional setting. Two
  names of one setting with different values are an error.
- **Their names**: the setting's in capitals (`max_steps` is `MAX_STEPS`). A single word has `EMAILRL_` before it, as
  a bare one may belong to another program: `gamma` is `EMAILRL_GAMMA`, `mode` is `EMAILRL_MODE`. Five words are read
  bare, as training scripts have always had them: `BETA`, `PATIENCE`, `SEED`, `TEMPERATURE`, `VERBOSE`. A variable
  that only the prefix keeps from being read (`GAMMA`, `EMAILRL_MAX_STEPS`) is warned of with the right name, and so
  is a name in `.env` that nearly matches one.
- **`emailrl.toml`**: a setting stands under its section (`[training]`, `max_steps = 20`) or at the top level
  (`max_steps = 20`); aliases work in lower case. Relative paths belong to the file's directory. Unknown
  keys are errors.
- **Trust**: servers, keys, code and places outside the folder that `.env` or `emailrl.toml` set want the folder to be
  trusted once (`emailrl trust`, docs/security.md).
- **Secrets** (marked so) never stand in logs, metadata or error messages.
"""


def cli_reference() -> str:
    """``docs/cli.md``: the help of every command, in the order ``emailrl --help`` lists them."""
    pages = (
        f"## {name}\n\n```\n{text.strip()}\n```\n" for name, text in _helps(typer.main.get_command(app), "emailrl")
    )
    return "\n".join(["# Commands\n", _GENERATED, *pages])


def settings_reference() -> str:
    """``docs/settings.md``: a table for each section of the tree, then the presets."""
    parts = [_SETTINGS, _GENERATED]
    for section, members in groupby(leaves(), key=lambda leaf: leaf.section):
        parts.append(f"## [{section}]\n\n| setting | environment | default | meaning |\n|---|---|---|---|")
        parts[-1] += "".join(f"\n{_row(leaf)}" for leaf in members) + "\n"
    return "\n".join([*parts, _presets()])


def openrlhf_reference() -> str:
    """``docs/openrlhf.md``: every flag of OpenRLHF and what stands for it here."""
    head, _, rest = openrlhf_page().partition("\n\n")
    return f"{head}\n\n{_GENERATED}\n{rest}"


def _helps(command: Any, name: str, parent: Any = None) -> Iterator[tuple[str, str]]:
    """``(command, help text)`` for a command and those below it."""
    context = command.make_context(name, [], parent=parent, resilient_parsing=True, terminal_width=WIDTH)
    yield context.command_path, command.get_help(context)
    for child in getattr(command, "commands", ()):
        yield from _helps(command.get_command(context, child), child, context)


def _row(leaf: Leaf) -> str:
    names = ", ".join(f"`{name}`" for name in leaf.env_names)
    choices = f" One of {', '.join(f'`{choice}`' for choice in leaf.choices)}." if leaf.choices else ""
    secret = " Secret." if leaf.secret else ""
    meaning = " ".join(leaf.description.split()).replace("|", "\\|")
    return f"| `{leaf.field}` | {names} | {_shown(leaf.default)} | {meaning}{choices}{secret} |"


def _presets() -> str:
    keys = list(dict.fromkeys(key for values in PRESETS.values() for key in values))
    rows = [f"| {' | '.join(['setting', *PRESETS])} |", "|---" * (len(PRESETS) + 1) + "|"]
    for key in keys:
        cells = (_shown(values.get(key, by_name()[key].default)) for values in PRESETS.values())
        rows.append(f"| `{key}` | {' | '.join(cells)} |")
    return "## Presets\n\n" + "\n".join(rows) + "\n"


def _shown(value: object) -> str:
    if value is None:
        return "–"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def main() -> None:
    """Write the pages into the folder named on the command line."""
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    (folder / "cli.md").write_text(cli_reference(), encoding="utf-8")
    (folder / "settings.md").write_text(settings_reference(), encoding="utf-8")
    (folder / "openrlhf.md").write_text(openrlhf_reference(), encoding="utf-8")


if __name__ == "__main__":
    main()
