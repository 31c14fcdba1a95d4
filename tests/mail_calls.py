"""What the environment's tests share: whose mailbox it is, and how a model's call looks."""

from __future__ import annotations

from emailrl.records.trajectory import Message, ToolCall

INBOX = "ida@corvane.test"


def call(name: str, /, **arguments: object) -> Message:
    """An assistant message with one tool call."""
    return Message("assistant", "", [ToolCall(name, arguments, id="c1")])
