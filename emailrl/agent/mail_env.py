"""The mail-search task after ART-E: one scenario on one mailbox, its prompt and its rubric. The rules are ART-E's
(native tools): one tool call per turn, the first of several; an unparsable call, an unknown tool or bad arguments end
the trajectory without feedback; so does the final answer."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from emailrl.agent.tools import EMAIL_NOT_FOUND, TOOLS, call_tool, check_arguments, to_json
from emailrl.base.errors import ToolError
from emailrl.facts.words import is_i_dont_know
from emailrl.records.trajectory import Message, Scenario, StopReason, ToolCall

if TYPE_CHECKING:
    from emailrl.mail import Email, Mailbox
    from emailrl.settings import AgentSettings

SYSTEM_PROMPT = """\
You are an email search agent. Answer the user's question by searching the user's own mailbox with the tools you are \
given: search for keywords, read the emails that look right, then return the final answer together with the message \
ids that support it. You have at most {max_turns} turns, one tool call each, so if a search finds nothing useful, try \
other keywords. If the answer is not in the mailbox, return "I don't know" as the answer and no sources.

The user's email address is {inbox_address}.
Today's date is {query_date}."""  # ART-E's substance: the task, the number of turns, whose mailbox, and today's date

MAX_MAILS = 3
MAX_BODY_CHARS = 600  # Longer bodies are cut, so that prompt and completion fit
_MIN_WORD = 5  # Shorter words of a question say little about related emails


@dataclass(slots=True)
class Rubric:
    """ART-E's rubric of one trajectory; ``dataclasses.asdict`` of it is ``Trajectory.rubric``. The environment fills
    everything but ``answer_correct`` and what follows the token counts (the scorer), and these (the runner).
    Differences from ART-E, each fixing a defect: success counts any of the scenario's source emails, not only the first
    (one is enough, as a question's source emails usually repeat the same fact); an email counts as read only when the
    tool returned it; ``num_sources`` is set, and counts distinct ids."""

    answer_correct: bool = False
    sources_correct: bool = False
    num_turns: int = 0  # Completions so far; ``max_turns + 1`` when the agent ran out of turns, as in ART-E
    attempted_answer: bool = False
    ever_found_right_email: bool = False
    ever_read_right_email: bool = False
    cant_parse_tool_call: bool = False
    bad_tool_call_name: bool = False
    bad_tool_call_args: bool = False
    ran_out_of_turns: bool = False
    returned_i_dont_know: bool = False
    num_sources: int = 0
    ever_tried_to_read_invalid_email: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    answer_words: int | None = None
    """Length of an attempted answer; this and the fields below are None without one, so that means are over answers."""
    answer_candidates: int | None = None  # How many candidate answers it offers (``rewards.scorer.count_candidates``)
    answer_capitals: float | None = None  # Share of capitals among its letters
    offline_correct: bool | None = None
    """The offline check's verdict, if a judge decided and the answer is in the compared sample."""


@dataclass(slots=True)
class StepResult:
    """The environment's response to one assistant message."""

    messages: list[Message] = field(default_factory=list)
    """To append to the conversation: the tool's result, or nothing when the trajectory ended without one."""
    done: bool = False
    tool_name: str | None = None
    tool_args: dict[str, Any] | None = None
    tool_result: str | None = None
    """JSON: what the tool returned, or ``{"error": …}`` for a call that ended the trajectory (recorded, never shown
    to the model). None for a final answer."""
    stop_reason: StopReason | None = None


class MailEnvironment:
    """A mailbox and a question, single use: ``start()`` once, then ``step(message)`` until ``done``. ``mailbox`` must
    be opened on the scenario's inbox, up to its query date; the environment does not close it. ``report`` is called
    with the result of each step."""

    def __init__(
        self,
        scenario: Scenario,
        mailbox: Mailbox,
        *,
        max_turns: int,
        question_template: str = "{}",
        report: Callable[[StepResult], None] = lambda result: None,
    ) -> None:
        self.scenario, self.mailbox, self.max_turns = scenario, mailbox, max_turns
        self.question_template, self.report = question_template, report
        self.rubric = Rubric()
        self.final_answer: str | None = None
        self.final_sources: list[str] = []
        self._sources = frozenset(scenario.message_ids)
        self._state = "new"

    def start(self) -> list[Message]:
        """The system message and the question."""
        if self._state != "new":
            raise RuntimeError("a MailEnvironment plays one trajectory: make another")
        self._state = "running"
        return [
            Message("system", system_prompt(self.scenario, self.max_turns)),
            Message("user", self.question_template.replace("{}", self.scenario.question)),
        ]

    def step(self, message: Message) -> StepResult:
        """Play one assistant message; the last allowed turn is the end. Errors of the mailbox itself are raised."""
        if self._state != "running":
            raise RuntimeError(f"step() on a MailEnvironment that is {self._state}")
        self.rubric.num_turns += 1
        result = self._play(message)
        if not result.done and self.rubric.num_turns >= self.max_turns:
            self.rubric.num_turns += 1
            self.rubric.ran_out_of_turns = True
            result.done, result.stop_reason = True, StopReason.RAN_OUT_OF_TURNS
        if result.done:
            self._state = "over"
        self.report(result)
        return result

    def _play(self, message: Message) -> StepResult:
        rubric, call = self.rubric, message.tool_calls[0] if message.tool_calls else None
        if message.parse_error is not None:
            return self._refuse(StopReason.CANT_PARSE_TOOL_CALL, message.parse_error)
        if call is None:
            return self._refuse(StopReason.BAD_TOOL_CALL_ARGS, "No tool call.")
        if call.name not in TOOLS:
            return self._refuse(StopReason.BAD_TOOL_CALL_NAME, f"Unknown tool: {call.name!r}.", call)
        try:
            value = call_tool(self.mailbox, call.name, call.arguments)
        except ToolError as error:
            return self._refuse(StopReason.BAD_TOOL_CALL_ARGS, str(error), call)
        if call.name == "return_final_answer":
            self._take_answer(call.arguments["answer"], call.arguments["sources"] or [])
            return StepResult([], True, call.name, call.arguments, None, StopReason.ANSWERED)
        if call.name == "search_emails":
            rubric.ever_found_right_email |= any(hit["message_id"] in self._sources for hit in value)
        elif value is EMAIL_NOT_FOUND:
            rubric.ever_tried_to_read_invalid_email = True
        else:
            rubric.ever_read_right_email |= value["message_id"] in self._sources
        content = to_json(value)
        reply = Message("tool", content, tool_call_id=call.id, name=call.name)
        return StepResult([reply], False, call.name, call.arguments, content)

    def _refuse(self, reason: StopReason, error: str, call: ToolCall | None = None) -> StepResult:
        setattr(self.rubric, reason, True)  # its fields have the reasons' names
        name, arguments = (call.name, call.arguments) if call else (None, None)
        return StepResult([], True, name, arguments, to_json({"error": error}), reason)

    def _take_answer(self, answer: str, sources: list[str]) -> None:
        self.final_answer, self.final_sources = answer, sources
        self.rubric.num_sources = len(set(sources))
        self.rubric.returned_i_dont_know = is_i_dont_know(answer)
        self.rubric.attempted_answer = not self.rubric.returned_i_dont_know
        self.rubric.sources_correct = self.rubric.attempted_answer and cites_sources(self.scenario, sources)


def cites_sources(scenario: Scenario, sources: list[str]) -> bool:
    """Whether the cited emails hold the answer: any source email among them, or all if all are needed."""
    wanted = set(scenario.message_ids)
    return wanted.issubset(sources) if scenario.needs_all else not wanted.isdisjoint(sources)


def system_prompt(scenario: Scenario, max_turns: int) -> str:
    """The system message of one scenario."""
    names = {"inbox_address": scenario.inbox_address, "query_date": scenario.query_date}
    return SYSTEM_PROMPT.format(max_turns=max_turns, **names)


class StaticPromptEnvironment(MailEnvironment):
    """Mode ``simple``: the question and a few emails in one prompt, one completion, no tool execution. The emails are
    the question's source emails and others that share a word with it, in an order fixed by the scenario's id, so the
    prompt suffices to answer; the heuristic reward (``rewards.rubric``) also values a good first search."""

    def __init__(self, agent: AgentSettings, scenario: Scenario, mailbox: Mailbox) -> None:
        super().__init__(scenario, mailbox, max_turns=1, question_template=agent.question_template)

    def start(self) -> list[Message]:
        """The system message, and the question followed by the mails."""
        mails = "\n\n".join(map(_shortened, self._mails()))
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
        self.rubric.bad_tool_call_name = call.name not in TOOLS
        try:
            if call.name in TOOLS:
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


def _shortened(mail: Email) -> str:
    body = mail.body if len(mail.body) <= MAX_BODY_CHARS else mail.body[:MAX_BODY_CHARS] + " ..."
    return f"[{mail.message_id}] {mail.date}\nFrom: {mail.from_address}\nSubject: {mail.subject}\n{body}"
