"""Chooses the mailboxes of a database to ask about."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Final

from sqlalchemy import func, select

from emailrl.errors import ToolError, UsageError
from emailrl.questions.inbox.mailbox import Inbox, MailReader
from emailrl.questions.inbox.owners import Owner, owners
from emailrl.store import open_mailbox
from emailrl.store.connection import opened
from emailrl.store.schema import emails

MAX_INBOXES = 40
MIN_MAILS = 30
"""Smaller mailboxes are used only if named."""
OWN_SHARE: Final = 0.9
"""An address that sent or received this share of all emails owns the archive."""
MAX_SEARCHED: Final = 5000
"""Number of the largest mailboxes searched for a similar address."""
NUM_LISTED: Final = 10


def choose_inboxes(reader: MailReader, named: Sequence[str]) -> list[str]:
    """Return the named mailboxes, or else the first ``MAX_INBOXES`` of ``owners``, ordered by address.

    Raises UsageError if none is named and none is large enough.
    """
    chosen = sorted(
        {inbox.strip().lower() for inbox in named}
        or {owner.address for owner in islice(owners(reader, MIN_MAILS), MAX_INBOXES)}
    )
    if not chosen:
        largest = ", ".join(owner.address for owner in largest_owners(reader))
        hint = f"Name one with --inbox; the largest: {largest}." if largest else "Name one with --inbox."
        raise UsageError(f"No address has {MIN_MAILS} emails with a third of them received.", hint)
    return chosen


def largest_owners(reader: MailReader, most: int = 3) -> list[Owner]:
    """Return the largest mailboxes with enough emails for questions, or else the largest of all."""
    return list(islice(owners(reader, MIN_MAILS), most)) or list(islice(owners(reader, 1), most))


def open_inbox(reader: MailReader, inbox: str) -> Inbox:
    """Return the mailbox of an address; raises UsageError if the database has none of its email."""
    box = reader.open(inbox)
    if not box.mails:
        largest = ", ".join(owner.address for owner in largest_owners(reader))
        raise UsageError(f"The database has no mailbox {inbox}.", f"Its largest mailboxes: {largest}.")
    return box


def find_inbox(db: Path, named: str | None) -> str:
    """Return the mailbox ``named`` in its stored form, or without a name the database's only one.

    A database holds one mailbox if it has one owner, or if exactly one of its owners sent or received ``OWN_SHARE`` of
    its emails. Raises UsageError, which lists the mailboxes, for an unknown address or if there are several.
    """
    if named is None:
        return _only_inbox(db)
    try:
        with open_mailbox(db, named) as mailbox:
            if mailbox.known:
                return mailbox.inbox
    except ToolError as error:
        raise UsageError(f"Invalid inbox {named!r}: {error.message}") from error
    raise unknown_inbox(db, named)


def unknown_inbox(db: Path, inbox: str) -> UsageError:
    """Return the error for an unknown address: it suggests the most similar one and the largest mailboxes."""
    with opened(db) as connection:
        found = list(islice(owners(MailReader(connection), 1), MAX_SEARCHED))
    near = get_close_matches(inbox.lower(), [owner.address for owner in found], n=1, cutoff=0.8)
    guess = f"Did you mean {near[0]}? " if near else ""
    largest = ", ".join(owner.address for owner in found[:3]) or "none"
    return UsageError(f"No email in {db} is from or to {inbox}.", f"{guess}Its largest mailboxes: {largest}.")


def _only_inbox(db: Path) -> str:
    with opened(db) as connection:
        total = connection.scalar(select(func.count()).select_from(emails)) or 0
        found = list(islice(owners(MailReader(connection), 1), NUM_LISTED + 1))
    own = found if len(found) == 1 else [owner for owner in found if owner.mails >= OWN_SHARE * total]
    if len(own) == 1:
        return own[0].address
    if not found:
        raise UsageError(f"The owner of {db} cannot be told.", "Name your address with --inbox.")
    more = ", …" if len(found) > NUM_LISTED else ""
    raise UsageError(f"{db} holds several mailboxes.", f"Choose one with --inbox: {listed(found[:NUM_LISTED])}{more}")


def listed(found: Iterable[Owner]) -> str:
    """Return mailboxes with their sizes, separated by commas."""
    return ", ".join(f"{owner.address} ({owner.mails:,} email{'s' * (owner.mails != 1)})" for owner in found)
