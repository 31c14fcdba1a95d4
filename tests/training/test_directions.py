"""Inside training imports point one way: from the loop to the run, to the step, to the math."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import emailrl.training

ROOM = Path(emailrl.training.__file__).parent
MATHS = {"advantages", "kl", "losses"}


def imported(path: Path) -> set[str]:
    """What a module imports, anywhere in it and for the type checker too, by full names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: import by the full name"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


MODULES = sorted(ROOM.rglob("*.py"))
ABOVE: dict[str, tuple[str, ...]] = {"run": ("loop",), "step": ("loop", "run"), "": ("loop", "run", "step")}
"""By folder, what its modules do not import; ``loop`` itself stands over all."""


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOM)))
def test_imports_point_from_the_loop_to_the_run_to_the_step_to_the_math(path: Path) -> None:
    if path.relative_to(ROOM) != Path("loop.py"):
        above = tuple(f"emailrl.training.{room}" for room in ABOVE["" if path.parent == ROOM else path.parent.name])
        assert not [name for name in imported(path) if name.startswith(above)]


@pytest.mark.parametrize("name", sorted(MATHS))
def test_the_math_knows_torch_and_itself_alone(name: str) -> None:
    others = tuple(f"emailrl.training.{one}" for one in (*MATHS, "algorithms"))  # data alone
    ours = [
        one for one in imported(ROOM / f"{name}.py") if one.split(".")[0] not in {"torch", *sys.stdlib_module_names}
    ]
    assert all(one.startswith(others) for one in ours), ours
