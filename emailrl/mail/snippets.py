"""Snippets of emails for which FTS5's own would take too long, and previews."""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import lru_cache

from emailrl.mail.database import SNIPPET_WORDS, TOKENIZER, is_cancelled
from emailrl.mail.languages import fold

LONGEST_SNIPPET = 2000  # in characters; FTS5 limits words only, and a word may have megabytes
_MOST_MATCHES = 2000  # matches of all keywords that snippet() compares within about 30 ms
_MOST_STEPS = 10**9  # matches times characters, since snippet() also compares matches with sentences
_SEARCHED_CHARS = 1_000_000  # characters of a body in which the best part is looked for
_PART_CHARS = 400
_RANK_STEPS = 1000
"""Steps of SQLite's virtual machine between two checks for Ctrl-C; ranking a part of one repeated word takes long."""
_ASCII_WORD = re.compile(r"[a-z0-9]+", re.IGNORECASE | re.ASCII)
_WORD = re.compile(r"[^\W_]+")

_TABLES = f"""
    CREATE VIRTUAL TABLE parts USING fts5(part, {TOKENIZER});
    CREATE VIRTUAL TABLE keywords USING fts5(keyword, {TOKENIZER});
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
    """Return a length in characters up to which no text has too many matches of the keywords: a match is as long as the
    keyword's longest word, and a character separates it from the next. No word of a text matches two keywords."""
    longest = Counter(map(_longest_word, keywords))
    return int(_MOST_MATCHES / max(number / (1 + (len(word) or 1)) for word, number in longest.items()))


@lru_cache(8192)
def _longest_word(keyword: str) -> str:
    return max(_WORD.findall(fold(keyword.lower())), key=len, default="")


def has_few_matches(text: str, keywords: Sequence[str]) -> bool:
    """Whether the text, in lower case, has so few matches of the keywords that snippet() is fast."""
    most = min(_MOST_MATCHES, _MOST_STEPS // len(text))
    if text.isascii() and all(map(str.isascii, keywords)):  # then a match contains its keyword's longest word
        words = map(_ASCII_WORD.findall, keywords)
        if sum(text.count(max(each, key=len).lower()) for each in words if each) <= most:
            return True
    with _indexed([text]) as memory:
        memory.executemany("INSERT INTO keywords VALUES (?)", [(keyword,) for keyword in keywords])
        [matches] = memory.execute(_COUNT).fetchone()
    return matches <= most


def excerpt(subject: str, body: str, keywords: Sequence[str]) -> str:
    """Return the words around keywords in the part of the body that matches best, or else a preview of the email."""
    length = min(len(body), _SEARCHED_CHARS)
    parts = (body[start : start + _PART_CHARS] for start in range(0, length, _PART_CHARS))
    with _indexed(parts) as memory:
        found = memory.execute(_BEST_PART, (" OR ".join(map(quoted, dict.fromkeys(keywords))),)).fetchone()
    return f" ... {found[0].removeprefix(' ... ').removesuffix(' ... ')} ... " if found else preview(subject, body)


def preview(subject: str, body: str) -> str:
    """Return an email's subject and the first words of its body."""
    words = body[: SNIPPET_WORDS * 20].split()
    begins = " ".join([*words[:SNIPPET_WORDS], *(["..."] if len(words) > SNIPPET_WORDS else [])])
    return " ... ".join(filter(None, (subject, begins)))


@contextmanager
def _indexed(parts: Iterable[str]) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as memory:
        memory.set_progress_handler(is_cancelled, _RANK_STEPS)
        memory.executescript(_TABLES)
        memory.execute("BEGIN")
        memory.executemany("INSERT INTO parts VALUES (?)", ((part,) for part in parts))
        memory.execute("COMMIT")
        yield memory
