"""Names of the package: a public class is the only one of its name, so that a name in a sentence means one thing."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "emailrl"
UNSOLVED = {"Given", "Reading", "Scorer", "Tally"}
"""Names that two classes have."""


def test_no_two_public_classes_have_one_name() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")]
    names = Counter(node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    assert {name for name, count in names.items() if count > 1 and name[0] != "_"} - UNSOLVED == set()
