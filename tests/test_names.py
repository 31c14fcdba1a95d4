"""Names of the package: the words that docs and code share are classes of one meaning."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "emailrl"
VOCABULARY = {
    "Algorithm", "Checkpoint", "Completion", "Engine", "Environment", "Fact", "Inbox", "Mail", "Mailbox", "Message",
    "Mode", "Plan", "Policy", "Rubric", "Scenario", "Scorer", "Settings", "Shape", "Tally", "Topic", "Trajectory",
    "Turn", "Updater",
}  # fmt: skip


def test_a_word_of_the_vocabulary_is_one_class() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    classes = Counter(node.name for tree in trees.values() for node in tree.body if isinstance(node, ast.ClassDef))
    assert {word: classes[word] for word in VOCABULARY if classes[word] > 1} == {}
    # cli/options.py names options after what they choose.
    aliases = {
        target.id
        for path, tree in trees.items() if path.parts[-2:] != ("cli", "options.py")
        for node in tree.body if isinstance(node, ast.Assign)
        for target in node.targets if isinstance(target, ast.Name)
    }  # fmt: skip
    assert {word for word in VOCABULARY & aliases if classes[word]} == set()
