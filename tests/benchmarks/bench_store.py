"""The mail database against ART-E's way, on the same mail in one run: messages a second in, milliseconds a search.

    python tests/benchmarks/bench_store.py                                 the real archive: ingest and search
    python tests/benchmarks/bench_store.py --scale 270000 --keep big       so many mails: build, memory, append, search

Ingest: ``gen-db``'s build (parsing processes, staging, index, fsync) against ``mail-parser`` and ART-E's loader (the
extra ``bench``). Search: both queries over the same stored mails, inbox and dates on, warm, in turns; every pair of
result sets is compared. ART-E's side plays the first ``--peer-queries`` of each kind. ``cpu`` are processor seconds,
which say more than the clock where other work runs beside. Memory is the peak over all processes of the build together.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import random
import resource
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import art_e_store
import store_queries
from big_mail import Copies
from mail.mails import stored_emails
from peak_memory import PeakMemory
from store_queries import Query

from emailrl.mail import open_mailbox
from emailrl.mail.build import build_database
from emailrl.mail.sources import RawEmail, open_source

ENRON = Path(__file__).resolve().parents[3] / "shared" / "data" / "enron"
APPENDED = 2000

FIRST_SEARCH = """
import sys, time
import psutil
from emailrl.mail import open_mailbox
memory, started = psutil.Process().memory_full_info().uss, time.perf_counter()
box = open_mailbox(sys.argv[1], sys.argv[2])
opened = time.perf_counter()
box.search(["the", "meeting"])
searched = time.perf_counter()
memory = psutil.Process().memory_full_info().uss - memory
print(f"open {1000 * (opened - started):.2f} ms, first search {1000 * (searched - opened):.2f} ms, {memory >> 10} KiB")
"""


def cpu_seconds() -> float:
    """Processor seconds of this process and its finished children."""
    usages = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def report(name: str, work: Callable[[], tuple[int, str]]) -> float:
    """Run ``work``, which tells the messages it saw and what to say of them; print what it did in a second.

    Returns its seconds.
    """
    with PeakMemory() as memory:
        cpu, started = cpu_seconds(), time.monotonic()
        messages, said = work()
        seconds, cpu = time.monotonic() - started, cpu_seconds() - cpu
    print(
        f"  {name:8} {messages / seconds:>8,.0f} messages/s   {seconds:6.2f} s   cpu {cpu:6.2f} s   "
        f"{memory.mebibytes:4,.0f} MiB   {said}",
        flush=True,
    )
    return seconds


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
        else:
            print("  ART-E    needs the package mail-parser")


def build_pair(archive: Path, folder: Path, scale: int | None) -> tuple[Path, Path]:
    """Our database of the archive, or of ``scale`` mails made from it, and ART-E's of the same mails; kept ones are
    taken as they are."""
    ours, theirs = (folder / f"{name}-{scale or 'archive'}.db" for name in ("emailrl", "art-e"))
    if not ours.exists():
        source = Copies(archive) if scale else open_source(archive)

        def build() -> tuple[int, str]:
            built = build_database(source, ours, limit=scale)
            return built.emails + sum(built.skipped.values()), f"{built.emails:,} stored, parsing included"

        def load() -> tuple[int, str]:
            stored = art_e_store.load(stored_emails(ours), theirs)
            return stored, "stored, parsed already"

        report("emailrl", build)
        usages = (resource.getrusage(who).ru_maxrss >> 10 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        print("           ru_maxrss so far: {} MiB here, {} MiB of the largest child".format(*usages))
        report("ART-E", load)
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

    def append(mails: list[RawEmail]) -> tuple[int, str]:
        return len(mails), f"{build_database(mails, ours, append=True).emails:,} added to {number:,}"

    report("append", partial(append, list(newer())))


def percentiles(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    marks = ((name, ordered[min(int(len(ordered) * share), len(ordered) - 1)]) for name, share in
             (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("max", 1.0)))  # fmt: skip
    return "   ".join(f"{name} {1000 * value:7.3f}" for name, value in marks)


def bench_search(ours: Path, theirs: Path | None, queries: list[Query], peer_queries: int, title: str) -> None:
    """Our side three times over, the first not counted; then both in turns on the first ``peer_queries``."""
    clock, cpu, hits = [], [], 0
    for number in range(3):
        for query in queries:
            started, busy = time.perf_counter(), time.thread_time()
            with open_mailbox(ours, query.inbox) as box:
                found = box.search(query.keywords, sent_after=query.sent_after, sent_before=query.sent_before)
            if number:
                clock.append(time.perf_counter() - started)
                cpu.append(time.thread_time() - busy)
                hits += len(found)
    print(f"search, {title}: {len(queries):,} queries, {hits / len(queries) / 2:.1f} hits each; ms")
    print(f"  emailrl        {percentiles(clock)}\n          (cpu)  {percentiles(cpu)}", flush=True)
    if theirs is not None:
        peer, peer_cpu = compare(ours, theirs, queries[:peer_queries])
        print(f"  ART-E          {percentiles(peer)}   ({len(peer):,} of them, the same hits)")
        print(f"          (cpu)  {percentiles(peer_cpu)}", flush=True)


def compare(ours: Path, theirs: Path, queries: list[Query]) -> tuple[list[float], list[float]]:
    """Seconds and processor seconds of ART-E's query, the second of two passes; ends the program where hits differ."""
    seconds, cpu = [], []
    with closing(sqlite3.connect(f"file:{theirs}?mode=ro", uri=True)) as connection:
        for query in queries * 2:
            started, busy = time.perf_counter(), time.thread_time()
            other = art_e_store.search(connection, query.inbox, query.keywords, query.sent_after, query.sent_before)
            seconds.append(time.perf_counter() - started)
            cpu.append(time.thread_time() - busy)
            with open_mailbox(ours, query.inbox) as box:
                mine = box.search(query.keywords, sent_after=query.sent_after, sent_before=query.sent_before)
            check_same([(hit.message_id, hit.snippet) for hit in mine], other, query)
    return seconds[len(queries) :], cpu[len(queries) :]


def check_same(mine: list[tuple[str, str]], other: list[tuple[str, str, str]], query: Query) -> None:
    """Same mails, save that equally dated ones may change places at the end of a full page."""
    last = other[-1][1] if len(other) == 10 else None
    sure = {(message_id, snippet) for message_id, date, snippet in other if date != last}
    if len(mine) != len(other) or not sure <= set(mine):
        raise SystemExit(f"different results for {query}")


def bench_searches(ours: Path, theirs: Path | None, arguments: argparse.Namespace, note: str = "") -> None:
    """Every kind of query."""
    rng = random.Random(0)
    words = store_queries.of_questions(arguments.questions, arguments.queries, rng)
    bench_search(ours, theirs, words, arguments.peer_queries, f"words of the questions{note}")
    for size, inboxes in store_queries.inboxes_by_size(ours).items():
        elsewhere = store_queries.elsewhere(words, inboxes, rng)
        bench_search(ours, theirs, elsewhere, arguments.peer_queries, f"the same words, {size} inboxes{note}")
        common = store_queries.common(words, inboxes, rng)
        bench_search(ours, theirs, common, arguments.peer_queries, f"common words, {size} inboxes{note}")


def in_another_process(work: Callable[..., None], *arguments: object) -> None:
    """Do ``work`` where what it maps into memory is not counted as ours; ends the program where it fails."""
    process = multiprocessing.get_context("fork").Process(target=work, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(process.exitcode)


def first_search(db: Path, inbox: str) -> None:
    """What opening costs in a fresh process."""
    for _ in range(2):
        command = [sys.executable, "-c", FIRST_SEARCH, db, inbox]
        ran = subprocess.run(command, check=True, capture_output=True, text=True)
    print(f"a fresh process: {ran.stdout.strip()}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archive", type=Path, default=ENRON / "enron_mail_subset.tar.gz")
    parser.add_argument("--questions", type=Path, default=ENRON / "art_e_questions.jsonl")
    parser.add_argument("--scale", type=int, help="search so many mails, made from the archive")
    parser.add_argument("--rounds", type=int, default=2, help="of the ingest")
    parser.add_argument("--queries", type=int, default=1000, help="of each kind")
    parser.add_argument("--peer-queries", type=int, default=150)
    parser.add_argument("--keep", type=Path, help="keep the databases in this folder, and use those kept there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if not arguments.scale:
            bench_ingest(arguments.archive, Path(temporary), arguments.rounds)
        ours, theirs = build_pair(arguments.archive, folder, arguments.scale)
        first_search(ours, store_queries.of_questions(arguments.questions, 1, random.Random(0))[0].inbox)
        in_another_process(bench_searches, ours, theirs, arguments)
        if arguments.scale:
            bench_append(ours)
            in_another_process(bench_searches, ours, None, arguments, ", after append")


if __name__ == "__main__":
    main()
