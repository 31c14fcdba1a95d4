"""What is mutated, and which test files know it: they import the module, its package, or a file of tests that does."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from random import Random

from .mutants import Mutant, mutants

MODULES = (
    *(f"emailrl.training.{name}" for name in ("advantages", "algorithms", "kl", "losses", "batch", "shaping")),
    "emailrl.settings.needs",
    *(f"emailrl.training.{name}" for name in ("rollouts", "state")),
    "emailrl.facts",
    "emailrl.rewards.matching",
)
SAMPLED = ("emailrl.facts", "emailrl.rewards.matching")
"""Packages with so many mutants that each file's are sampled."""
ELSEWHERE = ("end_to_end", "gpu", "benchmarks", "mutation")
"""Folders of tests that run the package in other processes, where a mutant is not, or on other machines."""
SLOW = ("emailrl.model", "emailrl.training.loop", "emailrl.training.run", "emailrl.training.update")
"""What loads a model: a file of tests that imports it takes minutes, and is left out."""


def modules(names: Iterable[str]) -> Iterator[str]:
    """The modules by their names, with every module of a package in its place."""
    for name in names:
        path = source_file(name)
        if path.name != "__init__.py":
            yield name
            continue
        yield from (f"{name}.{one.stem}" for one in sorted(path.parent.glob("*.py")) if one != path)


def source_file(module: str) -> Path:
    """Where a module's source lies, or its package's; imports nothing; raises ModuleNotFoundError."""
    root, *below = module.split(".")
    spec = importlib.util.find_spec(root)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(module)
    top = Path(spec.origin)
    for path in (top.parent.joinpath(*below, "__init__.py"), top.parent.joinpath(*below).with_suffix(".py")):
        if below and path.is_file():
            return path
    if below:
        raise ModuleNotFoundError(module)
    return top


def drawn(module: str, sample: int) -> tuple[list[Mutant], int]:
    """A module's mutants, and how many there are: at most ``sample`` where sampled, always the same ones (0: all)."""
    every = mutants(source_file(module).read_text())
    if not sample or len(every) <= sample or not module.startswith(SAMPLED):
        return every, len(every)
    kept = set(Random(module).sample(range(len(every)), sample))
    return [one for i, one in enumerate(every) if i in kept], len(every)


def test_files(wanted: Iterable[str], folder: Path) -> list[Path]:
    """The quick test files that import one of the modules, directly or by way of another file of tests."""
    known = {*wanted, *(module.rpartition(".")[0] for module in wanted)} - {""}
    files = [path for path in sorted(folder.rglob("test_*.py")) if path.relative_to(folder).parts[0] not in ELSEWHERE]
    of = {path: _imported(path, folder) for path in files}
    return [path for path in files if known & of[path] and not any(name.startswith(SLOW) for name in of[path])]


@cache
def imports(path: Path, module: str = "") -> frozenset[str]:
    """The modules that a file imports, by their full names; ``module``: its own, where it imports by relative ones."""
    package = module.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            name = ".".join([*above, *filter(None, [node.module])])
            found |= {_module(name, alias.name) for alias in node.names}
    return frozenset(found)


@cache
def _module(package: str, name: str) -> str:
    """``from package import name``: a module of its own, or else part of the package."""
    try:
        source_file(f"{package}.{name}")
    except ModuleNotFoundError:
        return package
    return f"{package}.{name}"


def _imported(path: Path, folder: Path) -> set[str]:
    """What a test file imports, and what the files of tests beside it import that it uses."""
    found, waiting = set[str](), [path]
    while waiting:
        for name in imports(waiting.pop()) - found:
            found.add(name)
            beside = folder / (name.replace(".", "/") + ".py")
            if beside.is_file():
                waiting.append(beside)
    return found
