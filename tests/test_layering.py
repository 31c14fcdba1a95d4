"""Imports point one way: no module imports from a layer above its own, not even inside a function."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "emailrl"

# From the top down; rooms on one line may not import one another.
LAYERS: list[set[str]] = [
    {"__main__"},
    {"cli"},
    {"quickstart"},
    {"benchmark", "inspection", "export", "plan", "agent", "doctor", "openrlhf"},
    {"sft"},
    {"training"},
    {"evaluation"},
    {"rollout"},
    {"rewards"},
    {"environment", "engines"},
    {"policy"},
    {"scenarios"},
    {"facts"},
    {"store", "checkpoints"},
    {"recording"},
    {"trajectory", "custom", "remote"},
    {"settings"},
    {"errors", "disk", "plain"},
]
RANK = {room: rank for rank, rooms in enumerate(LAYERS) for room in rooms}
HEAVY = {"torch", "transformers", "peft", "datasets", "sqlalchemy", "wandb", "matplotlib", "openai", "vllm", "unsloth"}
LIGHT_ROOMS = {"cli", "settings", "errors", "trajectory", "recording", "checkpoints", "disk", "plain"}

MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]
each_module = pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def package_of(path: Path) -> list[str]:
    return ["emailrl", *path.relative_to(PACKAGE).parent.parts]


def imports(body: ast.AST, package: list[str]) -> Iterator[tuple[int, list[str]]]:
    """Every import below ``body``: its line, and the parts of the absolute name with the name taken from it."""
    for node in ast.walk(body):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            named = node.module.split(".") if node.module else []
            # `from emailrl import store` names the room only in the alias.
            yield from ((node.lineno, [*base, *named, alias.name]) for alias in node.names)


def at_import_time(tree: ast.Module) -> ast.Module:
    """The module without what runs later: function bodies, and blocks for the type checker alone."""

    class Later(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None: ...

        visit_AsyncFunctionDef = visit_FunctionDef

        def visit_If(self, node: ast.If) -> ast.AST:
            return ast.Pass() if ast.unparse(node.test).endswith("TYPE_CHECKING") else self.generic_visit(node)

    return Later().visit(tree)


@each_module
def test_imports_point_downwards(path: Path) -> None:
    own = room_of(path)
    assert own in RANK, f"{own} has no layer: give it one here and in docs/architecture.md"
    for line, parts in imports(ast.parse(path.read_text(encoding="utf-8")), package_of(path)):
        if parts[0] != "emailrl" or len(parts) == 1 or parts[1] in (own, "__version__"):
            continue
        assert parts[1] in RANK, f"{path}:{line} imports {'.'.join(parts)}, whose room has no layer"
        assert RANK[parts[1]] > RANK[own], f"{path}:{line}: {own} may not import {'.'.join(parts)}"


@each_module
def test_light_rooms_load_nothing_heavy(path: Path) -> None:
    if room_of(path) in LIGHT_ROOMS:
        tree = at_import_time(ast.parse(path.read_text(encoding="utf-8")))
        for line, parts in imports(tree, package_of(path)):
            assert parts[0] not in HEAVY, f"{path}:{line} imports {parts[0]} before any command runs"


def test_every_form_of_import_is_seen() -> None:
    source = """
import emailrl.cli, torch
from emailrl import training
if TYPE_CHECKING:
    import wandb
class Lazy:
    import peft
    def method(self):
        from ..policy import load
        from . import build
"""
    tree = ast.parse(source)
    everything = {".".join(parts) for _, parts in imports(tree, ["emailrl", "store"])}
    assert everything == {
        "emailrl.cli",
        "torch",
        "emailrl.training",
        "wandb",
        "peft",
        "emailrl.policy.load",
        "emailrl.store.build",
    }
    early = [parts[0] for _, parts in imports(at_import_time(tree), ["emailrl", "store"])]
    assert early == ["emailrl", "torch", "emailrl", "peft"]
