"""Inside training imports point one way: from the run to the step, to the math."""

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


STEP = {"across", "batch", "forward", "objective", "shaping", "update"}


@pytest.mark.parametrize("name", sorted(STEP))
def test_a_step_knows_nothing_of_the_run_that_makes_it(name: str) -> None:
    below = tuple(f"emailrl.training.{one}" for one in (*STEP, *MATHS, "algorithms", "passes"))
    ours = [one for one in imported(ROOM / f"{name}.py") if one.startswith(("emailrl.training", "emailrl.runs"))]
    assert all(one.startswith(below) for one in ours), ours


@pytest.mark.parametrize("name", sorted(MATHS))
def test_the_math_knows_torch_and_itself_alone(name: str) -> None:
    others = tuple(f"emailrl.training.{one}" for one in (*MATHS, "algorithms"))  # data alone
    ours = [
        one for one in imported(ROOM / f"{name}.py") if one.split(".")[0] not in {"torch", *sys.stdlib_module_names}
    ]
    assert all(one.startswith(others) for one in ours), ours
