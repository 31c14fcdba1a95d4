"""Chooses mailboxes by their owners: people, as opposed to lists and machines with similar addresses.

A database keeps no List-Id, but owners write, and lists write to nobody but themselves. An owner whose archive holds
only received mail does not write either; a list differs by its name, its subjects' tag, and who answers in it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Select, exists, func, select

from emailrl.base.errors import ToolError, UsageError
from emailrl.mail import open_mailbox
from emailrl.mail.connection import opened
from emailrl.mail.schema import emails, recipients
from emailrl.questions.inbox.mailbox import Inbox, MailReader

MAX_INBOXES = 40
MIN_MAILS = 30  # Smaller mailboxes are used only if named.
OWN_SHARE = 0.9  # An address that sent or received this share of all emails owns the archive.
MAX_SEARCHED = 5000  # Number of the largest mailboxes searched for a similar address.
NUM_LISTED = 10

_LIST_NAME = re.compile(
    r"[-._](?:l|list|announce|dev|devel|discuss|users)@|@(?:lists?|listserv|mailman|groups|googlegroups|yahoogroups)\."
)
_TAG = re.compile(r"(?:\s*(?:re|aw|fwd?)\s*:)*\s*(\[[^\]]{1,40}\])", re.IGNORECASE)
_CMU_FOLDER = re.compile(r"(?:^|/)([a-z]+)-[a-z]\d?/.+/\d+\.$")
"""The owner's last name in a file name such as ``allen-p/inbox/1.``."""
_FEW = 3
_MOST_KEEPERS = 100  # Number of the largest silent owners to look at: one email can have ten thousand recipients.


class Owner(NamedTuple):
    """An address with a mailbox in the database."""

    address: str
    sent: int  # Number of emails written to others.
    mails: int  # Number of emails sent or received.


def choose_inboxes(reader: MailReader, named: Sequence[str]) -> list[str]:
    """Return the named mailboxes, or else the first ``MAX_INBOXES`` of ``owners``, ordered by address. Raises
    UsageError if none is named and none is large enough."""
    chosen = sorted(
        {inbox.strip().lower() for inbox in named}
        or {owner.address for owner in islice(owners(reader, MIN_MAILS), MAX_INBOXES)}
    )
    if not chosen:
        largest = ", ".join(owner.address for owner in largest_owners(reader))
        raise UsageError(
            f"No address has {MIN_MAILS} emails with a third of them received.",
            f"Name one with --inbox{f'; the largest: {largest}' if largest else ''}.",
        )
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
    """Return the mailbox ``named`` in its stored form, or without a name the database's only one: that of its only
    owner, or of the only one who sent or received ``OWN_SHARE`` of its emails. Raises UsageError, which lists the
    mailboxes, for an unknown address or if there are several."""
    if named is not None:
        try:
            with open_mailbox(db, named) as mailbox:
                if mailbox.known:
                    return mailbox.inbox
        except ToolError as error:
            raise UsageError(f"Invalid inbox {named!r}: {error.message}") from error
        raise unknown_inbox(db, named)
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


def unknown_inbox(db: Path, inbox: str) -> UsageError:
    """Return the error for an unknown address: it suggests the most similar one and the largest mailboxes."""
    with opened(db) as connection:
        found = [owner.address for owner in islice(owners(MailReader(connection), 1), MAX_SEARCHED)]
    near = get_close_matches(inbox.lower(), found, n=1, cutoff=0.8)
    guess = f"Did you mean {near[0]}? " if near else ""
    largest = ", ".join(found[:3]) or "none"
    return UsageError(f"No email in {db} is from or to {inbox}.", f"{guess}Its largest mailboxes: {largest}.")


def listed(found: Iterable[Owner]) -> str:
    return ", ".join(f"{owner.address} ({owner.mails:,} email{'s' * (owner.mails != 1)})" for owner in found)


def owners(reader: MailReader, min_mails: int) -> Iterator[Owner]:
    """Yield the owners of at least ``min_mails`` emails, a third of them received. First silent ones with the entire
    archive (not lists, preferably with several senders), then those who write, the largest mailbox first, then those in
    CMU's tree."""
    found = [Owner(*row) for row in reader.connection.execute(_addresses(max(1, min_mails // 3), min_mails))]
    least = max(1, min_mails // 10)
    writers = [owner for owner in found if owner.sent >= least]
    silent = [owner for owner in found if owner.sent < least]
    # The silent ones that hold nearly all mail of the largest writer, if there is one.
    whole = silent[:_MOST_KEEPERS]
    if writers and (whole := [owner for owner in whole if owner.mails > writers[0].mails]):
        wanted = reader.ids(writers[0].address)
        whole = [owner for owner in whole if len(wanted - reader.ids(owner.address)) <= len(wanted) // 10]
    boxes = [(owner, reader.open(owner.address)) for owner in whole]
    keepers = [(owner, len({mail.sender for mail in box.mails} - {box.me})) for owner, box in boxes if not is_list(box)]
    first = [owner for owner, _ in sorted(keepers, key=lambda pair: pair[1] < 2)]
    yield from (*first, *writers)
    yield from (owner for owner in silent if owner not in first and _has_folder(reader, owner.address))


def _addresses(min_received: int, min_mails: int) -> Select[str, int, int]:
    """Select every address with its number of emails written to others and of all its emails, the largest first."""
    sender, receiver = emails.c.from_address, recipients.c.recipient_address
    to_self = exists().where(recipients.c.email_id == emails.c.id, receiver == sender)
    wrote = select(sender, func.count().label("number")).where(~to_self).group_by(sender).cte("wrote")
    different = func.count(recipients.c.email_id.distinct()).label("number")
    got = select(receiver.label("address"), different).group_by(receiver).cte("got")
    sent = func.coalesce(wrote.c.number, 0)
    mails = got.c.number + sent
    return (
        select(got.c.address, sent, mails)
        .outerjoin_from(got, wrote, got.c.address == wrote.c.from_address)
        .where(got.c.address.like("%_@_%"), got.c.number >= min_received, mails >= min_mails)
        .order_by(mails.desc(), got.c.address)
    )


def is_list(box: Inbox) -> bool:
    """Whether an address that writes to nobody is a mailing list: by its name, by a tag in its subjects, or by answers.
    Those come mostly from people to whom no email of the thread was addressed. Threads without their first email, which
    may have been addressed to everyone, are ignored."""
    tags = Counter(found[1] for mail in box.mails if (found := _TAG.match(mail.subject)))
    if _LIST_NAME.search(box.me) or max(tags.values(), default=0) > max(_FEW, 0.8 * len(box.mails)):
        return True
    named: dict[str, set[str]] = {}
    spoke: dict[str, set[str]] = {}
    joined = Counter[bool]()
    for mail in box.mails:
        key = mail.topic.key
        if key in named:
            if mail.sender not in spoke[key]:
                joined[mail.sender in named[key]] += 1
        elif not key or mail.topic.is_reply:
            continue
        spoke.setdefault(key, set()).add(mail.sender)
        named.setdefault(key, set()).update(mail.addresses)
    return joined[False] >= max(_FEW, len(named) // 10) and joined[False] > joined[True]


def _has_folder(reader: MailReader, address: str) -> bool:
    """Whether at least a third of its emails are in a folder of CMU's tree with its name. Copies are stored once."""
    files = select(emails.c.file_name).join(recipients).where(recipients.c.recipient_address == address)
    folders = [_CMU_FOLDER.search(name) for name in reader.connection.scalars(files)]
    return 3 * sum(bool(folder and folder[1] in address.partition("@")[0]) for folder in folders) >= len(folders)
