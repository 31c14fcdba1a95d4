"""How the people of a mail become words of its full-text index.

Each mail's ``parties`` column holds one word for everyone who sent or received it, made of a private-use character and
the address's number. A search names the inbox's word in its MATCH, so that the index itself intersects keywords with
the inbox instead of filtering afterwards. The character is of Unicode category Co, which FTS5's default tokenizer
keeps; no word of a mail is ever equal, since ``clean_text`` takes the character out of it.
"""

from __future__ import annotations

from collections.abc import Iterable

PARTY = "\ue000"
"""What every party word begins with."""
SNIPPET_WORDS = 15
"""Length of a search hit's snippet, as in ART-E."""

# FTS5 shows the stretch of words that holds most phrases of the query, of several equal ones the first, and prefers one
# that begins a column, if the column is longer than a snippet. The inbox's word is a single phrase and stands in the
# last column, so it would be shown in place of a keyword in that one case: near the beginning of a long column.
FILLER = f"{PARTY} " * SNIPPET_WORDS
"""Put before more than ``SNIPPET_WORDS`` party words, so that none stands near the beginning."""

_REPLACED = {ord(PARTY): "\ufffd", 0: None}


def party_word(address_id: int) -> str:
    """The word that stands for an address."""
    return f"{PARTY}{address_id}"


def parties_text(address_ids: Iterable[int]) -> str:
    """The ``parties`` column of a mail between these addresses (repeats are left out)."""
    words = dict.fromkeys([f"{PARTY}{address_id}" for address_id in address_ids])
    return (FILLER if len(words) > SNIPPET_WORDS else "") + " ".join(words)


def clean_text(text: str) -> str:
    """Text as it may be stored: no NUL (it would end the text inside SQLite), no character of the party words, no lone
    surrogate (it has no UTF-8 form)."""
    if text.isascii() and "\0" not in text:
        return text
    return text.translate(_REPLACED).encode("utf-8", "replace").decode("utf-8")
