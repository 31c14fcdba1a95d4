"""The questions a small model is trained and tested on: made from real mail, split by inbox, frozen by a hash.

    python tests/gpu/small_questions.py enron_mail_subset.tar.gz --out data/small

writes ``mail.db`` and ``questions.jsonl``: ``train`` for SFT and RL, ``val`` for the choice of the checkpoint, ``test``
read by the last benchmark alone. No two splits share an inbox or a source mail. Hash and counts are compared with
``small_questions.json`` beside this script, which holds no mail and no address; ``--freeze`` writes it anew.
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

from emailrl.scenarios import load_scenarios, write_scenarios
from emailrl.scenarios.splits import mixed_order
from emailrl.settings import DataSettings
from emailrl.trajectory import Scenario

FROZEN = Path(__file__).with_suffix(".json")
LIMIT = 9000
"""Questions asked for; the mails give fewer."""
TEST_QUESTIONS = 600
SEED = 42


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mail", help="what gen-db reads")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--freeze", action="store_true", help="write the hash instead of comparing it")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    db, made = options.out / "mail.db", options.out / "all.jsonl"
    _emailrl("gen-db", "--source", options.mail, "--db", db, "--overwrite")
    _emailrl("gen-questions", "--db", db, "--out", made, "--limit", LIMIT, "--seed", SEED, "--overwrite")
    chosen = choose(load_scenarios(made, None, limit=None, seed=SEED, data=DataSettings()))
    write_scenarios(options.out / "questions.jsonl", chosen)
    made.unlink()
    found = {"questions": summary(chosen)}
    print(json.dumps(found, indent=1))
    if options.freeze:
        FROZEN.write_text(json.dumps(found, indent=1) + "\n")
    elif json.loads(FROZEN.read_text()) != found:
        print(f"These are not the questions of {FROZEN.name}.", file=sys.stderr)
        return 1
    return 0


def choose(scenarios: list[Scenario]) -> list[Scenario]:
    """All questions but those of the test beyond ``TEST_QUESTIONS``, which keep the mix of kinds and inboxes."""
    test = mixed_order([s for s in scenarios if s.split == "test"], SEED)[:TEST_QUESTIONS]
    return [s for s in scenarios if s.split != "test"] + test


def summary(scenarios: list[Scenario]) -> dict[str, dict[str, Any]]:
    """Of each split: questions, inboxes, questions by kind, and the hash of ids, questions, answers and sources."""
    by_split = defaultdict(list)
    for scenario in scenarios:
        by_split[scenario.split or ""].append(scenario)
    return {
        split: {
            "questions": len(rows),
            "inboxes": len({row.inbox_address for row in rows}),
            "kinds": dict(sorted(Counter(row.kind for row in rows).items(), key=str)),
            "sha256": digest(rows),
        }
        for split, rows in by_split.items()
    }


def digest(scenarios: list[Scenario]) -> str:
    """A hash that does not depend on the order."""
    rows = sorted([s.id, s.question, s.answer, *s.message_ids] for s in scenarios)
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _emailrl(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "emailrl", *map(str, arguments)], check=True)


if __name__ == "__main__":
    sys.exit(main())
