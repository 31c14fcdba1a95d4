"""Every command in the documents can be run as written: all are parsed, and those that need no GPU or network are run.

A comment above a block says how it is tested. ``<!-- test: slow -->`` runs it with ``-m slow``; ``slow, after a run``
does so in a folder where ``emailrl train`` has run. ``options`` only parses its commands: it needs a GPU, a server, a
download or a person's own mail. A path leaves the block to that test. Without a comment, every ``make test`` runs it.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer
from documents.commands import check, commands
from documents.pages import DOCS, DOCUMENTS, ROOT, Block, blocks, prose
from documents.scratch import make_home, run, run_block, with_stand_ins

from emailrl.base.errors import UsageError
from emailrl.settings import load_settings

SHELL = [block for page in DOCUMENTS for block in blocks(page) if block.language in ("bash", "console")]
FAST = sorted({block.page for block in SHELL if not block.how})
SLOW = sorted({block.page for block in SHELL if block.how.startswith("slow")})
SCALING = "docs/guides/scaling.md"
WRONG_USAGE = typer.BadParameter.__mro__[1]


def named(block: Block) -> str:
    return f"{block.page}:{block.line}"


@pytest.mark.parametrize("block", SHELL, ids=named)
def test_every_command_parses_and_is_run_or_says_why_not(block: Block) -> None:
    script = block.text
    if block.language == "console":
        script = "\n".join(re.findall(r"^\$ ((?:.*\\\n)*.*)$", script, re.MULTILINE))
    found = list(commands(script))
    assert found
    for words in found:
        check(words)
    if block.how.startswith("tests/"):
        assert Path(block.page).name in (ROOT / block.how).read_text(encoding="utf-8")
    else:
        assert block.how in ("", "slow", "slow, after a run", "options")


def test_the_examples_of_every_command_parse() -> None:
    examples = re.findall(
        r"^    ((?:[A-Z_]+=\S+ )*emailrl .+)$", (DOCS / "reference/cli.md").read_text(encoding="utf-8"), re.M
    )
    assert len(examples) > 60
    for example in examples:
        for words in commands(re.split(r" {3,}", example)[0]):
            check(words)


def test_the_commands_in_the_text_parse() -> None:
    """``…`` and capital letters stand for values; an option may stand without its value at the end."""
    found = {
        code
        for page in (*DOCUMENTS, "docs/llms.txt")
        for code in re.findall(r"`((?:[A-Z_]+=\S+ )*emailrl [^`\n]+)`", prose(page))
    }
    assert len(found) > 40
    for code in found - {"emailrl --install-completion", "emailrl COMMAND --help"}:
        words = shlex.split(re.sub(r"(?<= )(?:[NM]|…)(?= |$)", "1", code))
        try:
            check(words)
        except WRONG_USAGE as error:
            assert "requires an argument" in str(error), code


def test_the_commands_in_recipes_parse() -> None:
    """Whatever the cluster fills in is a number, or taken for a text."""
    found = []
    recipes = [path.read_text(encoding="utf-8") for path in (DOCS / "clusters").glob("*.yaml")]
    for text in recipes + [block.text for block in blocks(SCALING) if block.language == "sh"]:
        for line in re.findall(r"emailrl,? (?:serve|train)\b.*", re.sub(r"\\\n\s*", "", text)):
            line = re.sub(
                r"[][,]", " ", line.removesuffix("]").replace('"$(echo "$SKYPILOT_NODE_IPS" | head -n1)', '"')
            )
            words = shlex.split(re.sub(r"\$\{?\w+( \d+ )?\}?", "1", line).removesuffix(" &"))
            check(words)
            found.append(words[1])
    assert sorted(found) == ["serve"] * 3 + ["train"] * 3


@pytest.mark.parametrize("page", DOCUMENTS)
def test_no_command_hides_outside_a_block_settings_load_and_python_compiles(page: str, tmp_path: Path) -> None:
    hidden = r"^ {4,}(?:[A-Z_]+=\S+ )*(?:emailrl|pip|python|make|docker|vllm) .*"
    assert re.findall(hidden, prose(page), re.MULTILINE) == []
    # "py" is for signatures, which are no programs.
    known = {"", "bash", "console", "python", "toml", "json", "text", "py"} | ({"sh"} if page == SCALING else set())
    assert {block.language for block in blocks(page)} <= known
    for block in blocks(page):
        if block.language == "toml":
            tomllib.loads(block.text)
            (tmp_path / "emailrl.toml").write_text(block.text)
            load_settings(cwd=tmp_path, environ={})
        elif block.language == "python":
            compile(block.text, named(block), "exec")


@pytest.mark.parametrize("page", FAST)
def test_the_commands_of_a_page(page: str, tmp_path: Path) -> None:
    run_page(page, tmp_path, "")


@pytest.mark.slow
@pytest.mark.parametrize("page", SLOW)
def test_the_slow_commands_of_a_page(page: str, tmp_path: Path) -> None:
    run_page(page, tmp_path, "", "slow", "slow, after a run")


def run_page(page: str, folder: Path, *kinds: str) -> None:
    """Follow a page: write the files that it names above a block, run the blocks of these kinds, in order."""
    home, small = make_home(folder), "slow" in kinds
    if any(block.how in kinds and block.how.endswith("after a run") for block in blocks(page)):
        assert run("emailrl train", home).returncode == 0
    for block in blocks(page):
        if block.file:
            (home / block.file).write_text(with_stand_ins(block.text) if small else block.text)
        elif block.language in ("bash", "console") and block.how in kinds:
            run_block(block, home, small=small)


@pytest.mark.parametrize("line", ["emailrl train --nope 3", "MAX_STEP=3 emailrl train", "make everything", "emailrll"])
def test_a_wrong_command_is_found(line: str) -> None:
    with pytest.raises((AssertionError, OSError, UsageError, WRONG_USAGE)):
        for words in commands(line):
            check(words)
