"""Every command's --help: examples, no heavy module, an answer at once; and the reference made of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer.main
from generate import api_reference, cli_reference, settings_reference
from typer.testing import CliRunner

from emailrl.cli.app import COMMANDS, app
from emailrl.settings import load_settings

HEAVY = {"torch", "transformers", "peft", "datasets", "sqlalchemy", "wandb", "matplotlib", "openai", "numpy", "pandas"}


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name in getattr(command, "commands", ()):
        yield from commands(command.get_command(None, name), (*path, name))


ALL = dict(commands(typer.main.get_command(app)))
every_command = pytest.mark.parametrize("path", ALL, ids=lambda path: " ".join(path) or "emailrl")


@every_command
def test_help_has_a_sentence_examples_that_parse_and_every_option_in_80_columns(path: tuple[str, ...]) -> None:
    text = ALL[path].help or ""
    assert text.strip().split("\n")[0].rstrip().endswith((".", ":")) or "." in text
    head, _, examples = text.partition("Examples:")
    assert head.strip(), "no sentence before the examples"
    lines = [line.split("#")[0].split() for line in examples.replace("\b", "").splitlines() if line.strip()]
    runs = [words for words in lines if words[0] == "emailrl"]
    assert runs, "no example"
    assert any(tuple(words[1 : 1 + len(path)]) == path for words in runs)
    done = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "80"})
    assert [line for line in done.output.splitlines() if len(line) > 80] == []
    assert [option.name for option in ALL[path].params if not getattr(option, "help", None)] == []


def test_train_shows_few_options_first_and_its_cluster_apart() -> None:
    groups = Counter(option.rich_help_panel for option in ALL["train",].params)
    assert groups[None] <= 24 and groups["Cluster"] == 5 and set(groups) == {None, "Cluster", "Advanced"}
    text = CliRunner().invoke(app, ["train", "--help"]).output
    assert text.index("\nOptions:\n") < text.index("  -h, --help") < text.index("\nCluster:\n  --nproc")


def test_no_help_loads_a_heavy_module() -> None:
    script = f"""
import json, sys
from emailrl.cli.app import COMMANDS, app
from emailrl.settings import load_settings
for path in {list(ALL)}:
    app([*path, "--help"], standalone_mode=False)
print(json.dumps(sorted({{name.split(".")[0] for name in sys.modules}})))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "Usage: " in done.stdout
    assert HEAVY & set(json.loads(done.stdout.splitlines()[-1])) == set()


def test_the_list_of_commands_imports_none_of_them() -> None:
    script = "import sys; from emailrl.cli.app import app; app(['--help'], standalone_mode=False); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "emailrl.cli.app" in loaded
    assert {f"emailrl.cli.{name.replace('-', '_')}" for name in COMMANDS} & loaded == set()
    assert {"emailrl.settings", "pydantic", "rich"} & loaded == set()


@pytest.mark.parametrize("option", ["--db", "--questions", "--out"])
def test_no_file_or_folder_is_named_by_an_empty_text(option: str) -> None:
    # As a path it would be the folder one happens to be in.
    takers = [path for path, command in ALL.items() if any(option in param.opts for param in command.params)]
    for path in takers:
        done = CliRunner().invoke(app, [*path, option, " "])
        assert done.exit_code == 2 and "must not be empty; name a file or folder" in done.output, path
    assert takers


# -- the reference pages in docs/

ROOT = Path(__file__).resolve().parents[2]


def test_settings_page_is_current() -> None:
    assert (ROOT / "docs/reference/settings.md").read_text(encoding="utf-8") == settings_reference(), "run `make docs`"


def test_api_page_is_current() -> None:
    assert (ROOT / "docs/reference/api.md").read_text(encoding="utf-8") == api_reference(), "run `make docs`"


def test_cli_page_is_current() -> None:
    if f"typer=={version('typer')}" not in (ROOT / "constraints.txt").read_text().splitlines():
        pytest.skip("another typer than the pinned one lays its help out differently")
    assert (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8") == cli_reference(), "run `make docs`"


def test_openrlhf_pages_command_prints_a_file_that_loads(emailrl, tmp_path: Path) -> None:
    page = (ROOT / "docs/reference/openrlhf.md").read_text(encoding="utf-8")
    [flags] = re.findall(r'^emailrl train --from-openrlhf "(.*)" > emailrl.toml$', page, re.MULTILINE)
    (tmp_path / "emailrl.toml").write_text("no_such_setting = 1\n")  # does not matter
    code, out, err = emailrl("train", "--from-openrlhf", flags)
    assert (code, err) == (0, "")
    (tmp_path / "emailrl.toml").write_text(out)
    settings = load_settings(cwd=tmp_path, environ={})
    assert (settings.training.algorithm, settings.training.num_generations) == ("grpo", 8)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["emailrl.toml"]  # no run was begun
