"""The questions a small model is trained and tested on: made from real mail, split by inbox, frozen by a hash.

    python tests/gpu/small_questions.py enron_mail_subset.tar.gz --out data/small

writes ``mail.db``, ``questions.jsonl`` and, of the harder kinds for a second table, ``hard.jsonl``: ``train`` for SFT
and RL, ``val`` for the choice of the checkpoint, ``test`` read by the last benchmark alone. No splits share an inbox
or a source mail, within a file or between the two. Hash and counts are compared with ``small_questions.json`` beside
this script, which holds no mail and no address.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from emailrl.questions.load import read_questions, write_scenarios
from emailrl.questions.splits import mixed_order
from emailrl.records.trajectory import Scenario
from emailrl.settings import DataSettings

FROZEN = Path(__file__).with_suffix(".json")
LIMIT, HARD_LIMIT = 9000, 2000  # questions asked for; the mails give fewer of the usual kinds
TEST_QUESTIONS = 600
SEED = 42


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mail", help="what gen-db reads")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    db = options.out / "mail.db"
    _emailrl("gen-db", "--source", options.mail, "--db", db, "--overwrite")
    usual = choose(_made(db, options.out / "questions.jsonl", "usual", LIMIT))
    hard = apart(_made(db, options.out / "hard.jsonl", "hard", HARD_LIMIT), usual)
    write_scenarios(options.out / "questions.jsonl", usual)
    write_scenarios(options.out / "hard.jsonl", hard)
    found = {"questions": summary(usual), "hard": summary(hard)}
    print(json.dumps(found, indent=1))
    if json.loads(FROZEN.read_text()) != found:
        print(f"These are not the questions of {FROZEN.name}.", file=sys.stderr)
        return 1
    return 0


def choose(scenarios: list[Scenario]) -> list[Scenario]:
    """All questions but those of the test beyond ``TEST_QUESTIONS``, which keep the mix of kinds and inboxes."""
    test = mixed_order([s for s in scenarios if s.split == "test"], SEED)[:TEST_QUESTIONS]
    return [s for s in scenarios if s.split != "test"] + test


def apart(hard: list[Scenario], usual: list[Scenario]) -> list[Scenario]:
    """The harder questions none of whose source mails serves a usual question of another split."""
    splits = defaultdict(set)
    for scenario in usual:
        for message_id in scenario.message_ids:
            splits[message_id].add(scenario.split)
    return [s for s in hard if all(splits[message_id] <= {s.split} for message_id in s.message_ids)]


def _made(db: Path, out: Path, kinds: str, limit: int) -> list[Scenario]:
    words = ["--kinds", kinds, "--db", db, "--out", out, "--limit", limit, "--seed", SEED, "--overwrite"]
    words.append("--include-machine-mail")  # as when they were frozen
    _emailrl("gen-questions", *words)
    return read_questions(out, DataSettings()).scenarios


def summary(scenarios: list[Scenario]) -> dict[str, dict[str, Any]]:
    """Of each split: questions, inboxes, questions by kind, and the hash of ids, questions, answers and sources."""
    by_split = defaultdict(list)
    for scenario in scenarios:
        by_split[scenario.split or ""].append(scenario)
    return {
        split: {
            "questions": len(rows),
            "inboxes": len({row.inbox_address for row in rows}),
            "without an answer": sum(not row.answerable for row in rows),
            "kinds": dict(sorted(Counter(row.kind for row in rows).items(), key=str)),
            "sha256": digest(rows),
        }
        for split, rows in by_split.items()
    }


def digest(scenarios: list[Scenario]) -> str:
    rows = sorted([s.id, s.question, s.answer, *s.message_ids] for s in scenarios)
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _emailrl(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "emailrl", *map(str, arguments)], check=True)


if __name__ == "__main__":
    sys.exit(main())
