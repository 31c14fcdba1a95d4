"""One mailbox in memory as its owner sees it, with the lookups that the proofs of questions need; and the owners.

Owners are people, as opposed to lists and machines with similar addresses. A database keeps no List-Id, but owners
write, and lists write to nobody but themselves. An owner whose archive holds only received mail does not write either;
a list differs by its name, its subjects' tag, and who answers in it.
"""

from __future__ import annotations

import re
import sqlite3
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from difflib import get_close_matches
from functools import cached_property
from itertools import islice
from pathlib import Path
from random import Random
from typing import NamedTuple

from sqlalchemy import Connection, Select, exists, func, select, text

from emailrl.base.errors import ToolError, UsageError
from emailrl.facts.mentions import Extractor, Mention
from emailrl.facts.reading import name_of
from emailrl.mail import open_mailbox
from emailrl.mail.database import emails, names_of, opened, recipients

_PREFIX = re.compile(r"^(?:\s*(?:re|fw|fwd|aw|wg|tr|sv|antw)\s*(?:\[\d+\]|\(\d+\))?\s*:\s*)+", re.IGNORECASE)
_REPLY = re.compile(r"^\s*(?:re|aw|sv|antw)\s*(?:\[\d+\]|\(\d+\))?\s*:", re.IGNORECASE)
_FORWARD = re.compile(r"^\s*(?:fw|fwd|wg|tr)\s*:", re.IGNORECASE)
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")
_STOP = """a about all am an and any are as at be been but by can do for from had has have hello here hi how i if in
    info is it its just me more my new no not note of off on or our out please question questions re fw fwd so some
    thanks thank that the their them there this to up us was we were what when where who will with would you your"""
_STOP_WORDS = frozenset(_STOP.split())
_QUOTE_BEGINS = re.compile(
    r"""^[ \t]*(?:
        -{2,}\s*original\ message          # Outlook
      | -{4,}\s*forwarded                  # Lotus Notes
      | -{4,}\s*$ (?=\s*from:)
      | >                                  # quoted line
      | (?:from|to|sent|cc|subject):[ \t]  # headers of a quoted mail
      | .{6,100}\b(?:wrote|writes):\s*$
      | .{0,80}\d{1,2}/\d{1,2}/\d{2,4}\ \d{1,2}:\d{2}(?::\d{2})?(?:\ ?[ap]m)?\s*$   # Lotus Notes: who wrote it when
      | (?:please\ )?respond\ to\ \S+@
    )""",
    re.IGNORECASE | re.MULTILINE | re.VERBOSE,
)
_PERSON = re.compile(r"[^\W\d_]+(?:['’.-]{0,2}[ -]?[^\W\d_]+){1,5}\.?")  # Jürgen Müller, J. R. O'Brien-Lee
MAX_TOPIC_CHARS = 70


@dataclass(frozen=True)
class Topic:
    """A subject without its prefixes."""

    text: str
    words: frozenset[str]  # Its content words in lower case.
    key: str  # The same for every email of a thread.
    is_reply: bool
    is_forward: bool

    @cached_property
    def is_telling(self) -> bool:
        """Whether the text could identify an email to a person: two content words, one of them a real word."""
        return (
            len(self.words) >= 2
            and len(self.text) <= MAX_TOPIC_CHARS
            and any(len(word) >= 4 and word.isalpha() for word in self.words)
            and self.text.isprintable()
            and not any(mark in self.text for mark in ('"', "=?", "<", ">", "{", "}", "|"))
        )


def topic_of(subject: str | None) -> Topic:
    """Return the topic of a subject line; a missing subject has no words."""
    raw = subject or ""
    text = " ".join(_PREFIX.sub("", raw).split()).strip(" -:;,.!?*#'")
    words = frozenset(
        word for word in (match.lower() for match in _WORD.findall(text)) if len(word) > 1 and word not in _STOP_WORDS
    )
    return Topic(text, words, text.lower(), bool(_REPLY.match(raw)), bool(_FORWARD.match(raw)))


def own_text(body: str) -> str:
    """Return the text above the first quoted or forwarded part."""
    return _QUOTE_BEGINS.split(body, maxsplit=1)[0]


def spell_day(day: date) -> str:
    """Return a date as ``May 3, 2001``."""
    return f"{day:%B} {day.day}, {day.year}"


@dataclass(eq=False)
class Mail:
    """One email; derived parts are computed once, even if several mailboxes hold it."""

    message_id: str
    subject: str
    sender: str
    sent_at: str  # ``YYYY-MM-DD HH:MM:SS`` UTC.
    body: str
    to: list[str]
    cc: list[str]
    bcc: list[str]
    machine: str = ""  # The kind of program that sent it; empty for a person.
    names: dict[str, str] = field(default_factory=dict)  # Display names by address, if the reader reads them.
    facts: dict[Extractor, Mention | None] = field(default_factory=dict, init=False)  # Those looked for so far.

    @cached_property
    def day(self) -> date:
        return date.fromisoformat(self.sent_at[:10])

    @property
    def thread_key(self) -> str:
        return self.topic.key or self.message_id

    @property
    def addresses(self) -> set[str]:
        return {self.sender, *self.to, *self.cc, *self.bcc}

    @cached_property
    def topic(self) -> Topic:
        return topic_of(self.subject)

    @cached_property
    def own(self) -> str:
        """The body without what it quotes."""
        return own_text(self.body)

    def only_fact(self, extractor: Extractor) -> Mention | None:
        """Return the only fact of a kind in the body if the email itself states it, else None."""
        if extractor not in self.facts:
            self.facts[extractor] = extractor.only(self.own, self.body)
        return self.facts[extractor]


MAX_DAYS_LATER = 30  # Maximum days between a source email and its question; the minimum is 1 (as in ART-E).
MIN_SERIES = 5  # Number of emails of one pattern that make a series.
_MOST_IN_THREAD = 1000  # Longer threads are asked nothing: time would grow with the square of their length.
_FIELDS = ("to", "cc", "bcc")
_READ_MAILS = 500  # Emails read per SQL statement.


class Inbox:
    """The emails of one inbox, oldest first, and the people in them."""

    def __init__(self, me: str, mails: Iterable[Mail]) -> None:
        self.me = me
        self.mails: Sequence[Mail] = sorted(mails, key=lambda mail: (mail.sent_at, mail.message_id))
        self._word_places, self._topic_places = dict[str, frozenset[int]](), dict[frozenset[str], list[int]]()

    def called(self, address: str) -> str:
        """Return the name of the person behind an address, or the address itself if namesakes use other domains."""
        if (name := name_of(address)) is None or len({one.partition("@")[2] for one in self._by_name[name]}) > 1:
            name = address
        return self._written.get(address, name)

    def is_me(self, address: str) -> bool:
        """Whether an address is, or by its last name may be, the owner's own."""
        last = re.split(r"[._]+", self.me.partition("@")[0])[-1]
        return address == self.me or (len(last) >= 4 and last in address.partition("@")[0])

    def received(self, mail: Mail) -> bool:
        """Whether the owner received the email from somebody else."""
        return mail.sender != self.me and not self.is_me(mail.sender)

    def before(self, day: date) -> int:
        """Return the number of emails dated before a day: ``mails[:before(day)]`` are visible on it."""
        return bisect_left(self.mails, day.isoformat(), key=lambda mail: mail.sent_at)

    def on_day(self, day: date) -> Sequence[Mail]:
        """Return the emails of one day (UTC)."""
        return self.mails[self.before(day) : self.before(day + timedelta(days=1))]

    def matching(self, topic: Topic, until: date) -> Iterator[Mail]:
        """Yield the emails before ``until`` whose subject has every word of a topic, alone or within a longer word. A
        phone interview therefore also matches a telephone interview, and a meeting meetings."""
        if (places := self._topic_places.get(topic.words)) is None:
            first, *others = sorted(map(self._with_word, topic.words), key=len) or [frozenset[int]()]
            places = self._topic_places[topic.words] = sorted(first.intersection(*others))
        return map(self.mails.__getitem__, islice(places, bisect_left(places, self.before(until))))

    def is_told_by_topic(self, mail: Mail, until: date, *, with_sender: bool) -> bool:
        """Whether an email is the only one before ``until`` that its topic (and its sender) can mean."""
        if not mail.topic.is_telling:
            return False
        rivals = (other.sender for other in self.matching(mail.topic, until) if other is not mail)
        return all(
            with_sender and rival != mail.sender and not self.unmistakable.isdisjoint((rival, mail.sender))
            for rival in rivals
        )

    def thread(self, mail: Mail, until: date) -> list[Mail]:
        """Return the emails before ``until`` with its subject, oldest first; none if they are too many, or others share
        its words."""
        found = [*islice(self.matching(mail.topic, until), _MOST_IN_THREAD + 1)]
        is_known = len(found) <= _MOST_IN_THREAD and all(other.topic.key == mail.topic.key for other in found)
        return found if is_known else []

    def is_serial(self, mail: Mail) -> bool:
        """Whether its sender sends a series: ``MIN_SERIES`` or more emails whose topics differ only in digits."""
        key = _serial_key(mail)
        return "#" in key[1] and self._series[key] >= MIN_SERIES

    def ask_day(self, mail: Mail, rng: Random) -> date:
        """Return a random day on which to ask a question about the email."""
        return mail.day + timedelta(days=rng.randint(1, MAX_DAYS_LATER))

    def _with_word(self, word: str) -> frozenset[int]:
        """The positions of the emails whose topic contains a word, alone or within another (without its plural s)."""
        if word not in self._word_places:
            stem = word[:-1] if len(word) > 4 and word.endswith("s") else word
            pattern = rf"^.*{re.escape(stem)}.*$" if len(stem) > 3 else rf"^{re.escape(word)}$"
            places = (self._postings[found] for found in re.findall(pattern, self._vocabulary, re.MULTILINE))
            self._word_places[word] = frozenset().union(*places)
        return self._word_places[word]

    @cached_property
    def _addresses(self) -> frozenset[str]:
        return frozenset(address for mail in self.mails for address in mail.addresses)

    @cached_property
    def _written(self) -> dict[str, str]:
        """The name that most emails give each address, as one would say it, if it looks like a person's and no other
        address has it."""
        counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for mail in self.mails:
            for address, name in mail.names.items():
                last, comma, first = name.partition(", ")
                counts[address][f"{first} {last}" if comma else name] += 1
        most = {address: max(sorted(names), key=names.__getitem__) for address, names in counts.items()}
        carriers = Counter(most.values())
        return {a: name for a, name in most.items() if carriers[name] == 1 and _PERSON.fullmatch(name)}

    @cached_property
    def _by_name(self) -> dict[str, set[str]]:
        named: defaultdict[str, set[str]] = defaultdict(set)
        for address in self._addresses:
            if (name := name_of(address)) is not None:
                named[name].add(address)
        return named

    @cached_property
    def unmistakable(self) -> frozenset[str]:
        """The addresses of people of whom the mailbox can have no other address."""
        carriers: defaultdict[str, set[str]] = defaultdict(set)
        last_names = {name.split()[-1].lower() for name in self._by_name}
        for address in self._addresses:
            for word in re.sub(r"[^a-z-]", " ", address.partition("@")[0]).split():
                for start in range(min(3, len(word))):  # farmer, dfarmer, djfarmer
                    if word[start:] in last_names:
                        carriers[word[start:]].add(address)
        return frozenset(
            next(iter(addresses))
            for name, addresses in self._by_name.items()
            if len(addresses) == 1 and len(carriers[name.split()[-1].lower()]) == 1
        )

    @cached_property
    def by_sender(self) -> defaultdict[str, list[Mail]]:
        found: defaultdict[str, list[Mail]] = defaultdict(list)
        for mail in self.mails:
            found[mail.sender].append(mail)
        return found

    @cached_property
    def _series(self) -> Counter[tuple[str, str]]:
        return Counter(map(_serial_key, self.mails))

    @cached_property
    def _vocabulary(self) -> str:
        return "\n".join(self._postings)

    @cached_property
    def _postings(self) -> dict[str, list[int]]:
        postings: defaultdict[str, list[int]] = defaultdict(list)
        for at, mail in enumerate(self.mails):
            for word in mail.topic.words:
                postings[word].append(at)
        return postings


def _serial_key(mail: Mail) -> tuple[str, str]:
    return mail.sender, re.sub(r"\d+", "#", mail.topic.key)


class MailReader:
    """Reads mailboxes from a database; an email in several mailboxes is one object."""

    def __init__(self, connection: Connection, *, names: bool = False) -> None:
        """``names``: people are called as emails write them (``SHOW_NAMES``), else by their addresses."""
        self.connection, self.names = connection, names
        self._mails: dict[int, Mail] = {}

    def open(self, inbox: str) -> Inbox:
        """Return everything sent or received by an address, except emails without a date or of a year that is wrong."""
        ids = sorted(self.ids(inbox))
        unread = [email_id for email_id in ids if email_id not in self._mails]
        columns = ("id", "message_id", "subject", "from_address", "date", "body", "machine", "names")
        mails = select(*(emails.c[name] for name in columns))
        rows = select(recipients.c.email_id, recipients.c.recipient_address, recipients.c.recipient_type)
        rows = rows.order_by(recipients.c.email_id, text("rowid"))
        for start in range(0, len(unread), _READ_MAILS):
            part = unread[start : start + _READ_MAILS]
            people: defaultdict[int, list[tuple[str, str]]] = defaultdict(list)
            for email_id, address, kind in self.connection.execute(rows.where(recipients.c.email_id.in_(part))):
                people[email_id].append((address, kind))
            for email_id, message_id, subject, sender, sent, body, machine, named in self.connection.execute(
                mails.where(emails.c.id.in_(part))
            ):
                fields, seen = {kind: list[str]() for kind in _FIELDS}, set[str]()
                # Some archives (Enron's too) repeat every cc as a bcc: an address counts once, where most could see it.
                for address, kind in sorted(people[email_id], key=lambda pair: _FIELDS.index(pair[1])):
                    if address not in seen:
                        seen.add(address)
                        fields[kind].append(address)
                (to, cc, bcc), names = fields.values(), names_of(named) if self.names else {}
                head = (message_id, subject or "", sender or "", sent, body or "")
                self._mails[email_id] = Mail(*head, to, cc, bcc, machine, names)
        if lost := [email_id for email_id in ids if email_id not in self._mails]:
            raise sqlite3.DatabaseError(f"an index names mail {lost[0]}, which is not there")
        return Inbox(inbox, [self._mails[email_id] for email_id in ids])

    def machine_mail(self, inboxes: Iterable[str]) -> dict[str, int]:
        """Return how many emails of these mailboxes programs sent, by kind."""
        ids = set[int]().union(*map(self.ids, inboxes))
        kinds = self.connection.execute(select(emails.c.id, emails.c.machine).where(emails.c.machine != ""))
        return dict(Counter(kind for email_id, kind in kinds if email_id in ids))

    def ids(self, inbox: str) -> set[int]:
        is_dated = emails.c.date.between("1000", "9000")  # days are added and taken away
        sent = select(emails.c.id).where(emails.c.from_address == inbox, is_dated)
        got = select(emails.c.id).join(recipients).where(recipients.c.recipient_address == inbox, is_dated)
        return set(self.connection.scalars(sent.union(got)))


MAX_INBOXES = 40
MIN_MAILS = 30  # Smaller mailboxes are used only if named.
OWN_SHARE = 0.9  # An address that sent or received this share of all emails owns the archive.
MAX_SEARCHED = 5000  # Number of the largest mailboxes searched for a similar address.
NUM_LISTED = 3

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
        hint = f"Name one with --inbox{f'; the largest: {largest}' if largest else ''}."
        raise UsageError(f"No address has {MIN_MAILS} emails with a third of them received.", hint)
    return chosen


def largest_owners(reader: MailReader, most: int = 3, *, least: int = MIN_MAILS, received: float = 0) -> list[Owner]:
    """Return the largest mailboxes with at least ``least`` emails (enough for questions), or else the largest of all;
    only those that received that share of their emails."""
    found = ((one for one in owners(reader, few) if one.mails - one.sent >= received * one.mails) for few in (least, 1))
    return next(filter(None, (list(islice(each, most)) for each in found)), [])


def open_inbox(reader: MailReader, inbox: str) -> Inbox:
    """Return the mailbox of an address; raises UsageError if the database has none of its email."""
    if not (box := reader.open(inbox)).mails:
        raise unknown_inbox(reader, inbox)
    return box


def find_inbox(db: Path, named: str | None) -> str:
    """Return the mailbox ``named`` in its stored form, or without a name the database's only one: that of its only
    owner, or of the only one who sent or received ``OWN_SHARE`` of its emails. Raises UsageError, which lists some
    mailboxes, for an unknown address or if there are several."""
    if named is not None:
        try:
            with open_mailbox(db, named, allow_unknown=True) as mailbox:
                if mailbox.known:
                    return mailbox.inbox
        except ToolError as error:
            raise UsageError(f"Invalid inbox {named!r}: {error.message}") from error
    with opened(db) as connection:
        if named is not None:
            raise unknown_inbox(MailReader(connection), named)
        total = connection.scalar(select(func.count()).select_from(emails)) or 0
        found = list(islice(owners(MailReader(connection), 1), MAX_INBOXES))
    own = found if len(found) == 1 else [owner for owner in found if owner.mails >= OWN_SHARE * total]
    if len(own) == 1:
        return own[0].address
    if not found:
        raise UsageError(f"The owner of {db} cannot be told.", "Name your address with --inbox.")
    more = ", …" if len(found) > NUM_LISTED else ""
    raise UsageError(f"{db} holds several mailboxes.", f"Choose one with --inbox: {listed(found[:NUM_LISTED])}{more}")


def unknown_inbox(reader: MailReader, inbox: str) -> UsageError:
    """Return the error for an unknown address: it suggests the most similar one and the largest mailboxes."""
    found = [owner.address for owner in islice(owners(reader, 1), MAX_SEARCHED)]
    near = get_close_matches(inbox.lower(), found, n=1, cutoff=0.8)
    guess = f"Did you mean {near[0]}? " if near else ""
    largest = ", ".join(found[:3]) or "none"
    return UsageError(f"No email is from or to {inbox}.", f"{guess}Its largest mailboxes: {largest}.")


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
