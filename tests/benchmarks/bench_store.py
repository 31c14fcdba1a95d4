"""The mail database against ART-E's way, on the same mail in one run: messages a second in, milliseconds a search.

    python tests/benchmarks/bench_store.py --archive enron_mail_subset.tar.gz --questions art_e_questions.jsonl
    python tests/benchmarks/bench_store.py ... --copies 12 --skip-ingest      270,000 mails and more

Ingest: ``gen-db``'s build (parsing processes, staging, index, fsync) against ``mail-parser`` and ART-E's loader, where
that package is installed. Search: both queries over the same stored mails, inbox and dates on, 1–3 words of the real
questions, in the same order, warm; every pair of result sets is compared. ``cpu`` are processor seconds of all
processes, which say more than the clock where other work runs beside.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import random
import re
import resource
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import art_e_store

from emailrl.store import open_mailbox
from emailrl.store.build import build_database, stored_emails
from emailrl.store.sources import RawEmail, open_source

COMMON = ("the", "enron", "gas")


@dataclasses.dataclass
class Query:
    """One search as an agent makes it."""

    inbox: str
    keywords: list[str]
    sent_after: str
    sent_before: str


def cpu_seconds() -> float:
    """Processor seconds of this process and its finished children."""
    usages = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def report(name: str, messages: int, work: Callable[[], str]) -> None:
    """Run ``work`` and print what it did in a second."""
    cpu, started = cpu_seconds(), time.monotonic()
    said = work()
    seconds, cpu = time.monotonic() - started, cpu_seconds() - cpu
    print(
        f"  {name:8} {messages / seconds:>8,.0f} messages/s   {seconds:6.2f} s   cpu {cpu:6.2f} s   {said}", flush=True
    )


def bench_ingest(archive: Path, folder: Path, rounds: int) -> None:
    """Messages a second of both ways, rounds alternating."""
    messages = sum(1 for _ in open_source(archive).items)
    print(f"ingest of {messages:,} messages")
    for number in range(rounds):

        def ours(db: Path = folder / f"ours-{number}.db") -> str:
            built = build_database(open_source(archive), db)
            return f"{built.emails:,} stored, {sum(built.skipped.values()):,} skipped with a reason"

        def theirs(db: Path = folder / f"theirs-{number}.db") -> str:
            failures: list[str] = []
            stored = art_e_store.load(art_e_store.parse_archive(archive, failures), db)
            return f"{stored:,} stored, {len(failures):,} lost to parse errors"

        report("emailrl", messages, ours)
        if importlib.util.find_spec("mailparser"):
            report("ART-E", messages, theirs)
        else:
            print("  ART-E    needs the package mail-parser")


def copies(emails: list[RawEmail], number: int) -> Iterator[RawEmail]:
    """The mails so many times over, with ids and bodies of their own."""
    for copy in range(number):
        for email in emails:
            if copy == 0:
                yield email
            else:
                yield dataclasses.replace(
                    email, message_id=f"{email.message_id}-{copy}", body=f"{email.body}\ncopy{copy}", file_name=""
                )


def draw_queries(questions: Path, number: int, seed: int) -> list[Query]:
    """Words of the real questions, in their inboxes, in the two years before their dates."""
    rng = random.Random(seed)
    rows = [json.loads(line) for line in questions.read_text().splitlines()]
    queries = []
    for _ in range(number):
        row = rng.choice(rows)
        words = re.findall(r"\w{3,}", row["question"])
        day = row["query_date"][:10]
        earlier = f"{int(day[:4]) - 2}{day[4:8]}01"
        keywords = rng.sample(words, min(len(words), rng.randint(1, 3)))
        queries.append(Query(row["inbox_address"].lower(), keywords, earlier, day))
    return queries


def percentiles(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    marks = ((name, ordered[min(int(len(ordered) * share), len(ordered) - 1)]) for name, share in
             (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("max", 1.0)))  # fmt: skip
    return "   ".join(f"{name} {1000 * value:7.3f} ms" for name, value in marks)


def bench_search(ours: Path, theirs: Path, queries: list[Query], title: str) -> None:
    """Both sides over the same queries; the second of two passes counts."""
    with closing(sqlite3.connect(f"file:{theirs}?mode=ro", uri=True)) as connection:
        times: dict[str, list[float]] = {}
        hits = 0
        for _ in range(2):
            times = {"emailrl": [], "ART-E": []}
            hits = 0
            for query in queries:
                started = time.perf_counter()
                with open_mailbox(ours, query.inbox, query.sent_before) as box:
                    mine = box.search(query.keywords, sent_after=query.sent_after, sent_before=query.sent_before)
                between = time.perf_counter()
                other = art_e_store.search(connection, query.inbox, query.keywords, query.sent_after, query.sent_before)
                times["ART-E"].append(time.perf_counter() - between)
                times["emailrl"].append(between - started)
                check_same([(hit.message_id, hit.snippet) for hit in mine], other, query)
                hits += len(mine)
    print(f"search, {title}: {len(queries):,} queries, {hits / len(queries):.1f} hits each, the same on both sides")
    for name, seconds in times.items():
        print(f"  {name:8} {percentiles(seconds)}")


def check_same(mine: list[tuple[str, str]], other: list[tuple[str, str, str]], query: Query) -> None:
    """Same mails, save that equally dated ones may change places at the end of a full page."""
    last = other[-1][1] if len(other) == 10 else None
    sure = {(message_id, snippet) for message_id, date, snippet in other if date != last}
    if len(mine) != len(other) or not sure <= set(mine):
        raise SystemExit(f"different results for {query}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archive", type=Path, required=True)
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--queries", type=int, default=2000)
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--skip-ingest", action="store_true")
    parser.add_argument("--folder", type=Path, help="keep the databases here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        if not arguments.skip_ingest:
            bench_ingest(arguments.archive, folder, arguments.rounds)
        once, ours, theirs = (folder / f"{name}.db" for name in ("once", "search", "search-art-e"))
        if not ours.exists():
            build_database(open_source(arguments.archive), once, overwrite=True)
            emails = list(stored_emails(once))
            build_database(copies(emails, arguments.copies), ours)
            art_e_store.load(copies(emails, arguments.copies), theirs)
        queries = draw_queries(arguments.questions, arguments.queries, seed=0)
        bench_search(ours, theirs, queries, "words of the questions")
        common = [dataclasses.replace(query, keywords=[word]) for query in queries[:200] for word in COMMON]
        bench_search(ours, theirs, common, f"one of {', '.join(COMMON)}")


if __name__ == "__main__":
    main()
