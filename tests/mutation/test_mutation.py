"""The mutation script itself: which mutants it makes, and what it says of a test that notices and one that does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mutation.mutants import mutants

REPOSITORY = Path(__file__).resolve().parents[2]


def changes(code: str) -> set[tuple[str, str]]:
    return {(mutant.original, mutant.mutated) for mutant in mutants(code)}


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("a < b", {("a < b", "a <= b"), ("a < b", "a >= b")}),
        ("a == b", {("a == b", "a != b")}),
        ("a - b", {("a - b", "a + b")}),
        ("a *= b", {("a *= b", "a /= b")}),
        ("-a", {("-a", "a")}),
        ("not a", {("not a", "a")}),
        ("if a and b: pass", {("a and b", "a or b"), ("a", "not a"), ("b", "not b")}),
        ("5", {("5", "6"), ("5", "4"), ("5", "0")}),
        ("True", {("True", "False")}),
        ("max(a, b)", {("max(a, b)", "min(a, b)")}),
        ("torch.minimum(a, b)", {("torch.minimum(a, b)", "torch.maximum(a, b)")}),
        ("a.clamp(b, c)", {("a.clamp(b, c)", "a.clamp(max=c)"), ("a.clamp(b, c)", "a.clamp(min=b)")}),
        ("torch.clamp(a, b, max=c)", {("torch.clamp(a, b, max=c)", "a.clamp(max=c)"),
                                      ("torch.clamp(a, b, max=c)", "a.clamp(min=b)")}),
        ("a.clamp(max=c)", {("a.clamp(max=c)", "a")}),
        ("torch.where(a, b, c)", {("torch.where(a, b, c)", "torch.where(a, c, b)"),
                                  ("torch.where(a, b, c)", "torch.where(a | True, b, c)"),
                                  ("torch.where(a, b, c)", "torch.where(a & False, b, c)")}),
        ("a & ~b", {("a & ~b", "a"), ("a & ~b", "a | ~b"), ("a & ~b", "~b"), ("~b", "b")}),
        ("a.bool()", {("a.bool()", "a.bool() | True")}),
        ("def f(mask: Tensor): return g(mask)", {("mask", "torch.ones_like(mask)")}),
        ("def f(mask: str): return g(mask)", set()),
        ("def f(a='x', *, b=None, c: int = 0): pass", {("'x'", "'not x'"), ("None", "1"), ("0", "1"), ("0", "-1")}),
        ("def f(a: Literal[3] | None) -> Literal[4]:\n  'about 5'\n  raise E(f'{a - 6}', 7)", set()),
    ],
)  # fmt: skip
def test_what_may_stand_in_a_nodes_place(code: str, expected: set[tuple[str, str]]) -> None:
    assert changes(code) == expected


def test_a_mutant_is_the_module_with_one_change_and_nothing_else() -> None:
    source = "x = 'é' + a * (\n    b + c\n) * d  # why\ny = 1\n"
    mutated = {mutant.mutated: (mutant.line, mutant.source) for mutant in mutants(source)}
    assert mutated["b - c"] == (2, "x = 'é' + a * (\n    (b - c)\n) * d  # why\ny = 1\n")
    assert mutated["a / (b + c)"] == (1, "x = 'é' + (a / (b + c)) * d  # why\ny = 1\n")


def test_killed_survived_and_endless(tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text(
        "def difference(a, b):\n    return a - b\n\n\ndef is_big(a):\n    return a > 10\n\n\n"
        "def fall(n):\n    while n != 1:\n        n -= 1\n    return n\n"
    )
    (tmp_path / "test_toy.py").write_text(
        "from toy import difference, fall, is_big\n\n\n"
        "def test_toy():\n    assert difference(5, 2) == 3\n    assert is_big(12)\n    assert not is_big(9)\n"
        "    assert fall(4) == 1\n"
    )
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "mutation", "toy=test_toy.py", "--workers", "2", "--timeout", "3"]
    ended = subprocess.run(
        [*command, "--min-score", "0.6", "--json", str(report)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY / "tests")},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    told = json.loads(report.read_text())
    # Nobody asks about 10 and 11, and no number between; a loop that steps by 0, by 2 or upward never ends.
    survivors = [(one["line"], one["original"], one["mutated"]) for one in told["survivors"]]
    assert survivors == [(6, "a > 10", "a >= 10"), (6, "10", "11"), (6, "10", "9")]
    assert told["all"]["timeouts"] == 3
    assert told["all"]["mutants"] - told["all"]["killed"] == 3
    assert "survived  toy:6  [comparison]  a > 10  →  a >= 10" in ended.stdout
