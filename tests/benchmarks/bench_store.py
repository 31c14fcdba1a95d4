"""The mail database against ART-E's way, on the same mail in one run: messages a second in, milliseconds a search.

    python tests/benchmarks/bench_store.py                                 the real archive: ingest and search
    python tests/benchmarks/bench_store.py --scale 270000 --keep big       so many mails: build, memory, append, search

Ingest: ``gen-db``'s build (parsing processes, staging, index, fsync) against ``mail-parser`` and ART-E's loader (the
extra ``bench``). Search: both queries over the same stored mails, inbox and dates on, warm, in turns; every pair of
result sets is compared. ART-E's side plays the first ``--peer-queries`` of each kind. ``cpu`` are processor seconds,
which say more than the clock where other work runs beside. Memory is the peak over all processes of the build together
(a page that several share counts once).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import re
import resource
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import art_e_store
from big_mail import Copies
from mail.mails import stored_emails

from emailrl.mail import open_mailbox
from emailrl.mail.build import build_database
from emailrl.mail.sources import RawEmail, open_source

ENRON = Path(__file__).resolve().parents[3] / "shared" / "data" / "enron"
APPENDED = 2000
COMMON = (["the"], ["enron"], ["gas"], ["the", "enron"], ["the", "gas"], ["enron", "gas"], ["of the"])
SIZES = {"large": (2_000, 10**9), "middle": (200, 2_000), "small": (10, 200)}
"""Mails in an inbox, from and below."""


def report(name: str, work: Callable[[], tuple[int, str]]) -> float:
    """Run ``work``, which tells the messages it saw and what to say of them; print rate and peak; its seconds."""
    peak, ended = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.2):
            total, this = 0, psutil.Process()
            for process in (this, *this.children(recursive=True)):
                try:
                    total += process.memory_full_info().pss
                except psutil.NoSuchProcess:
                    continue
            peak = max(peak, total)

    watcher = threading.Thread(target=watch)
    watcher.start()
    cpu, started = cpu_seconds(), time.monotonic()
    messages, said = work()
    seconds, cpu = time.monotonic() - started, cpu_seconds() - cpu
    ended.set()
    watcher.join()
    rate = f"{messages / seconds:>8,.0f} messages/s   {seconds:6.2f} s   cpu {cpu:6.2f} s   {peak / 2**20:4,.0f} MiB"
    print(f"  {name:8} {rate}   {said}", flush=True)
    return seconds


def cpu_seconds() -> float:
    """Processor seconds of this process and its finished children."""
    usages = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def bench_ingest(archive: Path, folder: Path, rounds: int) -> None:
    """Messages a second of both ways, rounds alternating."""
    messages = sum(1 for _ in open_source(archive).items)
    print(f"ingest of {messages:,} messages")
    for number in range(rounds):

        def ours(db: Path = folder / f"ours-{number}.db") -> tuple[int, str]:
            built = build_database(open_source(archive), db)
            return messages, f"{built.emails:,} stored, {sum(built.skipped.values()):,} skipped with a reason"

        def theirs(db: Path = folder / f"theirs-{number}.db") -> tuple[int, str]:
            failures: list[str] = []
            stored = art_e_store.load(art_e_store.parse_archive(archive, failures), db)
            return messages, f"{stored:,} stored, {len(failures):,} lost to parse errors"

        seconds = report("emailrl", ours)
        if importlib.util.find_spec("mailparser"):
            print(f"  {report('ART-E', theirs) / seconds:.1f} times our seconds")


def build_pair(archive: Path, folder: Path, scale: int | None) -> tuple[Path, Path]:
    """Our database of the archive, or of ``scale`` mails made from it, and ART-E's of the same mails, unless kept."""
    ours, theirs = (folder / f"{name}-{scale or 'archive'}.db" for name in ("emailrl", "art-e"))
    if not ours.exists():
        source = Copies(archive) if scale else open_source(archive)

        def build() -> tuple[int, str]:
            built = build_database(source, ours, limit=scale)
            return built.emails + sum(built.skipped.values()), f"{built.emails:,} stored, parsing included"

        report("emailrl", build)
        report("ART-E", lambda: (art_e_store.load(stored_emails(ours), theirs), "stored, parsed already"))
    return ours, theirs


def bench_append(ours: Path) -> None:
    """Seconds that it takes to append newer mail; the database stays changed."""
    with closing(sqlite3.connect(f"file:{ours}?mode=ro", uri=True)) as connection:
        newest, number = connection.execute("SELECT max(date), count(*) FROM emails").fetchone()
    start = datetime.fromisoformat(f"{newest}+00:00")

    def newer() -> Iterator[RawEmail]:
        for place, email in enumerate(islice(stored_emails(ours), APPENDED), 1):
            yield replace(email, message_id=f"{email.message_id}-{number}", body=f"{email.body}\n{number}",
                          date=start + timedelta(minutes=place))  # fmt: skip

    mails = list(newer())
    report("append", lambda: (len(mails), f"{build_database(mails, ours, append=True).emails:,} added to {number:,}"))


# -- searches


@dataclass(frozen=True)
class Query:
    """One search with its inbox, in the two years before a day."""

    inbox: str
    keywords: list[str]
    until: str

    @property
    def since(self) -> str:
        """The first day."""
        return f"{int(self.until[:4]) - 2}{self.until[4:8]}01"


def of_questions(questions: Path, number: int, rng: random.Random) -> list[Query]:
    """One to three words of a question, in its inbox, before its date."""
    rows = [json.loads(line) for line in questions.read_text().splitlines()]
    queries = []
    for row in rng.choices(rows, k=number):
        words = re.findall(r"\w{3,}", row["question"])
        keywords = rng.sample(words, min(len(words), rng.randint(1, 3)))
        queries.append(Query(row["inbox_address"].lower(), keywords, row["query_date"][:10]))
    return queries


def inboxes_by_size(db: Path) -> dict[str, list[str]]:
    """The addresses of a database in those classes of ``SIZES`` that it has any for."""
    with closing(sqlite3.connect(f"file:{db}?mode=ro", uri=True)) as connection:
        counts = connection.execute(
            "SELECT address, count(*) FROM (SELECT from_address AS address, id FROM emails WHERE from_address <> '' "
            "UNION SELECT recipient_address, email_id FROM recipients) GROUP BY address ORDER BY address"
        ).fetchall()
    found = {size: [name for name, mails in counts if low <= mails < high] for size, (low, high) in SIZES.items()}
    return {size: addresses for size, addresses in found.items() if addresses}


def bench_searches(ours: Path, theirs: Path | None, given: argparse.Namespace, note: str = "") -> None:
    """Every kind of query."""
    rng = random.Random(0)
    words = of_questions(given.questions, given.queries, rng)
    bench_search(ours, theirs, words, given.peer_queries, f"words of the questions{note}")
    for size, inboxes in inboxes_by_size(ours).items():
        elsewhere = [replace(query, inbox=rng.choice(inboxes)) for query in words]
        bench_search(ours, theirs, elsewhere, given.peer_queries, f"the same words, {size} inboxes{note}")
        common = [replace(one, keywords=COMMON[number % len(COMMON)]) for number, one in enumerate(elsewhere)]
        bench_search(ours, theirs, common, given.peer_queries, f"common words, {size} inboxes{note}")


def bench_search(ours: Path, theirs: Path | None, queries: list[Query], peer_queries: int, title: str) -> None:
    """Our side three times over, the first not counted; then ART-E's twice on the first ``peer_queries``."""

    def mine(query: Query) -> list[tuple[str, str]]:
        with open_mailbox(ours, query.inbox) as box:
            found = box.search(query.keywords, sent_after=query.since, sent_before=query.until)
        return [(hit.message_id, hit.snippet) for hit in found]

    print(f"search, {title}: {len(queries):,} queries; ms")
    timed("emailrl", mine, queries, 3)
    if theirs is not None:
        with closing(sqlite3.connect(f"file:{theirs}?mode=ro", uri=True)) as connection:

            def other(query: Query) -> list[tuple[str, str, str]]:
                return art_e_store.search(connection, query.inbox, query.keywords, query.since, query.until)

            timed("ART-E", other, queries[:peer_queries], 2)
            for query in queries[:peer_queries]:
                check_same(mine(query), other(query), query)


def timed(name: str, search: Callable[[Query], object], queries: list[Query], rounds: int) -> None:
    """Print percentiles of all rounds but the first, by the clock and of the processor."""
    taken: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        for query in queries:
            started, busy = time.perf_counter(), time.thread_time()
            search(query)
            if number:
                taken[0].append(time.perf_counter() - started)
                taken[1].append(time.thread_time() - busy)
    for label, seconds in zip((name, "(cpu)"), map(sorted, taken), strict=True):
        marks = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
        at = {mark: seconds[min(int(len(seconds) * share), len(seconds) - 1)] for mark, share in marks.items()}
        print(f"  {label:8}", "   ".join(f"{mark} {1000 * value:7.3f}" for mark, value in at.items()), flush=True)


def check_same(mine: list[tuple[str, str]], other: list[tuple[str, str, str]], query: Query) -> None:
    """Same mails, save that equally dated ones may change places at the end of a full page."""
    last = other[-1][1] if len(other) == 10 else None
    sure = {(message_id, snippet) for message_id, date, snippet in other if date != last}
    if len(mine) != len(other) or not sure <= set(mine):
        raise SystemExit(f"different results for {query}")


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archive", type=Path, default=ENRON / "enron_mail_subset.tar.gz")
    parser.add_argument("--questions", type=Path, default=ENRON / "art_e_questions.jsonl")
    parser.add_argument("--scale", type=int, help="search so many mails, made from the archive")
    parser.add_argument("--rounds", type=int, default=2, help="of the ingest")
    parser.add_argument("--queries", type=int, default=1000, help="of each kind")
    parser.add_argument("--peer-queries", type=int, default=150)
    parser.add_argument("--keep", type=Path, help="keep the databases in this folder, and use those kept there")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if not given.scale:
            bench_ingest(given.archive, Path(temporary), given.rounds)
        ours, theirs = build_pair(given.archive, folder, given.scale)
        bench_searches(ours, theirs, given)
        if given.scale:
            bench_append(ours)
            bench_searches(ours, None, given, ", after append")


if __name__ == "__main__":
    main()
