"""Encodes the people of an email as words of its full-text index.

The ``parties`` column has one word per sender and recipient, made of a private-use character and the address's number.
A search includes the inbox's word in its MATCH, so that the index itself intersects keywords with the inbox instead of
filtering afterwards. The character is of Unicode category Co, which FTS5's default tokenizer keeps; no word of an email
can be equal, since ``clean_text`` removes the character.
"""

from __future__ import annotations

from collections.abc import Iterable

PARTY = "\ue000"
"""The first character of every party word."""
SNIPPET_WORDS = 15
"""Length of a search hit's snippet, as in ART-E."""

# FTS5 shows the stretch of words that holds most phrases of the query, of several equal ones the first, and prefers one
# that begins a column, if the column is longer than a snippet. The inbox's word is a single phrase and stands in the
# last column, so it would be shown in place of a keyword in that one case: near the beginning of a long column.
FILLER = f"{PARTY} " * SNIPPET_WORDS
"""Precedes more than ``SNIPPET_WORDS`` party words, so that none is near the beginning."""

_REPLACED = {ord(PARTY): "\ufffd", 0: None}


def party_word(address_id: int) -> str:
    """Return the party word of an address."""
    return f"{PARTY}{address_id}"


def parties_text(address_ids: Iterable[int]) -> str:
    """Return the ``parties`` column of an email between these addresses, without repeats."""
    words = dict.fromkeys([f"{PARTY}{address_id}" for address_id in address_ids])
    return (FILLER if len(words) > SNIPPET_WORDS else "") + " ".join(words)


def clean_text(text: str) -> str:
    """Return text that can be stored, without NUL (which ends a text in SQLite), ``PARTY`` and lone surrogates."""
    if text.isascii() and "\0" not in text:
        return text
    return text.translate(_REPLACED).encode("utf-8", "replace").decode("utf-8")
