"""The mail database against ART-E's way (its repository, 2025-06), on the same mail in one run.

    python tests/benchmarks/bench_store.py                                 the real archive: ingest and search
    python tests/benchmarks/bench_store.py --scale 270000 --keep big       so many mails: build, memory, append, search

Ingest: ``gen-db``'s build (parsing processes, staging, index, fsync). Search: both queries over the same stored mails,
inbox and dates on, warm, in turns; every pair of result sets is compared. ART-E's side plays the first
``--peer-queries`` of each kind. ``cpu`` are processor seconds, which say more than the clock where other work runs
beside. Memory is the peak over all processes of the build together (a page that several share counts once).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import random
import re
import resource
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
from mail.mails import stored_emails

from emailrl.mail import open_mailbox
from emailrl.mail.build import build_database
from emailrl.mail.sources import RawEmail, Skipped, Source, open_source

ENRON = Path(__file__).resolve().parents[3] / "shared" / "data" / "enron"
APPENDED = 2000
COMMON = (["the"], ["enron"], ["gas"], ["the", "enron"], ["the", "gas"], ["enron", "gas"], ["of the"])
SIZES = {"large": (2_000, 10**9), "middle": (200, 2_000), "small": (10, 200)}
"""Mails in an inbox, from and below."""


# -- ART-E's side

SCHEMA = """
    CREATE TABLE emails (id INTEGER PRIMARY KEY AUTOINCREMENT, message_id TEXT UNIQUE, subject TEXT, from_address TEXT,
        date TEXT, body TEXT, file_name TEXT);
    CREATE TABLE recipients (email_id INTEGER, recipient_address TEXT, recipient_type TEXT,
        FOREIGN KEY(email_id) REFERENCES emails(id) ON DELETE CASCADE);
    CREATE INDEX idx_emails_from ON emails(from_address);
    CREATE INDEX idx_emails_date ON emails(date);
    CREATE INDEX idx_emails_message_id ON emails(message_id);
    CREATE INDEX idx_recipients_address ON recipients(recipient_address);
    CREATE INDEX idx_recipients_type ON recipients(recipient_type);
    CREATE INDEX idx_recipients_email_id ON recipients(email_id);
    CREATE INDEX idx_recipients_address_email ON recipients(recipient_address, email_id);
    CREATE VIRTUAL TABLE emails_fts USING fts5(subject, body, content='emails', content_rowid='id');
"""
SEARCH = """
    SELECT e.message_id, e.date, snippet(emails_fts, -1, '<b>', '</b>', ' ... ', 15)
    FROM emails e JOIN emails_fts fts ON e.id = fts.rowid
    WHERE fts.emails_fts MATCH ? AND (e.from_address = ? OR EXISTS (SELECT 1 FROM recipients r_inbox
        WHERE r_inbox.recipient_address = ? AND r_inbox.email_id = e.id)) AND e.date >= ? AND e.date < ?
    ORDER BY e.date DESC LIMIT 10
"""


def load(emails: Iterable[RawEmail], db: Path) -> int:
    """Fill a database, rows one by one and the full-text index after; the number of mails stored."""
    seen: set[tuple[str, str, str]] = set()
    with closing(sqlite3.connect(db)) as connection:
        connection.executescript(f"PRAGMA synchronous = OFF; PRAGMA journal_mode = MEMORY; {SCHEMA}; BEGIN")
        for email in emails:
            people = [(address, kind) for kind in ("to", "cc", "bcc") for address in getattr(email, kind)]
            key = (email.subject, email.body, email.from_address)
            if len(email.body) > 5000 or len(people) > 30 or key in seen:
                continue
            seen.add(key)
            date = email.date.strftime("%Y-%m-%d %H:%M:%S") if email.date else None
            cursor = connection.execute(
                "INSERT INTO emails (message_id, subject, from_address, date, body, file_name) VALUES (?,?,?,?,?,?)",
                (email.message_id, email.subject, email.from_address, date, email.body, email.file_name),
            )
            connection.executemany(f"INSERT INTO recipients VALUES ({cursor.lastrowid}, ?, ?)", people)
        connection.execute("INSERT INTO emails_fts (rowid, subject, body) SELECT id, subject, body FROM emails")
        connection.commit()
    return len(seen)


# -- ingest


class Copies(Source):
    """An archive over and over without end, parsed anew each time: mail in any number (``limit`` of the build ends it).

    A copy has ids and bodies of its own, so that no filter takes it for a repeat, and dates 17 hours after those of the
    copy before, so that mails of the same words do not lie side by side. Every second copy is other people's mail: a
    large corpus holds more mailboxes, not only larger ones.
    """

    def __init__(self, archive: Path) -> None:
        items = ((n, item) for n in itertools.count() for item in open_source(archive).items)
        numbered = ((f"{n}/{item[0]}", item[1]) if isinstance(item, tuple) else item for n, item in items)
        super().__init__(numbered)

    def read(self, judge: Callable[[Any], Any], workers: int | None = None) -> Iterator[Any]:
        return super().read(functools.partial(judge_copy, judge=judge), workers)


def judge_copy(email: RawEmail | Skipped, judge: Callable[[RawEmail | Skipped], Any]) -> Any:
    number = 0 if isinstance(email, Skipped) else int(email.file_name.partition("/")[0])
    if isinstance(email, Skipped) or not number:
        return judge(email)
    date = email.date and email.date + number * timedelta(hours=17)
    copy = replace(email, message_id=f"{email.message_id}-{number}", body=f"{email.body}\ncopy{number}", date=date)
    if number % 2 == 0:
        sender = email.from_address and f"{number}.{email.from_address}"
        people = {kind: [f"{number}.{one}" for one in getattr(email, kind)] for kind in ("to", "cc", "bcc")}
        copy = replace(copy, from_address=sender, **people)
    return judge(copy)


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

    watcher = threading.Thread(target=watch, daemon=True)
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


def built(name: str, mails: Any, db: Path, **options: Any) -> float:
    def build() -> tuple[int, str]:
        made = build_database(mails, db, **options)
        skipped = sum(made.skipped.values())
        return made.emails + skipped, f"{made.emails:,} stored, {skipped:,} skipped with a reason"

    return report(name, build)


def bench_append(ours: Path) -> None:
    """Seconds that it takes to append newer mail; the database stays changed."""
    with closing(sqlite3.connect(f"file:{ours}?mode=ro", uri=True)) as connection:
        newest, number = connection.execute("SELECT max(date), count(*) FROM emails").fetchone()
    start = datetime.fromisoformat(f"{newest}+00:00")
    mails = [
        replace(email, message_id=f"{email.message_id}-{number}", body=f"{email.body}\n{number}",
                date=start + timedelta(minutes=place))
        for place, email in enumerate(islice(stored_emails(ours), APPENDED), 1)
    ]  # fmt: skip
    built("append", mails, ours, append=True)


# -- searches


@dataclass(frozen=True)
class Query:
    """One search with its inbox, in the two years before a day."""

    inbox: str
    keywords: list[str]
    until: str

    @property
    def since(self) -> str:
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
    kinds = {"words of the questions": words}
    for size, inboxes in inboxes_by_size(ours).items():
        elsewhere = [replace(query, inbox=rng.choice(inboxes)) for query in words]
        kinds[f"the same words, {size} inboxes"] = elsewhere
        kinds[f"common words, {size} inboxes"] = [
            replace(one, keywords=COMMON[number % len(COMMON)]) for number, one in enumerate(elsewhere)
        ]
    for title, queries in kinds.items():
        print(f"search, {title}{note}: {len(queries):,} queries; ms")
        bench_search(ours, theirs, queries, given.peer_queries)


def bench_search(ours: Path, theirs: Path | None, queries: list[Query], peer_queries: int) -> None:
    """Our side three times over, the first not counted; then ART-E's twice on the first ``peer_queries``."""

    def mine(query: Query) -> list[tuple[str, str]]:
        with open_mailbox(ours, query.inbox, names=False) as box:
            found = box.search(query.keywords, sent_after=query.since, sent_before=query.until)
        return [(hit.message_id, hit.snippet) for hit in found]

    timed("emailrl", mine, queries, 3)
    if theirs is None:
        return
    with closing(sqlite3.connect(f"file:{theirs}?mode=ro", uri=True)) as connection:

        def other(query: Query) -> list[tuple[str, str, str]]:
            words = " ".join('"' + keyword.replace('"', '""') + '"' for keyword in query.keywords)
            days = (f"{query.since} 00:00:00", f"{query.until} 00:00:00")
            return connection.execute(SEARCH, (words, query.inbox, query.inbox, *days)).fetchall()

        timed("ART-E", other, queries[:peer_queries], 2)
        for query in queries[:peer_queries]:
            found, expected = mine(query), other(query)
            # Equally dated mails may change places at the end of a full page.
            last = expected[-1][1] if len(expected) == 10 else None
            sure = {(message_id, snippet) for message_id, date, snippet in expected if date != last}
            if len(found) != len(expected) or not sure <= set(found):
                raise SystemExit(f"different results for {query}")


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archive", type=Path, default=ENRON / "enron_mail_subset.tar.gz")
    parser.add_argument("--questions", type=Path, default=ENRON / "art_e_questions.jsonl")
    parser.add_argument("--scale", type=int, help="search so many mails, made from the archive")
    parser.add_argument("--rounds", type=int, default=2, help="of the build")
    parser.add_argument("--queries", type=int, default=1000, help="of each kind")
    parser.add_argument("--peer-queries", type=int, default=150)
    parser.add_argument("--keep", type=Path, help="keep the databases in this folder, and use those kept there")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if not given.scale:
            for number in range(given.rounds):
                built("emailrl", open_source(given.archive), Path(temporary) / f"{number}.db")
        ours, theirs = (folder / f"{name}-{given.scale or 'archive'}.db" for name in ("emailrl", "art-e"))
        if not ours.exists():
            source = Copies(given.archive) if given.scale else open_source(given.archive)
            built("emailrl", source, ours, limit=given.scale)
            report("ART-E", lambda: (load(stored_emails(ours), theirs), "stored, parsed already"))
        bench_searches(ours, theirs, given)
        if given.scale:
            bench_append(ours)
            bench_searches(ours, None, given, ", after append")


if __name__ == "__main__":
    main()
