"""One mailbox in memory as its owner sees it, ordered by date, with the lookups that the proofs of questions need."""

from __future__ import annotations

import re
import sqlite3
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from functools import cached_property
from random import Random

from sqlalchemy import Connection, select, text

from emailrl.facts.mentions import Extractor, Mention
from emailrl.facts.reading import name_of
from emailrl.mail.schema import emails, recipients

_PREFIX = re.compile(r"^(?:\s*(?:re|fw|fwd|aw|wg|tr|sv|antw)\s*(?:\[\d+\]|\(\d+\))?\s*:\s*)+", re.IGNORECASE)
_REPLY = re.compile(r"^\s*(?:re|aw|sv|antw)\s*(?:\[\d+\]|\(\d+\))?\s*:", re.IGNORECASE)
_FORWARD = re.compile(r"^\s*(?:fw|fwd|wg|tr)\s*:", re.IGNORECASE)
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")
_STOP_WORDS = frozenset(
    re.findall(
        r"\w+",
        "a about all am an and any are as at be been but by can do for from had has have hello here hi how i "
        "if in info is it its just me more my new no not note of off on or our out please question questions "
        "re fw fwd so some thanks thank that the their them there this to up us was we were what when where "
        "who will with would you your",
    )
)
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
_FIELDS = ("to", "cc", "bcc")
_READ_MAILS = 500  # Emails read per SQL statement.


class Inbox:
    """The emails of one inbox, oldest first, and the people in them."""

    def __init__(self, me: str, mails: Iterable[Mail]) -> None:
        self.me = me
        self.mails: Sequence[Mail] = sorted(mails, key=lambda mail: (mail.sent_at, mail.message_id))
        self._word_places: dict[str, frozenset[int]] = {}

    def called(self, address: str) -> str:
        """Return the name of the person behind an address, or the address itself if namesakes use other domains."""
        name = name_of(address)
        if name is None or len({namesake.partition("@")[2] for namesake in self._by_name[name]}) > 1:
            return address
        return name

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

    def matching(self, topic: Topic, until: date) -> list[Mail]:
        """Return the emails before ``until`` whose subject has every word of a topic, alone or within a longer word. A
        phone interview therefore also matches a telephone interview, and a meeting meetings."""
        if not topic.words:
            return []
        postings = sorted(map(self._with_word, topic.words), key=len)
        end = self.before(until)
        return [self.mails[at] for at in sorted(postings[0].intersection(*postings[1:])) if at < end]

    def is_told_by_topic(self, mail: Mail, until: date, *, with_sender: bool) -> bool:
        """Whether an email is the only one before ``until`` that its topic (and its sender) can mean."""
        if not mail.topic.is_telling:
            return False
        rivals = [other for other in self.matching(mail.topic, until) if other is not mail]
        if not with_sender:
            return not rivals
        return all(
            other.sender != mail.sender and (not self.unmistakable.isdisjoint((other.sender, mail.sender)))
            for other in rivals
        )

    def thread(self, mail: Mail, until: date) -> list[Mail]:
        """Return the emails before ``until`` with its subject, oldest first; none if others share its words."""
        matching = self.matching(mail.topic, until)
        return matching if all(other.topic.key == mail.topic.key for other in matching) else []

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

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._mails: dict[int, Mail] = {}

    def open(self, inbox: str) -> Inbox:
        """Return everything sent or received by an address, except emails without a date."""
        ids = sorted(self.ids(inbox))
        unread = [email_id for email_id in ids if email_id not in self._mails]
        columns = (emails.c[name] for name in ("id", "message_id", "subject", "from_address", "date", "body"))
        mails = select(*columns)
        rows = select(recipients.c.email_id, recipients.c.recipient_address, recipients.c.recipient_type)
        rows = rows.order_by(recipients.c.email_id, text("rowid"))
        for start in range(0, len(unread), _READ_MAILS):
            part = unread[start : start + _READ_MAILS]
            people: defaultdict[int, list[tuple[str, str]]] = defaultdict(list)
            for email_id, address, kind in self.connection.execute(rows.where(recipients.c.email_id.in_(part))):
                people[email_id].append((address, kind))
            for email_id, message_id, subject, sender, sent, body in self.connection.execute(
                mails.where(emails.c.id.in_(part))
            ):
                fields: dict[str, list[str]] = {kind: [] for kind in _FIELDS}
                named: set[str] = set()
                # Some archives (Enron's too) repeat every cc as a bcc: an address counts once, where most could see it.
                for address, kind in sorted(people[email_id], key=lambda pair: _FIELDS.index(pair[1])):
                    if address not in named:
                        named.add(address)
                        fields[kind].append(address)
                self._mails[email_id] = Mail(message_id, subject or "", sender or "", sent, body or "", **fields)
        if lost := [email_id for email_id in ids if email_id not in self._mails]:
            raise sqlite3.DatabaseError(f"an index names mail {lost[0]}, which is not there")
        return Inbox(inbox, [self._mails[email_id] for email_id in ids])

    def ids(self, inbox: str) -> set[int]:
        is_dated = emails.c.date > ""
        sent = select(emails.c.id).where(emails.c.from_address == inbox, is_dated)
        got = select(emails.c.id).join(recipients).where(recipients.c.recipient_address == inbox, is_dated)
        return set(self.connection.scalars(sent.union(got)))
