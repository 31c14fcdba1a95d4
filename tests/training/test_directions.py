"""Inside training imports point one way: from the run to the step, to the math."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import emailrl.training

ROOM = Path(emailrl.training.__file__).parent
MATHS = {"advantages", "kl", "losses"}
STEP = {"across", "batch", "forward", "shaping", "update"}


@pytest.mark.parametrize("name", sorted(STEP | MATHS))
def test_a_step_knows_nothing_of_the_run_that_makes_it_and_the_math_torch_and_itself_alone(name: str) -> None:
    found = set()
    for node in ast.walk(ast.parse((ROOM / f"{name}.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name}:{node.lineno}: import by the full name"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    if name in MATHS:
        found -= {one for one in found if one.split(".")[0] in {"torch", *sys.stdlib_module_names}}
        below = {*MATHS, "algorithms"}  # data alone
    else:
        found -= {one for one in found if not one.startswith(("emailrl.training", "emailrl.runs"))}
        below = {*STEP, *MATHS, "algorithms"}
    assert all(one.startswith(tuple(f"emailrl.training.{part}" for part in below)) for one in found), found
