"""Show an agent's work on the terminal: one line per step, then its answer with quoted source emails."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, Self

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from emailrl.base.plain import cut, one_line
from emailrl.records.trajectory import StopReason

if TYPE_CHECKING:
    from emailrl.agent import StepResult
    from emailrl.agent.email_agent import Answer
    from emailrl.mail import Email
    from emailrl.settings import AgentSettings

I_DONT_KNOW: Final = "I don't know."
NUM_HITS: Final = 3
"""Search hits shown per search."""
NUM_LINES: Final = 5
"""Quoted lines per source email."""
LONGEST_ID: Final = 200
"""Characters shown of a cited message id, which a model may make up."""
_FILTERS: Final = {"from_addr": "from", "to_addr": "to", "sent_after": "since", "sent_before": "before"}
_WHY: Final = {
    StopReason.RAN_OUT_OF_TURNS: "The model gave no answer within {turns} turns (MAX_TURNS).",
    StopReason.CANT_PARSE_TOOL_CALL: "The model wrote a tool call that cannot be parsed.",
    StopReason.BAD_TOOL_CALL_NAME: "The model called a tool that does not exist.",
    StopReason.BAD_TOOL_CALL_ARGS: "The model's tool call was missing or had invalid arguments.",
    StopReason.TRUNCATED: "The model's turn reached the token limit (MAX_TOKENS) or the context window.",
}


class Steps:
    """Shows the agent's steps as they end, and on a terminal a spinner in between; a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._stack.enter_context(self._console.status("thinking"))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def show(self, step: StepResult) -> None:
        """Print one step: a search and its hits, the email read, or why a call was refused."""
        for line in _lines(step):
            self._console.print(line, no_wrap=True, overflow="ellipsis")


def why_not(answer: Answer, agent: AgentSettings) -> str | None:
    """Why there is no answer; None if the model gave one, even "I don't know"."""
    if answer.answer is not None or answer.stop_reason is None:
        return None
    return _WHY.get(answer.stop_reason, f"No answer ({answer.stop_reason}).").format(turns=agent.max_turns)


def render_answer(answer: Answer) -> RenderableType:
    """Lay out the answer and its source emails: subject, sender, date and first lines."""
    from emailrl.facts.words import is_i_dont_know

    if answer.answer is None or is_i_dont_know(answer.answer):
        return Text(I_DONT_KNOW)
    parts: list[RenderableType] = [Text(answer.answer.strip(), style="bold")]
    held = {email.message_id: email for email in answer.emails}
    for message_id in answer.sources:
        parts.append(Text())
        if message_id in held:
            parts += _quoted(held[message_id])
        else:
            parts.append(Text(f"Source {cut(one_line(message_id), LONGEST_ID)}: not in this mailbox.", style="yellow"))
    if not answer.sources:
        parts.append(Text("No source cited.", style="yellow"))
    return Group(*parts)


def _quoted(email: Email) -> Iterator[RenderableType]:
    sent = email.date[:10] if email.date else "no date"
    yield Text(f"Source: {one_line(email.subject) or '(no subject)'}", style="bold cyan")
    yield Text(f"{one_line(email.from_address)}, {sent}", style="cyan")
    lines = [line for line in email.body.split("\n") if line.strip()]
    for line in lines[:NUM_LINES]:
        yield Padding(Text(f"> {one_line(line)}", no_wrap=True, overflow="ellipsis"), (0, 0, 0, 2), expand=False)
    if len(lines) > NUM_LINES:
        yield Text("  > …", style="dim")


def _lines(step: StepResult) -> Iterator[Text]:
    result = _parsed(step.tool_result)
    arguments = step.tool_args or {}
    if isinstance(result, dict) and "error" in result:
        yield _step("refused" if step.done else "failed", f"{step.tool_name or 'turn'}: {result['error']}", "yellow")
    elif step.tool_name == "search_emails" and isinstance(result, list):
        yield _step("search", f"{_wanted(arguments)}: {len(result)} hit{'s' * (len(result) != 1)}", "bold")
        for hit in result[:NUM_HITS]:
            yield _step("", re.sub("</?b>", "", hit["snippet"]), "dim")
    elif step.tool_name == "read_email" and isinstance(result, dict):
        sent = (result["date"] or "no date")[:10]
        yield _step("read", f"{result['subject']}, {result['from_address']}, {sent}", "bold")


def _step(name: str, text: str, style: str) -> Text:
    return Text.assemble((f"{name:<8}", "cyan"), (one_line(text), style))


def _wanted(arguments: dict[str, Any]) -> str:
    """The query and filters of a search, in words."""
    keywords = " ".join(json.dumps(word, ensure_ascii=False) for word in arguments["keywords"])
    filters = [f"{word} {arguments[name]}" for name, word in _FILTERS.items() if arguments.get(name)]
    return " ".join([keywords, *filters]).strip()


def _parsed(result: str | None) -> Any:
    return None if result is None else json.loads(result)
