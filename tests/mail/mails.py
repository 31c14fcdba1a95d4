"""Mails, files of them as programs write them, and what is read of them."""

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

from emailrl.mail.sources import RawEmail, open_source


def text(number: int, size: int = 10) -> bytes:
    return f"Message-ID: <{number}@x>\nFrom: ann@x.org\nTo: bob@x.org\nSubject: s{number}\n\n{'b' * size}".encode()


def names(source: Path, **options: Any) -> list[str]:
    """The ids of the mails, ``reason:name`` for what is skipped, in order."""
    return [
        email.message_id if isinstance(email, RawEmail) else f"{email.reason}:{email.file_name}"
        for email in open_source(source, **options)
    ]


def make_tar(members: dict[str, bytes], tar_format: int = tarfile.GNU_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tar_format) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def stored_emails(db: Path) -> Iterator[RawEmail]:
    """The emails of a database, oldest first."""
    with closing(sqlite3.connect(db)) as connection:
        columns = "id, message_id, subject, from_address, date, body, file_name"
        for key, message_id, subject, sender, date, *text in connection.execute(
            f"SELECT {columns} FROM emails ORDER BY id DESC"
        ):
            people: dict[str, list[str]] = {"to": [], "cc": [], "bcc": []}
            for address, kind in connection.execute(
                "SELECT recipient_address, recipient_type FROM recipients WHERE email_id = ? ORDER BY rowid", (key,)
            ):
                people[kind].append(address)
            sent = datetime.fromisoformat(date).replace(tzinfo=UTC) if date else None
            yield RawEmail(message_id, subject, sender, *people.values(), sent, *text)


def mail(number: int, body: str = "") -> bytes:
    return (
        f"Message-ID: <{number}@x>\nFrom: ann@x.org\nTo: bob@x.org\nSubject: s{number}\n\n{body or number}\n".encode()
    )


ENVELOPE = b"From ann@x.org Mon May 14 16:39:00 2001\n"


def mbox(*mails: bytes, envelope: bytes = ENVELOPE) -> bytes:
    return b"".join(envelope + one + b"\n" for one in mails)


def emails(path: Path, **options: Any) -> list[RawEmail]:
    found = list(open_source(path, **options))
    assert all(isinstance(email, RawEmail) for email in found), found
    return found  # type: ignore[return-value]


def row(number: int, **change: Any) -> dict[str, Any]:
    return {
        "message_id": f"<{number}@x>", "subject": f"s{number}", "from": "Ann Lee <Ann@x.org>", "to": ["BOB@x.org"],
        "cc": [],
        "bcc": None, "date": "2001-05-14T16:39:00-07:00", "body": f"b{number}", "file_name": f"a/{number}.",
    } | change  # fmt: skip


EXPECTED = RawEmail(
    "<1@x>", "s1", "ann@x.org", ["bob@x.org"], [], [], datetime(2001, 5, 14, 23, 39, tzinfo=UTC), "b1", "a/1."
)
"""What ``row(1)`` is read as."""


def lines(*rows: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in rows)


def write_parquet(path: Path, *rows: dict[str, Any], **options: Any) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    write_table(pyarrow.Table.from_pylist(list(rows)), path, **options)
