"""What is declared installs together: imports, ranges, pins, packaged files."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LINES = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
PINS = {canonicalize_name(name): Version(pin) for name, _, pin in (line.partition("==") for line in LINES) if pin}


@pytest.mark.parametrize("text", [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]])
def test_every_requirement_is_pinned_inside_its_range(text: str) -> None:
    requirement = Requirement(text)
    assert PINS[canonicalize_name(requirement.name)] in requirement.specifier


def test_pins_name_no_build_of_torch_and_nothing_twice() -> None:
    assert PINS["torch"].local is None
    assert len(PINS) == sum("==" in line for line in LINES)


def test_every_imported_package_is_declared() -> None:
    """A package that only came along with another may leave with it."""
    declared = {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]}
    optional = {"vllm", "unsloth", "tensorboard", "bitsandbytes"}
    named_otherwise = {"dotenv": "python-dotenv", "bs4": "beautifulsoup4"}
    foreign = {
        canonicalize_name(named_otherwise.get(name, name)): path
        for path in (ROOT / "emailrl").rglob("*.py")
        for name in imported(ast.parse(path.read_text(encoding="utf-8")))
        # _typeshed holds names for type checkers; it is part of them.
        if name not in sys.stdlib_module_names and name not in ("emailrl", "_typeshed")
    }
    assert {name: str(path) for name, path in foreign.items() if name not in declared | optional} == {}


def imported(tree: ast.Module) -> Iterator[str]:
    """The top-level name of every absolute import, at any depth of the code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.split(".")[0]


def test_what_travels_with_the_package() -> None:
    assert (ROOT / "LICENSE").read_text(encoding="utf-8").lstrip().startswith("Apache License")
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert (ROOT / "emailrl/py.typed").is_file()
