"""Errors a user can act on: what went wrong, and what to do about it."""

from __future__ import annotations


class EmailRLError(Exception):
    """A failure to show the user on one line, with the remedy in ``hint``; the command exits with ``exit_code``.
    ``code`` is a stable word for its kind, whatever the sentence says."""

    exit_code = 1
    code = "failed"

    def __init__(self, message: str, hint: str = "", code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code or self.code

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


class UsageError(EmailRLError):
    """A wrong argument, setting or input file: the user must change what they asked for (exit code 2)."""

    exit_code = 2
    code = "usage"


class ToolError(EmailRLError):
    """A tool call with bad arguments; the environment records it, it never ends a run."""
