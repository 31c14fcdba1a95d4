"""Whose mailboxes a database holds: people, told from the lists and machines that are addressed like people.

A database keeps no List-Id. It shows, though, who writes: the owner of an archive does, and a list does not (where a
list puts its own address in place of the sender's, what it sends goes to itself). An archive of received mail alone has
an owner who does not write either: all mail there is his, that of those who write too. Such an owner is told from a
list by its name, by the tag in its subjects, and by answers from people whom nothing in the thread had reached but by
way of the list.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from sqlalchemy import Select, bindparam, exists, func, select

from emailrl.scenarios.inbox.mailbox import Inbox, MailReader
from emailrl.store.schema import emails, recipients

_LIST_NAME = re.compile(
    r"[-._](?:l|list|announce|dev|devel|discuss|users)@|@(?:lists?|listserv|mailman|groups|googlegroups|yahoogroups)\."
)
_TAG = re.compile(r"(?:\s*(?:re|aw|fwd?)\s*:)*\s*(\[[^\]]{1,40}\])", re.IGNORECASE)
_CMU_FOLDER = re.compile(r"(?:^|/)([a-z]+)-[a-z]\d?/.+/\d+\.$")
"""``allen-p/inbox/1.``: the last name of whose mail it is."""
_FEW = 3
_FILES = select(emails.c.file_name).join(recipients).where(recipients.c.recipient_address == bindparam("address"))


class Owner(NamedTuple):
    """An address that has a mailbox in the database."""

    address: str
    sent: int
    """Mails written to others."""
    mails: int
    """Mails sent or received."""


def owners(reader: MailReader, min_mails: int) -> Iterator[Owner]:
    """The owners of ``min_mails`` mails or more, a third of them received: those who write too, the largest mailbox
    first, then those who have a folder of CMU's Enron tree.

    Before them all comes who received the whole archive and writes nothing: no list, and rather one who hears from
    several people.
    """
    found = [Owner(*row) for row in reader.connection.execute(_addresses(max(1, min_mails // 3), min_mails))]
    least = max(1, min_mails // 10)
    writers = [owner for owner in found if owner.sent >= least]
    silent = [owner for owner in found if owner.sent < least]
    keepers = _keepers(reader, silent, writers)
    yield from keepers
    yield from writers
    yield from (owner for owner in silent if owner not in keepers and _has_folder(reader, owner.address))


def _addresses(min_received: int, min_mails: int) -> Select[str, int, int]:
    """Every address with the number of mails it wrote to others, and of all its mails; the largest first."""
    to_self = exists().where(
        recipients.c.email_id == emails.c.id, recipients.c.recipient_address == emails.c.from_address
    )
    wrote = (
        select(emails.c.from_address.label("address"), func.count().label("number"))
        .where(~to_self)
        .group_by(emails.c.from_address)
        .cte("wrote")
    )
    got = (
        select(
            recipients.c.recipient_address.label("address"),
            func.count(recipients.c.email_id.distinct()).label("number"),
        )
        .group_by(recipients.c.recipient_address)
        .cte("got")
    )
    sent = func.coalesce(wrote.c.number, 0)
    mails = got.c.number + sent
    return (
        select(got.c.address, sent, mails)
        .outerjoin_from(got, wrote, got.c.address == wrote.c.address)
        .where(got.c.address.like("%_@_%"), got.c.number >= min_received, mails >= min_mails)
        .order_by(mails.desc(), got.c.address)
    )


def _keepers(reader: MailReader, silent: list[Owner], writers: list[Owner]) -> list[Owner]:
    """Those of the silent who hold nearly all mail of the largest writer, if there is one, and are no lists."""
    if writers:
        silent = [owner for owner in silent if owner.mails > writers[0].mails]
        wanted = reader.ids(writers[0].address) if silent else set()
        silent = [owner for owner in silent if len(wanted - reader.ids(owner.address)) <= len(wanted) // 10]
    boxes = [(owner, reader.open(owner.address)) for owner in silent]
    keepers = [(owner, len({mail.sender for mail in box.mails} - {box.me})) for owner, box in boxes if not is_list(box)]
    return [owner for owner, senders in sorted(keepers, key=lambda pair: pair[1] < 2)]


def is_list(box: Inbox) -> bool:
    """Whether an address that writes to nobody passes its mail on to many."""
    tags = Counter(found[1] for mail in box.mails if (found := _TAG.match(mail.subject)))
    is_tagged = bool(tags) and tags.most_common(1)[0][1] > max(_FEW, 0.8 * len(box.mails))
    return bool(_LIST_NAME.search(box.me)) or is_tagged or _is_answered_by_strangers(box)


def _is_answered_by_strangers(box: Inbox) -> bool:
    """Whether those who join a thread are mostly people to whom none of its mails was addressed, and are not rare.

    Threads whose first mail is missing are passed over: it may have named everyone.
    """
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
    """Whether a third of its mails or more lie in a folder of CMU's tree that bears its name; copies of a mail are
    stored once, and so may lie in another's."""
    local = address.partition("@")[0]
    own = mails = 0
    for name in reader.connection.scalars(_FILES, {"address": address}):
        folder = _CMU_FOLDER.search(name)
        own += folder is not None and folder[1] in local
        mails += 1
    return 3 * own >= mails
