"""Mode ``simple``: the question and a few emails in one static prompt, one completion, no tool execution.

The emails are the question's source emails and others that share a word with it, in an order fixed by the scenario's
id, so the prompt suffices to answer; the heuristic reward (``rewards.rubric``) also values a good first search.
"""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING

from emailrl.agent.mail_env import MailEnvironment, StepResult, system_prompt
from emailrl.agent.tools import TOOLS, check_arguments
from emailrl.base.errors import ToolError
from emailrl.records.trajectory import Message, Scenario, StopReason

if TYPE_CHECKING:
    from emailrl.mail import Email, Mailbox
    from emailrl.settings import AgentSettings

MAX_MAILS = 3
MAX_BODY_CHARS = 600  # Longer bodies are cut, so that prompt and completion fit
_MIN_WORD = 5  # Shorter words of a question say little about related emails


class StaticPromptEnvironment(MailEnvironment):
    """A single-use environment that ends after one message."""

    def __init__(self, agent: AgentSettings, scenario: Scenario, mailbox: Mailbox) -> None:
        super().__init__(scenario, mailbox, max_turns=1, question_template=agent.question_template)

    def start(self) -> list[Message]:
        """The system message, and the question followed by the mails."""
        mails = "\n\n".join(map(_render, self._mails()))
        question = self.question_template.replace("{}", self.scenario.question)
        if mails:
            question += f"\n\nSome emails of the mailbox:\n\n{mails}"
        return [Message("system", system_prompt(self.scenario, max_turns=1)), Message("user", question)]

    def step(self, message: Message) -> StepResult:
        """Read the one completion; a well-formed final answer counts as an attempt, no tool is run."""
        self.rubric.num_turns = 1
        call = message.tool_calls[0] if message.parse_error is None and message.tool_calls else None
        self.rubric.cant_parse_tool_call = message.parse_error is not None
        self.rubric.bad_tool_call_args = message.parse_error is None and call is None
        if call is None:
            return StepResult(done=True, stop_reason=StopReason.COMPLETED)
        try:
            if call.name not in TOOLS:
                self.rubric.bad_tool_call_name = True
            else:
                check_arguments(call.name, call.arguments)
                if call.name == "return_final_answer":
                    self._take_answer(call.arguments["answer"], call.arguments["sources"] or [])
        except ToolError:
            self.rubric.bad_tool_call_args = True
        return StepResult([], True, call.name, call.arguments, None, StopReason.COMPLETED)

    def _mails(self) -> list[Email]:
        rng = random.Random(self.scenario.id)
        ids = list(self.scenario.message_ids[:MAX_MAILS])
        words = sorted({word for word in re.findall(r"\w+", self.scenario.question) if len(word) >= _MIN_WORD})
        rng.shuffle(words)
        for word in words:
            if len(ids) >= MAX_MAILS:
                break
            ids += [hit.message_id for hit in self.mailbox.search([word], max_results=2) if hit.message_id not in ids]
        mails = [mail for mail in map(self.mailbox.read, ids[:MAX_MAILS]) if mail is not None]
        rng.shuffle(mails)
        return mails


def _render(mail: Email) -> str:
    body = mail.body if len(mail.body) <= MAX_BODY_CHARS else mail.body[:MAX_BODY_CHARS] + " ..."
    return f"[{mail.message_id}] {mail.date}\nFrom: {mail.from_address}\nSubject: {mail.subject}\n{body}"
