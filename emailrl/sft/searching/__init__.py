"""Experts that act on tool results: they search with the question's words, read until an email matches, and cite it."""

from emailrl.sft.searching.conversations import conversations, conversations_on, questions_of

__all__ = ["conversations", "conversations_on", "questions_of"]
