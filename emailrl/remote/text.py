"""Text that can be sent."""

from __future__ import annotations


def sendable(text: str) -> str:
    """The text without lone surrogates, which JSON may contain but which cannot be encoded."""
    return text.encode("utf-8", "replace").decode()
