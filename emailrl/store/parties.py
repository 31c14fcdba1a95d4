"""How the people of a mail become words of its full-text index.

Each mail's ``parties`` column holds one word for its sender and one for every recipient, made of a private-use
character and the address's number. A search names the inbox's two words in its MATCH, so that the index itself
intersects keywords with the inbox instead of filtering afterwards. The characters are of Unicode category Co, which
FTS5's default tokenizer keeps: no word of a mail that is free of them (``clean_text`` sees to it) is ever equal.
"""

from __future__ import annotations

SENDER = "\ue000"
RECIPIENT = "\ue001"

_REPLACED = {ord(SENDER): "\ufffd", ord(RECIPIENT): "\ufffd", 0: None}


def sender_word(address_id: int) -> str:
    """The word that stands for an address as the sender."""
    return f"{SENDER}{address_id}"


def recipient_word(address_id: int) -> str:
    """The word that stands for an address among to, cc and bcc."""
    return f"{RECIPIENT}{address_id}"


def clean_text(text: str) -> str:
    """Text as it may be stored: no NUL (it would end the text inside SQLite), no character of the party words, no lone
    surrogate (it has no UTF-8 form)."""
    if text.isascii() and "\0" not in text:
        return text
    return text.translate(_REPLACED).encode("utf-8", "replace").decode("utf-8")
