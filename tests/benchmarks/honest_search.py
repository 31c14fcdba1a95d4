"""What searching by the question alone reaches: a table by kind of question, in Markdown.

python tests/benchmarks/honest_search.py mail.db questions.jsonl --split test
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from emailrl.questions.load import read_questions
from emailrl.records.trajectory import Message
from emailrl.settings import load_settings
from emailrl.sft.searching import CAREFUL, Habits, is_right, play

NOWHERE = 99
Row = tuple[float, ...]
"""Found first, among three, at all; right; turns."""


def rank(messages: Sequence[Message], sources: Sequence[str]) -> int:
    """The best place of a source mail in any search of a conversation, from 0."""
    found = [NOWHERE]
    for message in messages:
        if message.name == "search_emails":
            ids = [hit["message_id"] for hit in json.loads(message.content)]
            found += [ids.index(source) for source in sources if source in ids]
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("db", type=Path)
    parser.add_argument("questions", type=Path)
    parser.add_argument("--split", default="test", choices=("train", "val", "test"))
    parser.add_argument("--limit", type=int)
    parser.add_argument("--seed", type=int, default=42)
    options = parser.parse_args()
    settings = load_settings({"db": options.db, "questions": options.questions, "max_source_mails": 10})
    chosen = read_questions(None, settings.data).of(options.split, limit=options.limit, seed=options.seed).scenarios
    rows: dict[str, list[tuple[Row, Row]]] = defaultdict(list)
    began = time.perf_counter()
    for scenario in chosen:
        both: list[Row] = []
        for habits in (CAREFUL, Habits()):
            environment, messages = play(scenario, settings, habits, random.Random(f"{options.seed}/{scenario.id}"))
            place = rank(messages, scenario.message_ids)
            right = is_right(environment)
            both.append((place == 0, place < 3, place < NOWHERE, right, environment.rubric.num_turns))
        rows[scenario.kind or "?"].append((both[0], both[1]))
    seconds = time.perf_counter() - began
    print("| kind | questions | first | first three | at all | right | turns | poor at times: right | turns |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for kind in sorted(rows):
        print(line(kind, rows[kind]))
    print(line("all", [pair for kind in rows.values() for pair in kind]))
    print(f"\n{2 * len(chosen)} conversations in {seconds:.1f} s")


def line(name: str, pairs: Sequence[tuple[Row, Row]]) -> str:
    careful, usual = (
        [statistics.mean(column) for column in zip(*side, strict=True)] for side in zip(*pairs, strict=True)
    )
    shares = " | ".join(f"{100 * share:.0f} %" for share in careful[:4])
    return f"| {name} | {len(pairs)} | {shares} | {careful[4]:.1f} | {100 * usual[3]:.0f} % | {usual[4]:.1f} |"


if __name__ == "__main__":
    main()
