"""Which mailboxes of a database are asked about."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from emailrl.errors import UsageError
from emailrl.scenarios.inbox.mailbox import Mailbox, MailReader

MAX_INBOXES = 40
MIN_MAILS = 30
"""Mailboxes smaller than this are taken only when named."""


def choose_inboxes(reader: MailReader, named: Sequence[str]) -> list[str]:
    """The named mailboxes, or else the ``MAX_INBOXES`` largest, in the order of their addresses.

    Raises UsageError where none is named and none is large enough.
    """
    chosen = sorted({inbox.strip().lower() for inbox in named} or set(islice(reader.inboxes(MIN_MAILS), MAX_INBOXES)))
    if not chosen:
        raise UsageError(f"No address has {MIN_MAILS} mails, a third of them received.", "Name one with --inbox.")
    return chosen


def open_inbox(reader: MailReader, inbox: str) -> Mailbox:
    """The mailbox of an address; raises UsageError where the database holds no mail of it."""
    box = reader.open(inbox)
    if not box.mails:
        largest = ", ".join(islice(reader.inboxes(1), 3))
        raise UsageError(f"The database holds no mail of {inbox}.", f"Its largest mailboxes: {largest}.")
    return box
