"""Experts that act on what they see: they search by a question's own words, read on until a mail fits, and cite it."""

from emailrl.sft.searching.conversations import conversations

__all__ = ["conversations"]
