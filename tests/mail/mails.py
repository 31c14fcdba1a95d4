"""Mails, files of them as programs write them, what is read of them, and what is found in a database."""

from __future__ import annotations

import io
import json
import sqlite3
import tarfile
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from emailrl.mail import open_mailbox
from emailrl.mail.mailbox import Order
from emailrl.mail.sources import RawEmail, open_source

TABLES = json.loads((Path(__file__).parent / "cases" / "tables.json").read_text(encoding="utf-8"))
"""Cases of tests, by the name of the test."""
ENVELOPE = b"From ann@x.org Mon May 14 16:39:00 2001\n"
EXPECTED = RawEmail(
    "<1@x>",
    "s1",
    "ann@x.org",
    ["bob@x.org"],
    [],
    [],
    datetime(2001, 5, 14, 23, 39, tzinfo=UTC),
    "b1",
    "a/1.",
    names={"ann@x.org": "Ann Lee"},
)
"""What ``row(1)`` is read as."""


def mail(number: int, body: str = "") -> bytes:
    return text(number, 0) + f"{body or number}\n".encode()


def text(number: int, size: int = 10) -> bytes:
    return f"Message-ID: <{number}@x>\nFrom: ann@x.org\nTo: bob@x.org\nSubject: s{number}\n\n{'b' * size}".encode()


def mbox(*mails: bytes, envelope: bytes = ENVELOPE) -> bytes:
    return b"".join(envelope + one + b"\n" for one in mails)


def make_tar(members: dict[str, bytes], tar_format: int = tarfile.GNU_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tar_format) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def row(number: int, **change: Any) -> dict[str, Any]:
    return {
        "message_id": f"<{number}@x>", "subject": f"s{number}", "from": "Ann Lee <Ann@x.org>", "to": ["BOB@x.org"],
        "cc": [], "bcc": None, "date": "2001-05-14T16:39:00-07:00", "body": f"b{number}", "file_name": f"a/{number}.",
    } | change  # fmt: skip


def lines(*rows: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in rows)


def write_parquet(path: Path, *rows: dict[str, Any], **options: Any) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    write_table(pyarrow.Table.from_pylist(list(rows)), path, **options)


def names(source: Path, **options: Any) -> list[str]:
    """The ids of the mails, ``reason:name`` for what is skipped, in order."""
    return [
        email.message_id if isinstance(email, RawEmail) else f"{email.reason}:{email.file_name}"
        for email in open_source(source, **options)
    ]


def emails(path: Path, **options: Any) -> list[RawEmail]:
    found = list(open_source(path, **options))
    assert all(isinstance(email, RawEmail) for email in found), found
    return found  # type: ignore[return-value]


def rows(db: Path, sql: str, *values: object) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(db)) as connection, connection:
        return connection.execute(sql, values).fetchall()


def stored_emails(db: Path) -> Iterator[RawEmail]:
    """The emails of a database, oldest first."""
    people = "SELECT recipient_address FROM recipients WHERE email_id = ? AND recipient_type = ? ORDER BY rowid"
    query = "SELECT id, message_id, subject, from_address, date, body, file_name FROM emails ORDER BY id DESC"
    for key, message_id, subject, sender, date, *rest in rows(db, query):
        received = ([address for (address,) in rows(db, people, key, kind)] for kind in ("to", "cc", "bcc"))
        sent = datetime.fromisoformat(date).replace(tzinfo=UTC) if date else None
        yield RawEmail(message_id, subject, sender, *received, sent, *rest)


def found(
    db: Path, inbox: str, *keywords: str, until: str | None = None, order: Order = "newest", **filters: Any
) -> list[str]:
    """The ids of the mails that a search finds."""
    return [hit.message_id for hit in open_mailbox(db, inbox, until, order).search(list(keywords), **filters)]


def only(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
