"""Reference pages generated from the code: `make docs` writes them, a test checks them.

In ``docs/reference``, ``cli.md`` has every command's ``--help``, ``settings.md`` every setting with its names, default
and meaning, ``api.md`` the docstrings of what programs import, ``openrlhf.md`` every flag of OpenRLHF with its
equivalent settings. ``docs/llms.txt`` has every page with its first sentence. ``docs/images/example.html``, which git
does not keep, is the page of a quickstart's run.
"""

from __future__ import annotations

import gzip
import html
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator
from enum import Enum
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import typer.main
from pydantic import BaseModel

from emailrl.cli.app import app
from emailrl.openrlhf import FLAGS, Flag
from emailrl.settings import PRESETS
from emailrl.settings.names import Leaf, by_name, leaves
from emailrl.settings.needs import NEEDS, REFUSED

WIDTH: Final = 100
_GENERATED: Final = "<!-- Made by `make docs`; edit the code instead. -->\n"
_COMMANDS: Final = "The help of every command, as `emailrl COMMAND --help` prints it.\n"
_SETTINGS: Final = """# Settings

Every setting with its names, default and meaning, by section. The search finds each by its name.
"""
_WANTED: Final = (
    ("The model and its adapter", ("model", "lora")),
    ("How the agent plays", ("agent",)),
    ("Where completions come from", ("vllm", "openai")),
    ("Mail", ("store",)),
    ("Questions", ("data", "generation")),
    ("Supervised fine-tuning", ("sft",)),
    ("Reinforcement learning", ("training", "algorithm")),
    ("What is rewarded", ("rewards", "reward_weights")),
    ("Measuring and stopping", ("evaluation", "benchmark")),
    ("Files, checkpoints and trackers", ("output", "tracking")),
)
"""What a reader of the settings wants, with the sections that have it."""
_RULES: Final = """## How a value is found

Values are looked up in this order: command-line flag, environment variable, `.env`, `emailrl.toml`, preset
(`--preset`), default. `.env` and `emailrl.toml` are read from the working directory.

- **Environment and `.env`**: an empty value counts as unset; `none` clears an optional setting. Two names of the same
  setting with different values are an error.
- **Names**: the setting's name in upper case (`max_steps` is `MAX_STEPS`). Single words get the prefix `EMAILRL_`,
  because the bare word may belong to another program: `gamma` is `EMAILRL_GAMMA`. Five words common in training scripts
  have none: `BETA`, `PATIENCE`, `SEED`, `TEMPERATURE`, `VERBOSE`. A warning gives the right name for a wrong prefix,
  and for a name in `.env` that nearly matches one.
- **`emailrl.toml`**: put a setting under its section (`[training]`, `max_steps = 20`) or at the top level; aliases work
  in lower case. Relative paths start at the file's directory. Unknown keys are errors.
- **Trust**: if `.env` or `emailrl.toml` sets servers, keys, code, or paths outside the folder, the folder must be
  trusted once (`emailrl trust`; [why](security.md)).
- **Needs**: a setting without what it needs is an error or, if nothing else depends on it, a note in the run's header.
- **Secrets** (marked below) never appear in logs, metadata or error messages.
"""


def cli_reference() -> str:
    """``docs/reference/cli.md``: the help of every command, in the order ``emailrl --help`` lists them."""
    helps = list(_helps(typer.main.get_command(app), "emailrl"))
    groups = re.findall(r"^([A-Z][\w ]+):\n((?:  [a-z].+\n?)+)", helps[0][1], re.MULTILINE)
    index = ""
    for group, commands in groups:
        names = re.findall(r"^  ([a-z-]+)", commands, re.MULTILINE)
        index += f"- **{group}**: {' · '.join(f'[`{name}`](#emailrl-{name})' for name in names)}\n"
    pages = (f"## {name}\n\n```\n{text.strip()}\n```\n" for name, text in helps)
    return "\n".join(["# Commands\n", _COMMANDS, _GENERATED, index, *pages])


PUBLIC: Final = {
    "emailrl": ("EmailAgent",),
    "emailrl.mail": ("open_mailbox", "SearchHit", "Email", "database_fingerprint"),
    "emailrl.agent": ("MailEnvironment", "StepResult", "Rubric", "tool_schemas"),
    "emailrl.records": ("read_trajectories", "write_trajectories", "TrajectoryIndex", "read_metrics"),
    "emailrl.records.trajectory": ("Trajectory", "Scenario", "Message", "ToolCall", "Turn", "StopReason"),
    "emailrl.rewards": ("match",),
    "emailrl.settings": ("load_settings", "Settings"),
    "emailrl.integrations.trl": ("MailSearch", "rows"),
}
"""What programs import, by module."""
_API: Final = (
    "What programs import: signatures and docstrings from the code. Anything else may change without notice.\n"
)


def api_reference() -> str:
    """``docs/reference/api.md``: every public name's signature, docstring and public methods, by module."""
    parts = ["# Python API\n", _API, _GENERATED]
    for module, names in PUBLIC.items():
        parts.append(f"## {module}\n")
        for name in names:
            value = getattr(importlib.import_module(module), name)
            parts.append(f"### {name}\n\n{_documented(name, value)}")
            if inspect.isclass(value) and not issubclass(value, BaseModel):
                own = {each: value.__dict__[each] for each in value.__dict__ if not each.startswith("_")}
                methods = {each: getattr(it, "__func__", it) for each, it in own.items()}
                parts += [_documented(f"{name}.{each}", it) for each, it in methods.items() if inspect.isfunction(it)]
    return "\n".join(parts)


def _documented(name: str, value: Any) -> str:
    is_plain = inspect.isclass(value) and issubclass(value, BaseModel | Enum)
    signature = "" if is_plain else str(inspect.signature(value))
    for found, shown in (
        (r"(: |-> )'([^']*)'", r"\1\2"),
        (r"<(?:function .*? at \w+|factory)>", "…"),
        (r"\(self(, )?", "("),
        (r"= (\w+)\(\w+=[^()]*\)", r"= \1()"),
    ):
        signature = re.sub(found, shown, signature)
    if len(name + signature) > WIDTH:  # a parameter on each line
        inner, close, returned = re.sub(r", (?=\w+: |\*)", ",\n    ", signature[1:]).rpartition(")")
        signature = f"(\n    {inner},\n{close}{returned}"
    text = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split()).replace("``", "`")
    return f"```py\n{name}{signature.removesuffix(' -> None')}\n```\n\n{text}\n"


def settings_reference() -> str:
    """``docs/reference/settings.md``: a table for each section, by what a reader wants, then the presets."""
    tables = {section: list(members) for section, members in groupby(leaves(), key=lambda leaf: leaf.section)}
    if set(tables) != {section for _, sections in _WANTED for section in sections}:
        raise ValueError("docs/generate.py: _WANTED must name each section of the settings")
    index, parts = "", []
    for want, sections in _WANTED:
        index += f"- **{want}**: {', '.join(f'[`[{section}]`](#{section})' for section in sections)}\n"
        for section in sections:
            parts.append(
                f"## [{section}]\n\n| setting | environment | default | needs | meaning |\n|---|---|---|---|---|"
            )
            parts[-1] += "".join(f"\n{_row(leaf)}" for leaf in tables[section]) + "\n"
    rules = f"- **Many values at once**: [presets](#presets)\n\n{_RULES}"
    return "\n".join([_SETTINGS, _GENERATED, index + rules, *parts, _presets()])


def openrlhf_reference() -> str:
    """The tables of ``docs/reference/openrlhf.md``, below its prose: every flag of OpenRLHF and its equivalent here."""
    parts = []
    for group, flags in groupby((flag for flag in FLAGS if flag.settings), key=lambda flag: flag.group):
        head = "| flag | since 2026-04 | setting here | OpenRLHF default | default here | what differs |\n"
        rows = "".join(map(_flag_row, flags))
        parts.append(f"## {group}\n\n{head}|---|---|---|---|---|---|\n{rows}")
    without = "".join(f"| {_names(flag)} | {flag.note} |\n" for flag in FLAGS if not flag.settings)
    return "\n".join([*parts, f"## Without a setting\n\n| flag | since 2026-04 | why |\n|---|---|---|\n{without}"])


def _flag_row(flag: Flag) -> str:
    keys = ", ".join(f"`{leaf.key}`" for leaf in flag.leaves)
    here = ", ".join(_shown(leaf.default) for leaf in flag.leaves)
    return f"| {_names(flag)} | {keys} | {flag.default} | {here} | {flag.note or ' '} |\n"


def _names(flag: Flag) -> str:
    return f"`--{flag.name}` | " + (f"`--{flag.dotted}`" if flag.dotted else "–")


def _helps(command: Any, name: str, parent: Any = None) -> Iterator[tuple[str, str]]:
    """``(command, help text)`` for a command and its subcommands."""
    context = command.make_context(name, [], parent=parent, resilient_parsing=True, terminal_width=WIDTH)
    yield context.command_path, command.get_help(context)
    for child in getattr(command, "commands", ()):
        yield from _helps(command.get_command(context, child), child, context)


def _row(leaf: Leaf) -> str:
    names = ", ".join(f"`{name}`" for name in leaf.env_names)
    only = leaf.choices if leaf.kinds <= {str, None} else ()
    choices = f" One of {', '.join(f'`{choice}`' for choice in only)}." if only else ""
    secret = " Secret." if leaf.secret else ""
    meaning = " ".join(leaf.description.split()).replace("|", "\\|")
    needs = "; ".join(needs_of(leaf.key))
    return f"| `{leaf.field}` | {names} | {_shown(leaf.default)} | {needs} | {meaning}{choices}{secret} |"


def needs_of(name: str) -> list[str]:
    """What a setting has no effect without, or is refused without."""
    rows = [*((need.settings, need.needs) for need in NEEDS), *REFUSED]
    return [needs for settings, needs in rows if name in settings.split()]


def _presets() -> str:
    keys = list(dict.fromkeys(key for values in PRESETS.values() for key in values))
    rows = [f"| {' | '.join(['setting', *PRESETS])} |", "|---" * (len(PRESETS) + 1) + "|"]
    for key in keys:
        cells = (_shown(values.get(key, by_name()[key].default)) for values in PRESETS.values())
        rows.append(f"| `{key}` | {' | '.join(cells)} |")
    why = "../decisions/0017-stopping-by-evidence.md"
    note = f"`quick` evaluates too few questions to notice a fall: see [decisions/0017]({why})."
    return "## Presets\n\n" + "\n".join(rows) + f"\n\n{note}\n"


def _shown(value: object) -> str:
    if value is None:
        return "–"
    if value == "":
        return "empty"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def navigation(docs: Path) -> Iterator[tuple[str, str]]:
    """``(section, page)`` for every page in the ``nav`` of the ``mkdocs.yml`` next to ``docs``, in order.

    Parsed line by line: the navigation is simple, and this package does not depend on a YAML parser.
    """
    section = ""
    text = (docs.parent / "mkdocs.yml").read_text(encoding="utf-8")
    for line in text.partition("\nnav:\n")[2].splitlines():
        found = re.fullmatch(r"\s+- (?:(.+?):)?\s*(\S+\.md)?", line)
        if found is None:
            raise ValueError(f"mkdocs.yml: cannot read {line!r} in the navigation")
        if page := found[2]:
            yield section, page
        else:
            section = found[1]


def first_sentence(text: str) -> str:
    """The first sentence of a page, which follows its title, as plain text."""
    body = re.sub(r"<!--.*?-->", "", text.partition("\n")[2], flags=re.DOTALL)
    paragraph = " ".join(body.strip().partition("\n\n")[0].split())
    plain = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", paragraph).replace("**", "")
    return re.split(r"(?<=\.)\s(?=[A-Z`])", plain)[0]


def llms_txt(docs: Path) -> str:
    """The text of ``llms.txt`` for the pages in ``docs``; decision records are listed by title only."""
    lines: list[str] = []
    current = ""
    for section, page in navigation(docs):
        text = (docs / page).read_text(encoding="utf-8")
        title, sentence = text.partition("\n")[0].removeprefix("# "), first_sentence(text)
        if page == "index.md":
            lines += [f"# {title}", "", f"> {sentence}", "", "For agents that drive the commands: [SKILL.md](SKILL.md)"]
            continue
        if section != current:
            current = section
            lines += ["", f"## {section}", ""]
        lines.append(f"- [{title}]({page})" + ("" if section == "Decisions" else f": {sentence}"))
    return "\n".join(lines) + "\n"


def example_page(docs: Path) -> str:
    """The page of a quickstart's run: what was recorded of it (``tests/documents/pictures.py``), in today's scripts."""
    from emailrl.page.build import PageData, page

    run, *shown = map(json.loads, gzip.decompress((docs / "images/example.jsonl.gz").read_bytes()).splitlines())
    return page(PageData(run, [each["row"] for each in shown], lambda: (each["detail"] for each in shown)))


def find_settings(site: Path) -> None:
    """Let the search of a built site find each setting by its name: it knows only pages and their headings. Of the
    settings' tables, and of what explains the code in the words of every question, it keeps the titles."""
    path = site / "search.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    inner = ("decisions/", "architecture")
    tables = {f"reference/settings.html#{leaf.section}" for leaf in leaves()}
    own = [
        each | ({"text": ""} if each["location"].startswith(inner) or each["location"] in tables else {})
        for each in index["items"]
        if each["level"] == 1 or not each["location"].startswith(inner)
    ]
    for leaf in leaves():
        where = {"location": f"reference/settings.html#{leaf.section}", "path": ["Reference", "Settings"], "tags": []}
        text = html.escape(leaf.description, quote=False).replace("`", "")
        own.append(where | {"level": 3, "title": leaf.env_names[0], "text": text})
    path.write_text(json.dumps(index | {"items": own}), encoding="utf-8")


def main() -> None:
    """Write the pages into the folder named on the command line; or, if it is a built site, complete its search."""
    folder = Path(sys.argv[1])
    if (folder / "search.json").exists():
        return find_settings(folder)
    reference = folder / "reference"
    reference.mkdir(parents=True, exist_ok=True)
    (reference / "cli.md").write_text(cli_reference(), encoding="utf-8")
    (reference / "settings.md").write_text(settings_reference(), encoding="utf-8")
    (reference / "api.md").write_text(api_reference(), encoding="utf-8")
    openrlhf = reference / "openrlhf.md"
    prose = openrlhf.read_text(encoding="utf-8").partition(_GENERATED)[0]
    openrlhf.write_text(f"{prose}{_GENERATED}\n{openrlhf_reference()}", encoding="utf-8")
    (folder / "images/example.html").write_text(example_page(folder), encoding="utf-8")
    (folder / "llms.txt").write_text(llms_txt(folder), encoding="utf-8")


if __name__ == "__main__":
    main()
