"""What SQLAlchemy Core would cost on the store's hot path: the same statements by Core and by the driver, in turns.

    python tests/benchmarks/bench_core.py mail.db questions.jsonl

Search and read: a mailbox's own statements on warm pages, processor microseconds each. Bulk insert: the columns of the
database's mails into an empty table, processor milliseconds for 10,000 rows.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from sqlalchemy import Connection, insert, select, text

sys.path.insert(0, str(Path(__file__).parent))
import store_queries

from emailrl.mail.connection import connect, connect_for_loading, driver
from emailrl.mail.schema import create_tables, emails, recipients

ROUNDS = 5
ROWS = 10_000
SEARCH = """
    SELECT message_id, snippet(emails_fts, -1, '<b>', '</b>', ' ... ', 15) FROM emails_fts CROSS JOIN emails
    WHERE emails_fts MATCH {} AND emails.id = emails_fts.rowid ORDER BY emails_fts.rowid LIMIT 10"""
READ = "SELECT id, date, subject, from_address, body, file_name FROM emails WHERE message_id = ?"
PEOPLE = "SELECT recipient_address, recipient_type FROM recipients WHERE email_id = ? ORDER BY rowid"

CORE_SEARCH = text(SEARCH.format(":match"))
CORE_READ = select(*(emails.c[name] for name in ("id", "date", "subject", "from_address", "body", "file_name")))
CORE_PEOPLE = select(recipients.c.recipient_address, recipients.c.recipient_type).order_by(text("rowid"))


def compare(name: str, unit: float, core: Callable[[Any], object], cursor: Callable[[Any], object],
            work: Sequence[Any]) -> None:  # fmt: skip
    """Print the medians of both over all rounds but the first, and their ratio."""
    taken: tuple[list[float], list[float]] = ([], [])
    for number in range(ROUNDS + 1):
        for item in work:
            for way, seconds in zip((core, cursor), taken, strict=True):
                started = time.thread_time()
                way(item)
                if number:
                    seconds.append(time.thread_time() - started)
    by_core, by_cursor = (median(seconds) * unit for seconds in taken)
    print(f"{name:12} Core {by_core:9.1f}   driver {by_cursor:9.1f}   ratio {by_core / by_cursor:.2f}", flush=True)


def read_by_core(connection: Connection, message_id: str) -> object:
    """A mail and its people by statements built for the call, as Core is written."""
    mail = connection.execute(CORE_READ.where(emails.c.message_id == message_id)).one()
    return mail, connection.execute(CORE_PEOPLE.where(recipients.c.email_id == mail.id)).all()


def read_by_cursor(connection: Connection, message_id: str) -> object:
    """The same by the driver."""
    cursor = driver(connection)
    mail = cursor.execute(READ, (message_id,)).fetchone()
    return mail, cursor.execute(PEOPLE, (mail[0],)).fetchall()


def main(db: Path, questions: Path) -> None:
    """Print the table."""
    queries = store_queries.of_questions(questions, 300, random.Random(0))
    matches = [" ".join(f'"{word}"' for word in query.keywords) for query in queries]
    with connect(db) as connection:
        by_driver = driver(connection)
        ids = list(connection.scalars(select(emails.c.message_id).order_by(emails.c.id).limit(2000)))[::7]
        rows = [row[1:] for row in islice(by_driver.execute("SELECT * FROM emails"), ROWS)]
        search = SEARCH.format("?")
        compare("search, µs", 1e6, lambda match: connection.execute(CORE_SEARCH, {"match": match}).all(),
                lambda match: by_driver.execute(search, (match,)).fetchall(), matches)  # fmt: skip
        compare("read, µs", 1e6, lambda key: read_by_core(connection, key), lambda key: read_by_cursor(connection, key),
                ids)  # fmt: skip
    columns = emails.columns.keys()[1:]  # ids are given anew: the table grows, and no round waits for it to be emptied
    records = [dict(zip(columns, row, strict=True)) for row in rows]
    by_hand = f"INSERT INTO emails({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bulk.db"
        path.touch()
        with connect_for_loading(path) as connection:
            create_tables(connection)
            compare("insert, ms", 1e3, lambda _: connection.execute(insert(emails), records),
                    lambda _: driver(connection).executemany(by_hand, rows), [None])  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
