"""Imports point one way, between layers and between files: not even a function or a type looks back."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "emailrl"

# From the top down; rooms on one line may not import one another.
LAYERS: list[set[str]] = [
    {"__main__"},
    {"cli"},
    {"integrations", "page", "plan", "openrlhf"},
    {"sft"},
    {"training"},
    {"runs"},
    {"measure"},
    {"rewards"},
    {"agent"},
    {"engines"},
    {"model"},
    {"questions"},
    {"facts"},
    {"mail", "checkpoints"},
    {"records"},
    {"ranks"},
    {"settings"},
    {"base"},
]
RANK = {room: rank for rank, rooms in enumerate(LAYERS) for room in rooms}
HEAVY = {"torch", "transformers", "peft", "datasets", "sqlalchemy", "wandb", "matplotlib", "openai", "vllm", "unsloth"}
LIGHT_ROOMS = {"cli", "settings", "records", "checkpoints", "base"}

MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in MODULES}


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


def test_imports_point_downwards() -> None:
    for path, tree in TREES.items():
        own = room_of(path)
        assert own in RANK, f"{own} has no layer: give it one here and in docs/architecture.md"
        for line, parts in imports(tree, package_of(path)):
            if parts[0] == "emailrl" and len(parts) > 1 and parts[1] not in (own, "__version__"):
                assert RANK.get(parts[1], -1) > RANK[own], f"{path}:{line}: {own} may not import {'.'.join(parts)}"


def test_below_the_run_no_function_takes_the_whole_settings() -> None:
    for path, tree in TREES.items():
        if RANK[room_of(path)] <= RANK["runs"] or room_of(path) == "settings":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.arg) and node.annotation is not None:
                named = re.findall(r"\w+", ast.unparse(node.annotation))
                assert "Settings" not in named, f"{path}:{node.lineno}: {node.arg} takes the whole settings"


def dotted(path: Path) -> str:
    return ".".join([*package_of(path), *([] if path.stem == "__init__" else [path.stem])])


def imported_modules(path: Path, known: set[str]) -> set[str]:
    """The modules of ``known`` that a file names in its imports, at any depth; a room's own parts count, itself not."""
    named = imports(ast.parse(path.read_text(encoding="utf-8")), package_of(path))
    candidates = ([".".join(parts), ".".join(parts[:-1])] for _, parts in named)
    found = {next((name for name in names if name in known), "") for names in candidates}
    return found - {"", dotted(path)}


def test_no_files_import_one_another_in_a_circle() -> None:
    """At any depth: an import inside a function or for the type checker alone counts."""
    known = {dotted(path) for path in MODULES}
    TopologicalSorter({dotted(path): imported_modules(path, known) for path in MODULES}).prepare()


MATHS, STEP = {"advantages", "kl", "losses"}, {"across", "batch", "forward", "update"}


def test_in_training_the_math_knows_torch_and_itself_alone_and_a_step_nothing_of_its_run() -> None:
    for name in MATHS | STEP:
        path, below = PACKAGE / f"training/{name}.py", MATHS | {"algorithms"} | (STEP if name in STEP else set())
        for line, parts in imports(TREES[path], package_of(path)):
            fine = parts[2] in below if parts[:2] == ["emailrl", "training"] else parts[:2] != ["emailrl", "runs"]
            fine = fine and (name in STEP or parts[0] in {"emailrl", "torch", *sys.stdlib_module_names})
            assert fine, f"{path}:{line} imports {'.'.join(parts)}"


def test_light_rooms_load_nothing_heavy_and_the_command_line_alone_lays_out_for_a_terminal() -> None:
    for path in MODULES:
        tree, room = ast.parse(path.read_text(encoding="utf-8")), room_of(path)
        barred = {"rich", "typer"} if room != "cli" else set()
        for line, parts in imports(tree, package_of(path)):
            assert parts[0] not in barred, f"{path}:{line} imports {parts[0]}"
        for line, parts in imports(at_import_time(tree), package_of(path)):
            light = room in LIGHT_ROOMS and path.stem != "chat"
            assert not light or parts[0] not in HEAVY, f"{path}:{line} imports {parts[0]} before any command runs"
