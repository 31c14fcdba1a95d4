"""Keeps snippets of long emails cheap: anyone can send an email that repeats a word a million times.

FTS5's snippet() compares every match in an email with every other match and with every sentence. On 200 kB of one
repeated word this takes 15 s, and SQLite cannot be interrupted meanwhile. Such emails get an excerpt instead. Counting
matches needs FTS5's own tokenizer, so the text is indexed in memory; everything here takes time linear in the text.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager

from emailrl.mail.connection import is_cancelled
from emailrl.mail.schema import SNIPPET_WORDS

LONGEST_SNIPPET = 2000
"""In characters; FTS5 limits words only, and a word may have megabytes."""
_MOST_MATCHES = 2000
"""Matches of all keywords that snippet() compares within about 30 ms."""
_MOST_STEPS = 10**9
"""Matches times characters, since snippet() also compares matches with sentences."""
_SEARCHED_CHARS = 1_000_000
"""Characters of a body in which the best part is looked for."""
_PART_CHARS = 400
_CHECK_STEPS = 1000
"""Steps of SQLite's virtual machine between two checks for Ctrl-C; ranking a part of one repeated word takes long."""
_PREVIEW_CHARS = SNIPPET_WORDS * 20
_ASCII_WORD = re.compile(r"[a-z0-9]+", re.IGNORECASE | re.ASCII)

_TABLES = """
    CREATE VIRTUAL TABLE parts USING fts5(part);
    CREATE VIRTUAL TABLE keywords USING fts5(keyword);
    CREATE VIRTUAL TABLE part_terms USING fts5vocab(parts, row);
    CREATE VIRTUAL TABLE keyword_terms USING fts5vocab(keywords, instance);"""
# A phrase occurs at most as often as the rarest of its words.
_COUNT = """
    SELECT coalesce(sum(fewest), 0) FROM (
        SELECT min(coalesce(cnt, 0)) AS fewest
        FROM keyword_terms LEFT JOIN part_terms USING (term) GROUP BY keyword_terms.doc)"""
_BEST_PART = f"""
    SELECT snippet(parts, 0, '<b>', '</b>', ' ... ', {SNIPPET_WORDS}) FROM parts WHERE parts MATCH ?
    ORDER BY rank, rowid LIMIT 1"""


def quoted(keyword: str) -> str:
    """Return a keyword as an FTS5 phrase."""
    # NUL would end the expression inside SQLite; to the tokenizer it is no letter, like the space put in its place.
    return '"' + keyword.replace('"', '""').replace("\0", " ") + '"'


def short_text(keywords: Sequence[str]) -> int:
    """Return a length in characters up to which no text has too many matches of the keywords.

    A match has at least as many characters as the keyword's longest word, and one more separates it from the next.
    """
    return int(_MOST_MATCHES / sum(1 / (1 + _shortest_match(keyword)) for keyword in keywords))


def _shortest_match(keyword: str) -> int:
    """In characters; a letter with several accents is one character in a text, so only ASCII words are measured."""
    return max(map(len, _ASCII_WORD.findall(keyword)), default=1) if keyword.isascii() else 1


def has_few_matches(text: str, keywords: Sequence[str]) -> bool:
    """Whether the text has so few matches of the keywords that snippet() is fast."""
    with _indexed([text]) as memory:
        memory.executemany("INSERT INTO keywords VALUES (?)", [(keyword,) for keyword in keywords])
        [matches] = memory.execute(_COUNT).fetchone()
    return matches <= min(_MOST_MATCHES, _MOST_STEPS // len(text))


def excerpt(subject: str, body: str, keywords: Sequence[str]) -> str:
    """Return the words around keywords in the part of the body that matches best, or else a preview of the email."""
    length = min(len(body), _SEARCHED_CHARS)
    parts = (body[start : start + _PART_CHARS] for start in range(0, length, _PART_CHARS))
    with _indexed(parts) as memory:
        found = memory.execute(_BEST_PART, (" OR ".join(map(quoted, dict.fromkeys(keywords))),)).fetchone()
    return f" ... {found[0].removeprefix(' ... ').removesuffix(' ... ')} ... " if found else preview(subject, body)


def preview(subject: str, body: str) -> str:
    """Return an email's subject and the first words of its body."""
    words = body[:_PREVIEW_CHARS].split()
    begins = " ".join([*words[:SNIPPET_WORDS], *(["..."] if len(words) > SNIPPET_WORDS else [])])
    return " ... ".join(filter(None, (subject, begins)))


@contextmanager
def _indexed(parts: Iterable[str]) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as memory:
        memory.set_progress_handler(is_cancelled, _CHECK_STEPS)
        memory.executescript(_TABLES)
        memory.execute("BEGIN")
        memory.executemany("INSERT INTO parts VALUES (?)", ((part,) for part in parts))
        memory.execute("COMMIT")
        yield memory
