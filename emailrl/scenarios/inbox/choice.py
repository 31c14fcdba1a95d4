"""Which mailboxes of a database are asked about."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from emailrl.errors import UsageError
from emailrl.scenarios.inbox.mailbox import Inbox, MailReader
from emailrl.scenarios.inbox.owners import Owner, owners

MAX_INBOXES = 40
MIN_MAILS = 30
"""Mailboxes smaller than this are taken only when named."""


def choose_inboxes(reader: MailReader, named: Sequence[str]) -> list[str]:
    """The named mailboxes, or else the first ``MAX_INBOXES`` of ``owners``, in the order of their addresses.

    Raises UsageError where none is named and none is large enough.
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
    """The largest mailboxes that are large enough to be asked about, or else the largest of all."""
    return list(islice(owners(reader, MIN_MAILS), most)) or list(islice(owners(reader, 1), most))


def open_inbox(reader: MailReader, inbox: str) -> Inbox:
    """The mailbox of an address; raises UsageError where the database holds no mail of it."""
    box = reader.open(inbox)
    if not box.mails:
        largest = ", ".join(owner.address for owner in largest_owners(reader))
        raise UsageError(f"The database has no mailbox {inbox}.", f"Its largest mailboxes: {largest}.")
    return box
