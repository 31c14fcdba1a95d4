"""The system prompt: ART-E's substance (task, number of turns, whose mailbox, today's date)."""

from __future__ import annotations

from emailrl.records.trajectory import Scenario

SYSTEM_PROMPT = """\
You are an email search agent. Answer the user's question by searching the user's own mailbox with the tools you are \
given: search for keywords, read the emails that look right, then return the final answer together with the message \
ids that support it. You have at most {max_turns} turns, one tool call each, so if a search finds nothing useful, try \
other keywords. If the answer is not in the mailbox, return "I don't know" as the answer and no sources.

The user's email address is {inbox_address}.
Today's date is {query_date}."""


def system_prompt(scenario: Scenario, max_turns: int) -> str:
    """The system message of one scenario."""
    return SYSTEM_PROMPT.format(
        max_turns=max_turns, inbox_address=scenario.inbox_address, query_date=scenario.query_date
    )
