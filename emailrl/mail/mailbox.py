"""Searches and reads one person's mailbox in a mail database, as an agent's tools do.

A search queries the full-text index for the keywords and, in the same MATCH, for the word of the inbox (``database``).
Dates become bounds on row ids, which count from the newest email, and the scan stops at the last hit requested. Results
and snippets equal those of ART-E's query where ``names`` is off, except for the snippets of emails with thousands of
matches: FTS5's snippet() compares every match with every other and with every sentence (15 s for 200 kB of one repeated
word), which cannot be interrupted, so such emails get an excerpt in linear time instead.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import date
from itertools import chain
from pathlib import Path
from typing import Any, Literal
from weakref import WeakValueDictionary, finalize

from emailrl.base.errors import EmailRLError, ToolError, UsageError
from emailrl.mail import database, languages
from emailrl.mail.snippets import LONGEST_SNIPPET, excerpt, has_few_matches, preview, quoted, short_text
from emailrl.settings.tree import MAX_RESULTS

Order = Literal["newest", "relevance"]
"""The order of hits, which determines the top ten; ties in relevance are newest first."""
MAX_KEYWORDS = 32
MAX_KEYWORD_CHARS = 1000
MAX_WORDS = 64  # of all keywords: a search looks at each of them wherever another occurs
MOST_COUNTED = 1000  # Matches that are counted, in about a millisecond
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)
_FIRST_ID, _LAST_ID = -(2**63), 2**63 - 1


@dataclass(slots=True, frozen=True)
class SearchHit:
    """One hit: the email's id and the words around the keywords, which are in ``<b>`` tags."""

    message_id: str
    snippet: str


@dataclass(slots=True, frozen=True)
class Email:
    """An email as ``read`` returns it; ``date`` is ``YYYY-MM-DD HH:MM:SS`` in UTC, or None if it has none."""

    message_id: str
    date: str | None
    subject: str
    from_address: str
    to_addresses: list[str]
    cc_addresses: list[str]
    bcc_addresses: list[str]
    body: str
    file_name: str
    from_name: str = field(default="", compare=False)  # as the sender writes it
    names: dict[str, str] = field(default_factory=dict, compare=False)  # of sender and recipients, by address
    attachments: list[str] = field(default_factory=list, compare=False)  # names of the files, which are not kept
    thread_id: int | None = field(default=None, compare=False)  # the same for all emails of a thread of two or more
    machine: str = field(default="", compare=False)
    """The kind of program that sent it: newsletter, notification, auto-reply or calendar; empty for a person."""

    def named(self, address: str) -> str:
        """Return an address with its name, if it has one: ``Ann Lee <ann@x.org>``."""
        return database.named(self.names, address)


class _Reader:
    """A read-only connection, closed when its thread no longer refers to it."""

    def __init__(self, db: Path) -> None:
        self._opened = database.connect(db)
        finalize(self, self._opened.close)
        self.connection = database.driver(self._opened)
        self.meanings = dict[str, tuple[str, list[str]]]()  # of keywords, as in ``Mailbox._meaning``
        with database.reading(db):
            self.has_stems = self.connection.execute("SELECT 1 FROM stems LIMIT 1").fetchone() is not None


class _Readers(threading.local):
    """The open readers of a thread by file: thousands of mailboxes need one file handle and one set of statements."""

    def __init__(self) -> None:
        self.by_file: WeakValueDictionary[tuple[object, ...], _Reader] = WeakValueDictionary()
        self.latest: _Reader | None = None  # stays open, since the next mailbox is usually in the same file


_readers = _Readers()


class Mailbox(AbstractContextManager["Mailbox"]):
    """The emails that one address sent or received, up to a date; read-only, for one thread."""

    def __init__(
        self,
        db: Path | str,
        inbox: str,
        until: str | None = None,
        order: Order = "newest",
        without_keywords: bool = True,
        names: bool = True,
        allow_unknown: bool = False,
    ) -> None:
        """Open the mailbox of the address ``inbox`` (any case). Keywords also match the names of people and attachments
        and other spellings (Mueller, Müller) if ``names``, else subject and body alone, as in ART-E.
        ``until`` (``YYYY-MM-DD``, UTC) hides every email of that day and later, and undated ones. ``without_keywords``
        allows searches without keywords if an address or a date is given, ``allow_unknown`` an inbox without email.
        Raises ``UsageError`` for another one, and if ``db`` is not a mail database; ``ToolError`` for any other bad
        argument."""
        if order not in ("newest", "relevance"):
            raise ToolError("order must be newest or relevance.")
        address = _check_address("inbox", inbox)
        if address is None:
            raise ToolError("inbox must be an address.")
        self.db, self.inbox, self.until = Path(db), address, _check_day("until", until)
        self.order, self.without_keywords, self.names = order, without_keywords, names
        try:
            stat = os.stat(db)
        except OSError:
            raise database.no_database(self.db) from None
        key = (str(db), stat.st_dev, stat.st_ino, stat.st_mtime_ns, os.getpid())
        self._reader: _Reader | None = _readers.by_file.get(key) or _Reader(self.db)
        _readers.by_file[key] = _readers.latest = self._reader
        self._member = self._party(address)
        if not (allow_unknown or self.known):
            raise UsageError(f"No email in {db} is from or to {inbox}.", f"emailrl gen-db --db {db} lists its inboxes.")

    @property
    def known(self) -> bool:
        """Whether any email in the database names this address."""
        return self._member is not None

    def search(
        self,
        keywords: list[str],
        from_addr: str | None = None,
        to_addr: str | None = None,
        sent_after: str | None = None,
        sent_before: str | None = None,
        max_results: int = MAX_RESULTS,
    ) -> list[SearchHit]:
        """Return the newest (or most relevant, see ``order``) emails whose text, or ``names``, contain every keyword.
        A keyword of several words is a phrase. ``from_addr`` and ``to_addr`` (to, cc or bcc) are addresses, or with
        ``names`` also people's names; ``sent_after`` is inclusive, ``sent_before`` exclusive, both ``YYYY-MM-DD`` in
        UTC. If one is given, ``keywords`` may be empty (``without_keywords``): all emails then match, newest first, and
        a snippet is the subject and the first words of the body. Raises ``ToolError`` for a bad argument."""
        if isinstance(max_results, bool) or not isinstance(max_results, int) or max_results < 1:
            raise ToolError("max_results must be a whole number of at least 1.")
        if max_results > MAX_RESULTS:
            raise ToolError(f"max_results must be less than or equal to {MAX_RESULTS}.")
        if (query := self._query(keywords, from_addr, to_addr, sent_after, sent_before)) is None:
            return []
        text, written, match, people, bounds = query
        if text is None:
            rows = self._rows(_UNSEARCHED, (match, *people, *bounds, max_results))
            return [SearchHit(message_id, preview(subject, body)) for message_id, subject, body in rows]
        short = short_text(written)
        if self.order == "newest" and not any(people):
            rows = self._rows(_NEWEST, (short, match, *bounds, max_results))
        else:
            rows = self._rows(_SEARCHES[self.order], (short, match, *people, *bounds, max_results, text))
        return [SearchHit(each, self._bounded(snippet, each, written, text)) for each, snippet in rows]

    def count(
        self,
        keywords: list[str],
        from_addr: str | None = None,
        to_addr: str | None = None,
        sent_after: str | None = None,
        sent_before: str | None = None,
    ) -> int:
        """Return how many emails match a search, at most ``MOST_COUNTED``. Raises ``ToolError`` for a bad argument."""
        if (query := self._query(keywords, from_addr, to_addr, sent_after, sent_before)) is None:
            return 0
        match, people, bounds = query[2:]
        counted = _HITS.format(columns="1", first="emails_fts.rowid")
        return len(self._rows(counted, (match, *people, *bounds, MOST_COUNTED)))

    def _query(
        self, keywords: list[str], from_addr: object, to_addr: object, sent_after: object, sent_before: object
    ) -> tuple[str | None, list[str], str, tuple[str | None, ...], tuple[int, int]] | None:
        """The FTS5 expression of the keywords (None without any), what they may look like in a text, the expression
        with the people; sender and recipient, each twice; the highest id and that below the lowest. None: no match."""
        text, written = self._text_match(_checked(keywords))
        given = self._people("from_addr", from_addr), self._people("to_addr", to_addr)
        after, before = _check_day("sent_after", sent_after), _check_day("sent_before", sent_before)
        if text is None and not (self.without_keywords and (given != (None, None) or after or before)):
            raise ToolError("No keywords provided for search.")
        if self.until is not None:
            before = self.until if before is None else min(before, self.until)
        low, high = after or (_UNDATED_END if before else ""), before or _DATES_END
        own = (" OR ".join(filter(None, map(self._party, people))) for people in given if people is not None)
        if not all(parties := [self._member, *own]):  # an address that no mail of the database names
            return None
        match = " AND ".join([*filter(None, [text]), *(f"({party})" for party in parties)])
        sender, recipient = (None if people is None else json.dumps(people) for people in given)
        return text, written, match, (sender, sender, recipient, recipient), (self._last_id(high), self._last_id(low))

    def _people(self, argument: str, value: object) -> list[str] | None:
        """The addresses for which an argument stands: itself, or with ``names`` all who have all words of it
        in their name, in any spelling; None if missing or empty."""
        address = _check_address(argument, value)
        if address is None:
            return None
        address = address.rpartition("<")[2].rstrip(">") if address.endswith(">") else address
        if not self.names or "@" in address or not languages.marked(address) or self._party(address):
            return [address]
        forms = [
            languages.words_of(" ".join([*languages.spellings(word), *self._foreign_forms(word)]))
            for word in languages.words_of(address)
        ]
        match = " AND ".join(f"({' OR '.join(quoted(database.PARTY + form) for form in each)})" for each in forms)
        rows = self._rows(_NAMED, (f"extra : ({match}) AND {self._member}", MOST_COUNTED)) if self._member else []
        named = (pair for (lines,) in rows for pair in database.names_of(lines).items())
        names = {each: languages.words_of(f"{name} {languages.closed(name)}") for each, name in named}
        return [each for each, own in names.items() if not any(map(own.isdisjoint, forms))][:_MOST_FORMS]

    def read(self, message_id: str) -> Email | None:
        """Return the email with that id, given with or without its angle brackets, or None if there is none before
        ``until``; ``ToolError`` for a bad id."""
        if not isinstance(message_id, str):
            raise ToolError("message_id must be a string.")
        _check_text("message_id", message_id)
        bare = message_id.removeprefix("<").removesuffix(">")
        if not (rows := self._rows(_READ, (message_id, f"<{bare}>", bare))):
            return None
        key, own, sent, subject, sender, body, file_name, lines, files, machine, thread = rows[0]
        people = self._rows(_RECIPIENTS, (key,))
        is_late = self.until is not None and (sent is None or sent >= self.until)
        if is_late or self.inbox not in (sender, *(address for address, _ in people)):
            return None
        to, cc, bcc = ([address for address, kind in people if kind == wanted] for wanted in ("to", "cc", "bcc"))
        names = database.names_of(lines)
        more = (names.get(sender, ""), names, files.split("\n") if files else [], thread, machine)
        return Email(own, sent, subject, sender, to, cc, bcc, body, file_name, *more)

    def thread(self, email: Email) -> list[str]:
        """Return the ids of the thread's emails in this mailbox, oldest first: only the email's own if it is alone or
        they are more than ``MOST_COUNTED``."""
        if email.thread_id is None:
            return [email.message_id]
        bounds = self._last_id(self.until or _DATES_END), self._last_id(_UNDATED_END if self.until else "")
        rows = self._rows(_THREAD, (email.thread_id, MOST_COUNTED + 1, *bounds, self.inbox, self.inbox))
        ids = [message_id for (message_id,) in rows]
        return ids if email.message_id in ids and len(ids) <= MOST_COUNTED else [email.message_id]

    def close(self) -> None:
        """Release the database; further calls raise ``EmailRLError``."""
        self._reader = None

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _opened(self) -> _Reader:
        if self._reader is None:
            raise EmailRLError("This mailbox is closed.")
        return self._reader

    def _text_match(self, keywords: list[str]) -> tuple[str | None, list[str]]:
        """The FTS5 expression of keywords, each quoted: an implicit AND, as in ART-E; None without any. And what they
        may look like in a text. With ``names``, a keyword may be in any spelling and inflection, also in ``extra``."""
        if not keywords:
            return None, []
        parts = chain.from_iterable(map(languages.words_apart, keywords if self.names else ()))
        words = [word for word in parts if languages.marked(word)]
        if not words:
            return f"({' '.join(map(quoted, keywords))})", keywords
        clauses, written = zip(*map(self._meaning, words), strict=True)  # a keyword without a word is left out
        return f"({' AND '.join(clauses)})", [*chain.from_iterable(written)]

    def _meaning(self, keyword: str) -> tuple[str, list[str]]:
        """The same of one keyword, kept for the next search."""
        known = self._opened().meanings
        if keyword not in known:
            spelled = languages.spellings(keyword)
            others = (each for form in spelled for each in languages.phrases(form, self._foreign_forms))
            own = {*map(languages.fold, map(str.lower, spelled))}
            more = dict.fromkeys([*languages.phrases(keyword, languages.english_forms), *others])
            forms = [*spelled, *languages.phone_groups(keyword), *(form for form in more if form not in own)]
            if len(known) >= _MOST_MEANINGS:
                known.clear()
            known[keyword] = f"({' OR '.join([*map(_anywhere, forms), *languages.in_pairs(keyword)])})", forms
        return known[keyword]

    def _foreign_forms(self, word: str) -> list[str]:
        """The words of other languages for which a keyword stands."""
        if not self._opened().has_stems:
            return []
        return [form for (form,) in self._rows(_FORMS, (languages.stem_ranges(word), _MOST_FORMS))]

    def _bounded(self, snippet: str | None, message_id: str, keywords: list[str], match: str) -> str:
        """FTS5's snippet of subject or body (None: not made yet, since the email is long), or an excerpt if it is too
        long or too slow; a preview for an email that was found by names alone."""
        is_other = self.names and snippet is not None and database.PARTY in snippet
        if snippet is not None and len(snippet) <= LONGEST_SNIPPET and not is_other:
            return snippet
        [(subject, body)] = self._rows(_TEXT, (message_id,))
        with database.reading(self.db):
            text = f"{subject}\n{body}".lower()
            if is_other and text.isascii() and not any(each.lower() in text for each in keywords):
                return preview(subject, body)
            if is_other or (snippet is None and has_few_matches(text, keywords)):
                if self.names:
                    words = [*keywords, *languages.words_around(f"{subject}\n{body}", keywords)]
                    match = f"{{subject body}} : ({' OR '.join(map(quoted, words))})"
                found = self._rows(_SNIPPET_OF, (match, message_id))
                snippet = found[0][0] if found else preview(subject, body)
            return snippet if snippet and len(snippet) <= LONGEST_SNIPPET else excerpt(subject, body, keywords)

    def _rows(self, sql: str, values: tuple[object, ...]) -> list[Any]:
        try:
            return self._opened().connection.execute(sql, values).fetchall()
        except sqlite3.Error:
            with database.reading(self.db):
                raise
        except MemoryError:
            raise ToolError("The search needs too much memory. Use fewer keywords.") from None

    def _party(self, address: str) -> str | None:
        """The FTS5 expression for the emails that name an address; None if none in the database does."""
        rows = self._rows("SELECT id FROM addresses WHERE address = ?", (address,))
        return quoted(database.party_word(rows[0][0])) if rows else None

    def _last_id(self, day: str) -> int:
        """The highest id of the emails dated ``day`` or later, which have the lowest ids (also negative ones)."""
        if not day:
            return _LAST_ID
        rows = self._rows("SELECT id FROM emails WHERE date >= ? ORDER BY date, id DESC LIMIT 1", (day,))
        return rows[0][0] if rows else _FIRST_ID


open_mailbox = Mailbox


def _check_text(name: str, value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ToolError(f"{name} contains invalid Unicode.") from None


def _checked(keywords: object) -> list[str]:
    if not isinstance(keywords, list | tuple) or not all(isinstance(keyword, str) for keyword in keywords):
        raise ToolError("keywords must be a list of strings.")
    if len(max(keywords, key=len, default="")) > MAX_KEYWORD_CHARS:
        raise ToolError(f"A keyword is longer than {MAX_KEYWORD_CHARS} characters.")
    if len(keywords) > MAX_KEYWORDS or sum(len(languages.marked(keyword).split()) for keyword in keywords) > MAX_WORDS:
        raise ToolError(f"There are more than {MAX_KEYWORDS} keywords, or more than {MAX_WORDS} words in them.")
    _check_text("keywords", "".join(keywords))
    return [keyword.replace(database.PARTY, " ") for keyword in keywords]


def _anywhere(form: str) -> str:
    """The FTS5 expression of a phrase in subject or body, or as a name, two words of which may be in either order."""
    words = languages.marked(form).split()
    named = f"NEAR({' '.join(map(quoted, words))}, 0)" if len(words) == 2 else quoted(" ".join(words))
    return f"{quoted(form)} OR {named}"


def _check_address(name: str, value: object) -> str | None:
    """Return an address in its stored form; None if missing or empty."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise ToolError(f"{name} must be an address.")
    _check_text(name, value)
    return value.strip().lower() or None


def _check_day(name: str, value: object) -> str | None:
    """Return a validated day unchanged; None if missing or empty."""
    if value is None or value == "":
        return None
    if isinstance(value, str) and _DAY.fullmatch(value):
        try:
            date.fromisoformat(value)
        except ValueError:
            raise ToolError(f"{name} is not a valid date: {value}.") from None
        return value
    raise ToolError(f"{name} must be a date as YYYY-MM-DD.")


_UNDATED_END, _DATES_END = "0", "~"
"""Bounds below and above all dates; undated emails count as the empty string, below both."""
_SNIPPET = f"snippet(emails_fts, -1, '<b>', '</b>', ' ... ', {database.SNIPPET_WORDS})"
_BYTES = " + ".join(f"length(CAST(e.{each} AS BLOB))" for each in ("subject", "body", "extra"))
_SNIPPET_IF_SHORT = f"CASE WHEN {_BYTES} <= ? THEN {_SNIPPET} END"
_SNIPPET_OF = f"""
    SELECT {_SNIPPET} FROM emails_fts
    WHERE emails_fts MATCH ? AND emails_fts.rowid = (SELECT id FROM emails WHERE message_id = ?)"""
_MOST_MEANINGS = 1000  # of keywords kept for a file
_MOST_FORMS = 100  # of a keyword in emails that are not plainly English
_FORMS = "SELECT word FROM json_each(?) CROSS JOIN stems ON stem BETWEEN value ->> 0 AND value ->> 1 LIMIT ?"
_NAMED = "SELECT m.names FROM emails_fts f CROSS JOIN emails m WHERE emails_fts MATCH ? AND m.id = f.rowid LIMIT ?"
_TEXT = "SELECT coalesce(subject, ''), coalesce(body, '') FROM emails WHERE message_id = ?"
_NEWEST = f"""
    SELECT message_id, {_SNIPPET_IF_SHORT} FROM emails_fts CROSS JOIN emails e
    WHERE emails_fts MATCH ? AND emails_fts.rowid > ? AND emails_fts.rowid <= ? AND e.id = emails_fts.rowid
    ORDER BY emails_fts.rowid LIMIT ?"""

# A snippet shows every phrase of its own MATCH. Here several stand for people, so each hit is matched once more, by the
# keywords alone.
_HITS = """
    SELECT {columns} FROM emails_fts CROSS JOIN emails m
    WHERE emails_fts MATCH ? AND m.id = emails_fts.rowid
    AND (? IS NULL OR m.from_address IN (SELECT value FROM json_each(?)))
    AND (? IS NULL OR EXISTS (
        SELECT 1 FROM recipients WHERE recipient_address IN (SELECT value FROM json_each(?)) AND email_id = m.id))
    AND emails_fts.rowid > ? AND emails_fts.rowid <= ? ORDER BY {first} LIMIT ?"""
_SEARCH = f"""
    SELECT e.message_id, {_SNIPPET_IF_SHORT}
    FROM ({_HITS.format(columns="m.id, {score} AS score", first="{first}")}) hits
    CROSS JOIN emails_fts CROSS JOIN emails e
    WHERE emails_fts.rowid = hits.id AND emails_fts MATCH ? AND e.id = hits.id
    ORDER BY {{then}}"""
_RANK = "bm25(emails_fts, 5.0, 1.0, 0.0, 1.0)"  # the subject counts five times: it summarizes its email in few words
_SEARCHES: dict[Order, str] = {
    "newest": _SEARCH.format(score=0, first="emails_fts.rowid", then="e.id"),
    "relevance": _SEARCH.format(score=_RANK, first="score, m.id", then="score, e.id"),
}
_BEGINNING = f"m.message_id, m.subject, substr(m.body, 1, {database.SNIPPET_WORDS * 20})"
_UNSEARCHED = _HITS.format(columns=_BEGINNING, first="emails_fts.rowid")
_READ = """
    SELECT id, message_id, date, subject, from_address, body, file_name, names, attachments, machine, thread_id
    FROM emails LEFT JOIN threads ON email_id = id WHERE message_id IN (?1, ?2, ?3) ORDER BY message_id <> ?1"""
_THREAD = """
    SELECT message_id FROM emails e
    WHERE id IN (SELECT email_id FROM threads WHERE thread_id = ? LIMIT ?) AND id > ? AND id <= ? AND (
        from_address = ? OR EXISTS (SELECT 1 FROM recipients WHERE email_id = id AND recipient_address = ?))
    ORDER BY id DESC"""
"""The emails of a thread, oldest first."""
_RECIPIENTS = "SELECT recipient_address, recipient_type FROM recipients WHERE email_id = ? ORDER BY rowid"
