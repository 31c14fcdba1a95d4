"""The database schema: tables, indexes, full-text index and the triggers that keep it consistent.

As in ART-E: ``emails``, ``recipients`` and the external-content table ``emails_fts``. ``emails.id`` counts from the
newest email, so that newest first is a forward scan of row ids; a manual write that breaks this order is recorded in
``meta``, and searches then sort. ``addresses`` numbers every address.

``emails.parties``, also indexed, has one word per sender and recipient: a private-use character, which FTS5's tokenizer
keeps (category Co), and the address's number. A search includes the inbox's word in its MATCH, so that the index itself
intersects keywords with the inbox. No word of an email can be equal, since ``clean_text`` removes the character.
"""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import Column, Executable, ForeignKey, Index, Integer, MetaData, Table, Text, column, table, text
from sqlalchemy.schema import CreateIndex, CreateTable

PARTY = "\ue000"  # the first character of every party word
SNIPPET_WORDS = 15  # length of a search hit's snippet, as in ART-E

# FTS5 shows the stretch of words that holds most phrases of the query, of several equal ones the first, and prefers one
# that begins a column, if the column is longer than a snippet. The inbox's word is a single phrase and stands in the
# last column, so it would be shown in place of a keyword in that one case: near the beginning of a long column.
FILLER = f"{PARTY} " * SNIPPET_WORDS
"""Precedes more than ``SNIPPET_WORDS`` party words, so that none is near the beginning."""

metadata = MetaData()

emails = Table(
    "emails",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("message_id", Text, nullable=False),
    *(Column(name, Text) for name in ("subject", "from_address", "date", "body", "file_name")),
    Column("parties", Text, nullable=False, server_default=""),
    Index("idx_emails_message_id", "message_id", unique=True),
    Index("idx_emails_from", "from_address"),
    Index("idx_emails_date", "date"),
)

recipients = Table(
    "recipients",
    metadata,
    Column("email_id", Integer, ForeignKey("emails.id", ondelete="CASCADE"), nullable=False),
    Column("recipient_address", Text, nullable=False),
    Column("recipient_type", Text, nullable=False),
    Index("idx_recipients_email", "email_id"),
    Index("idx_recipients_address_email", "recipient_address", "email_id"),
)

addresses = Table(
    "addresses",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("address", Text, nullable=False),
    Index("idx_addresses_address", "address", unique=True),
)

meta = Table("meta", metadata, Column("key", Text, primary_key=True), Column("value", Text, nullable=False))

sqlite_master = table("sqlite_master", column("type"), column("name"))  # SQLite's own list of tables

TABLES: list[Executable] = [
    *map(CreateTable, metadata.sorted_tables),
    text("CREATE VIRTUAL TABLE emails_fts USING fts5(subject, body, parties, content='emails', content_rowid='id')"),
]
INDEXES = [
    CreateIndex(each) for table in metadata.sorted_tables for each in sorted(table.indexes, key=lambda i: str(i.name))
]
"""Created after a bulk load, which is faster."""
_INDEX_NEW = (
    "INSERT INTO emails_fts(rowid, subject, body, parties) VALUES (new.id, new.subject, new.body, new.parties);"
)
_UNINDEX_OLD = (
    "INSERT INTO emails_fts(emails_fts, rowid, subject, body, parties) "
    "VALUES ('delete', old.id, old.subject, old.body, old.parties);"
)


def _renew_parties(email_id: str, address: str) -> str:
    """SQL that numbers an address and rewrites an email's party words."""
    return f"""
        INSERT OR IGNORE INTO addresses(address) SELECT {address} WHERE {address} <> '';
        UPDATE emails SET parties = (
            SELECT iif(count(*) > {SNIPPET_WORDS}, '{FILLER}', '') || coalesce(group_concat('{PARTY}' || id, ' '), '')
            FROM addresses WHERE address = from_address
            OR address IN (SELECT recipient_address FROM recipients WHERE email_id = emails.id)
        ) WHERE id = {email_id};"""


_NOTE_DISORDER = """
    DELETE FROM meta WHERE key = 'ids_follow_dates' AND (
        coalesce(new.date, '') > (SELECT coalesce(date, '') FROM emails WHERE id < new.id ORDER BY id DESC LIMIT 1) OR
        coalesce(new.date, '') < (SELECT coalesce(date, '') FROM emails WHERE id > new.id ORDER BY id LIMIT 1));"""

TRIGGERS = {
    "emails_ai AFTER INSERT ON emails": _INDEX_NEW + _renew_parties("new.id", "new.from_address") + _NOTE_DISORDER,
    "emails_ad AFTER DELETE ON emails": _UNINDEX_OLD,
    "emails_au AFTER UPDATE OF id, subject, body, parties ON emails": _UNINDEX_OLD + _INDEX_NEW,
    "emails_sender AFTER UPDATE OF from_address ON emails": _renew_parties("new.id", "new.from_address"),
    "emails_order AFTER UPDATE OF id, date ON emails": _NOTE_DISORDER,
    "recipients_ai AFTER INSERT ON recipients": _renew_parties("new.email_id", "new.recipient_address"),
    "recipients_ad AFTER DELETE ON recipients": _renew_parties("old.email_id", "NULL"),
    "recipients_au AFTER UPDATE ON recipients": _renew_parties("old.email_id", "NULL")
    + _renew_parties("new.email_id", "new.recipient_address"),
}


"""Keep the tables consistent row by row; a bulk load comes before them."""


def party_word(address_id: int) -> str:
    """Return the party word of an address."""
    return f"{PARTY}{address_id}"


def parties_text(address_ids: Iterable[int]) -> str:
    """Return the ``parties`` column of an email between these addresses, without repeats."""
    words = dict.fromkeys(map(party_word, address_ids))
    return (FILLER if len(words) > SNIPPET_WORDS else "") + " ".join(words)


def clean_text(text: str) -> str:
    """Return text that can be stored, without NUL (which ends a text in SQLite), ``PARTY`` and lone surrogates."""
    if text.isascii() and "\0" not in text:
        return text
    return text.translate({ord(PARTY): "\ufffd", 0: None}).encode("utf-8", "replace").decode("utf-8")
