"""Text that can be sent."""

from __future__ import annotations


def sendable(text: str) -> str:
    """The text without halves of characters, which a model's or a server's JSON may hold and which nothing can send."""
    return text.encode("utf-8", "replace").decode()
