"""ART-E's way to a mail database and its search query, as its repository has them (2025-06), to measure against.

Messages are parsed by ``mail-parser`` one after the other; rows go in one by one, the full-text index is filled after.
"""

from __future__ import annotations

import sqlite3
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from emailrl.mail.sources import RawEmail

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


def parse_archive(path: Path, failures: list[str], limit: int | None = None) -> Iterator[RawEmail]:
    """The mails of an archive by ``tarfile`` and ``mail-parser``; names of those it cannot read go to ``failures``."""
    import mailparser

    with tarfile.open(path, "r|*") as archive:
        for number, member in enumerate(archive):
            if number == limit:
                return
            file = archive.extractfile(member)
            if file is None:
                continue
            try:
                mail = mailparser.parse_from_string(file.read().decode())
                people = [[address for _, address in getattr(mail, kind)] for kind in ("to", "cc", "bcc")]
                sender = mail.from_[0][1] if mail.from_ else ""
                message_id, subject, date, body = mail.message_id, mail.subject, mail.date, mail.body
            except Exception:  # as its converter does: whatever goes wrong, the mail is left out
                failures.append(member.name)
                continue
            yield RawEmail(message_id, subject, sender, people[0], people[1], people[2], date, body, member.name)


def load(emails: Iterable[RawEmail], db: Path) -> int:
    """Fill a database in ART-E's way; the number of mails stored."""
    connection = sqlite3.connect(db)
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("PRAGMA journal_mode = MEMORY")
    connection.executescript(SCHEMA)
    connection.execute("BEGIN")
    seen: set[tuple[str, str, str]] = set()
    for email in emails:
        people = (("to", email.to), ("cc", email.cc), ("bcc", email.bcc))
        if len(email.body) > 5000 or sum(len(addresses) for _, addresses in people) > 30:
            continue
        key = (email.subject, email.body, email.from_address)
        if key in seen:
            continue
        seen.add(key)
        date = email.date.strftime("%Y-%m-%d %H:%M:%S") if email.date else None
        cursor = connection.execute(
            "INSERT INTO emails (message_id, subject, from_address, date, body, file_name) VALUES (?, ?, ?, ?, ?, ?)",
            (email.message_id, email.subject, email.from_address, date, email.body, email.file_name),
        )
        rows = [(cursor.lastrowid, address, kind) for kind, addresses in people for address in addresses]
        connection.executemany("INSERT INTO recipients VALUES (?, ?, ?)", rows)
    connection.execute("INSERT INTO emails_fts (rowid, subject, body) SELECT id, subject, body FROM emails")
    connection.commit()
    connection.close()
    return len(seen)


def search(
    connection: sqlite3.Connection,
    inbox: str,
    keywords: list[str],
    sent_after: str | None = None,
    sent_before: str | None = None,
    max_results: int = 10,
) -> list[tuple[str, str, str]]:
    """(message id, date, snippet) of the hits of ART-E's query."""
    where = [
        "fts.emails_fts MATCH ?",
        "(e.from_address = ? OR EXISTS (SELECT 1 FROM recipients r_inbox "
        "WHERE r_inbox.recipient_address = ? AND r_inbox.email_id = e.id))",
    ]
    parameters: list[object] = [" ".join('"' + keyword.replace('"', '""') + '"' for keyword in keywords), inbox, inbox]
    for condition, day in (("e.date >= ?", sent_after), ("e.date < ?", sent_before)):
        if day:
            where.append(condition)
            parameters.append(f"{day} 00:00:00")
    return connection.execute(
        "SELECT e.message_id, e.date, snippet(emails_fts, -1, '<b>', '</b>', ' ... ', 15) "
        "FROM emails e JOIN emails_fts fts ON e.id = fts.rowid "
        f"WHERE {' AND '.join(where)} ORDER BY e.date DESC LIMIT ?",
        (*parameters, max_results),
    ).fetchall()
