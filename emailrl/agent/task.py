"""The tasks. The mail-search task after ART-E: one scenario on one mailbox, its prompt and its rubric. The rules are
ART-E's (native tools): one tool call per turn, the first of several; an unparsable call, an unknown tool or bad
arguments end the trajectory without feedback; so does the final answer. And user-defined environments, by Python path
(``emailrl.base.custom``). A user's ``make(scenario, mailbox, settings)`` returns, for each trajectory, an object with
``start()`` → first messages and ``step(message)`` → ``StepResult``; ``final_answer``, ``final_sources`` and ``rubric``
(a dict or a dataclass) are read if present, as are the maker's own ``tools`` (OpenAI function schemas, by default the
mail tools)."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from emailrl.agent.tools import (
    EMAIL_NOT_FOUND,
    MAX_READ_ADDRESSES,
    TOOLS,
    call_tool,
    check_arguments,
    to_json,
    tool_schemas,
    tools_of,
)
from emailrl.base.custom import CustomPart, load_part
from emailrl.base.errors import EmailRLError, ToolError, UsageError
from emailrl.base.plain import cut
from emailrl.facts.words import is_i_dont_know
from emailrl.records.trajectory import Message, Scenario, StopReason, ToolCall
from emailrl.settings import AgentSettings, PlayingSettings
from emailrl.settings.tree import MAX_RESULTS

if TYPE_CHECKING:
    from pathlib import Path

    from emailrl.mail import Email, Mailbox

MAIL: Final = "mail"
DEFAULTS: Final = PlayingSettings()
SYSTEM_PROMPT = """\
You are an email search agent. Answer the user's question by searching the user's own mailbox with the tools you are \
given: search for keywords, read the emails that look right, then return the final answer together with the message \
ids that support it. You have at most {max_turns} turns, one tool call each, so if a search finds nothing useful, try \
other keywords. If the answer is not in the mailbox, return "I don't know" as the answer and no sources."""
WHOSE_MAILBOX = """\
The user's email address is {inbox_address}.
Today's date is {query_date}."""  # With the prompt this is ART-E's substance: task, turns, mailbox and date

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
    thinking_tokens: int | None = None  # of them, in thoughts; None if a chat server does not report them
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
    with the result of each step. ``earlier`` turns of the user's conversation stand before the question."""

    def __init__(
        self,
        scenario: Scenario,
        mailbox: Mailbox,
        agent: AgentSettings = DEFAULTS.agent,
        *,
        report: Callable[[StepResult], None] = lambda result: None,
        earlier: Sequence[Message] = (),
    ) -> None:
        self.scenario, self.mailbox, self.agent, self.report, self.earlier = scenario, mailbox, agent, report, earlier
        self.tools = tools_of(agent)
        self._shown: dict[str, str] = {}  # message ids by the short ones of this conversation
        self.rubric = Rubric()
        self.final_answer: str | None = None
        self.final_sources: list[str] = []
        self._sources = frozenset(scenario.evidence)
        self._state = "new"

    def start(self) -> list[Message]:
        if self._state != "new":
            raise RuntimeError("a MailEnvironment plays one trajectory: make another")
        self._state = "running"
        system, user = prompts(self.scenario, self.agent)
        return [Message("system", system), *self.earlier, Message("user", user)]

    def message_id(self, shown: str) -> str:
        """The message id of an email as the conversation names it."""
        return self._shown.get(shown, shown)

    def step(self, message: Message) -> StepResult:
        """Play one assistant message; the last allowed turn is the end. Errors of the mailbox itself are raised."""
        if self._state != "running":
            raise RuntimeError(f"step() on a MailEnvironment that is {self._state}")
        self.rubric.num_turns += 1
        result = self._play(message)
        if not result.done and self.rubric.num_turns >= self.agent.max_turns:
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
        if call.name not in self.tools:
            return self._refuse(StopReason.BAD_TOOL_CALL_NAME, f"Unknown tool: {call.name!r}.", call)
        try:
            value, shown = self._call(call.name, call.arguments)
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
            emails = value if isinstance(value, list) else [value]
            rubric.ever_read_right_email |= any(each["message_id"] in self._sources for each in emails)
        result = to_json(value)
        told = result if shown is value else to_json(shown)
        reply = Message("tool", told, tool_call_id=call.id, name=call.name)
        return StepResult([reply], False, call.name, call.arguments, result)

    def _call(self, name: str, arguments: dict[str, Any]) -> tuple[Any, Any]:
        """What a tool returns, and what the conversation shows of it; ToolError for bad arguments."""
        if name in ("read_email", "read_thread") and isinstance(asked := arguments.get("message_id"), str):
            arguments = arguments | {"message_id": self.message_id(asked)}
        value = shown = call_tool(self.mailbox, name, arguments)
        if name != "return_final_answer" and value is not EMAIL_NOT_FOUND:
            shown = with_names(self.mailbox, shown) if self.agent.show_names else shown
            if self.agent.short_message_ids:
                shown = [*map(self._shortened, shown)] if isinstance(shown, list) else self._shortened(shown)
        if self.agent.count_matches and name == "search_emails":
            others = {key: given for key, given in arguments.items() if key != "max_results"}
            is_all = len(value) < arguments.get("max_results", MAX_RESULTS)
            shown = {"matches": len(value) if is_all else self.mailbox.count(**others), "emails": shown}
        return value, shown

    def _shortened(self, email: dict[str, Any]) -> dict[str, Any]:
        """An email under its short id, a new one if it was not shown yet."""
        own = email["message_id"]
        short = next((short for short, known in self._shown.items() if known == own), f"m{len(self._shown) + 1}")
        self._shown[short] = own
        return email | {"message_id": short}

    def _refuse(self, reason: StopReason, error: str, call: ToolCall | None = None) -> StepResult:
        setattr(self.rubric, reason, True)  # its fields have the reasons' names
        name, arguments = (call.name, call.arguments) if call else (None, None)
        return StepResult([], True, name, arguments, to_json({"error": error}), reason)

    def _take_answer(self, answer: str, sources: list[str]) -> None:
        sources = list(map(self.message_id, sources))
        self.final_answer, self.final_sources = answer, sources
        self.rubric.num_sources = len(set(sources))
        self.rubric.returned_i_dont_know = is_i_dont_know(answer)
        self.rubric.attempted_answer = not self.rubric.returned_i_dont_know
        self.rubric.sources_correct = self.rubric.attempted_answer and cites_sources(self.scenario, sources)


def with_names(mailbox: Mailbox, shown: Any) -> Any:
    """A hit or an email, or several, as shown, with names, place in the thread, attachments and kind of sender."""
    if isinstance(shown, list):
        return [with_names(mailbox, each) for each in shown]
    if (email := mailbox.read(shown["message_id"])) is None:
        return shown
    thread, own = mailbox.thread(email), dict(shown)
    last = {name: own.pop(name) for name in ("snippet", "body", "file_name") if name in own}
    for name, value in own.items():
        if "_address" in name:
            own[name] = [*map(email.named, value)] if isinstance(value, list) else email.named(value)
    place = f"{thread.index(email.message_id) + 1} of {len(thread)}" if len(thread) > 1 else ""
    more: dict[str, Any] = {"thread": place, "machine": email.machine}
    if "snippet" in last:
        more = {"from": email.from_name or email.from_address, "date": (email.date or "")[:10]} | more
    else:
        more["attachments"] = email.attachments[:MAX_READ_ADDRESSES]
    return own | {name: value for name, value in more.items() if value} | last


def cites_sources(scenario: Scenario, sources: list[str]) -> bool:
    """Whether the cited emails hold the answer: a source email or twin is among them, or all sources if needed."""
    if scenario.needs_all:
        return set(scenario.message_ids).issubset(sources)
    return not set(scenario.evidence).isdisjoint(sources)


def prompts(scenario: Scenario, agent: AgentSettings) -> tuple[str, str]:
    """The system prompt and the user's message."""
    task, question = SYSTEM_PROMPT.format(max_turns=agent.max_turns), agent.question_template
    whose = WHOSE_MAILBOX.format(inbox_address=scenario.inbox_address, query_date=scenario.query_date)
    question = question.replace("{}", scenario.question)
    return (task, f"{whose}\n\n{question}") if agent.mailbox_in_question else (f"{task}\n\n{whose}", question)


class StaticPromptEnvironment(MailEnvironment):
    """Mode ``simple``: the question and a few emails in one prompt, one completion, no tool execution. The emails are
    the question's source emails and others that share a word with it, in an order fixed by the scenario's id, so the
    prompt suffices to answer; the heuristic reward (``rewards.rubric``) also values a good first search."""

    def start(self) -> list[Message]:
        mails = "\n\n".join(
            f"[{mail.message_id}] {mail.date}\nFrom: {mail.from_address}\nSubject: {mail.subject}\n"
            f"{mail.body if len(mail.body) <= MAX_BODY_CHARS else mail.body[:MAX_BODY_CHARS] + ' ...'}"
            for mail in self._mails()
        )
        system, question = prompts(self.scenario, self.agent.model_copy(update={"max_turns": 1}))
        question += f"\n\nSome emails of the mailbox:\n\n{mails}" if mails else ""
        return [Message("system", system), Message("user", question)]

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


@dataclass(frozen=True, slots=True)
class Task:
    """A task: a maker of environments, one per trajectory, and the policy's tools."""

    make: Callable[[Scenario, Mailbox], MailEnvironment | CustomEnvironment]
    tools: list[dict[str, Any]]


def load_task(name: str, settings: PlayingSettings = DEFAULTS) -> Task:
    """The task for a name, ``mail`` or a Python path; raises UsageError if it cannot be loaded."""
    if name == MAIL:
        return Task(partial(MailEnvironment, agent=settings.agent), tool_schemas(settings.agent))
    if ":" not in name:
        raise UsageError(f"Unknown environment: {name!r}.", "Use mail, module:attribute or path.py:attribute.")
    part = load_part(name, "environment")
    own: Any = getattr(part.call, "tools", None)
    tools = tool_schemas(settings.agent) if own is None else [own]
    tools = own if isinstance(own, list) else tools
    for tool in tools:
        if not isinstance(tool, dict) or not isinstance(tool.get("function", {}).get("name"), str):
            hint = 'Expected {"type": "function", "function": {"name": …, "parameters": …}}.'
            raise UsageError(f"The environment {part.name} has tools that are not function schemas.", hint)
    return Task(lambda scenario, mailbox: CustomEnvironment(part, scenario, mailbox, settings), tools)


def agent_mailbox(agent: AgentSettings, db: Path, inbox: str, until: str | None) -> Mailbox:
    """The mailbox as the agent's tools search it, of any address. Raises as ``open_mailbox``."""
    from emailrl.mail import open_mailbox

    how = agent.search_order, agent.search_without_keywords, agent.show_names
    return open_mailbox(db, inbox, until, *how, allow_unknown=True)


class CustomEnvironment:
    """The user's environment for one trajectory, with its results validated. It ends after ``max_turns`` turns
    regardless of the user's code. The rubric has all of ART-E's fields, with those independent of mail tools filled in,
    updated with the user's own. An exception or invalid result in the user's code is raised as an EmailRLError from
    ``start`` or ``step``; for an exception it names file and line."""

    def __init__(self, part: CustomPart, scenario: Scenario, mailbox: Mailbox, settings: PlayingSettings) -> None:
        self.scenario = scenario
        self.rubric: dict[str, Any] = asdict(Rubric())
        self.final_answer: str | None = None
        self.final_sources: list[str] = []
        self._part = part
        self._arguments = scenario, mailbox, settings
        self._inner: Any = None
        self._num_turns = 0

    def start(self) -> list[Message]:
        """Create the user's environment; returns its first messages."""
        self._inner = self._call("making", self._part.call, *self._arguments)
        for method in ("start", "step"):
            is_there = callable(getattr(self._inner, method, None))
            self._expect(is_there, "making", self._inner, f"an object with {method}()")
        messages = self._checked("start() of", self._call("start() of", self._inner.start))
        self._expect(bool(messages), "start() of", messages, "at least one Message")
        return list(messages)

    def step(self, message: Message) -> StepResult:
        """Play one assistant message; the last allowed turn ends the trajectory."""
        self._num_turns += 1
        what = "step() of"
        result: StepResult = self._call(what, self._inner.step, message)
        self._expect(isinstance(result, StepResult), what, result, "a StepResult (emailrl.agent)")
        self._checked(what, result.messages)
        self._expect(isinstance(result.done, bool), what, result.done, "a bool as done")
        reason, reasons = result.stop_reason, "a StopReason (emailrl.records.trajectory) or None"
        self._expect(isinstance(reason, StopReason | None), what, reason, reasons)
        self._call("the tool_args of", json.dumps, result.tool_args)
        ran_out = not result.done and self._num_turns >= self._arguments[2].agent.max_turns
        if ran_out:
            result.done, result.stop_reason = True, StopReason.RAN_OUT_OF_TURNS
        self._call("the rubric of", self._take_verdict, ran_out)
        if result.done and result.stop_reason is None:
            result.stop_reason = StopReason.COMPLETED if self.final_answer is None else StopReason.ANSWERED
        return result

    def _take_verdict(self, ran_out: bool) -> None:
        """Copy answer, sources and rubric here, so that an error in reading them ends only this trajectory."""
        answer: Any = getattr(self._inner, "final_answer", None)
        self.final_answer = answer = None if answer is None else str(answer)
        self.final_sources = [str(source) for source in getattr(self._inner, "final_sources", None) or ()]
        given_up = answer is not None and is_i_dont_know(answer)
        attempted = answer is not None and not given_up
        known = Rubric(
            num_turns=self._num_turns + ran_out,  # one more when out of turns, as the mail environment counts
            ran_out_of_turns=ran_out,
            attempted_answer=attempted,
            returned_i_dont_know=given_up,
            num_sources=len(set(self.final_sources)),
            sources_correct=attempted and cites_sources(self.scenario, self.final_sources),
        )
        rubric: Any = getattr(self._inner, "rubric", None)
        if is_dataclass(rubric) and not isinstance(rubric, type):
            rubric = asdict(rubric)
        for name, value in (own := dict(rubric or {})).items():
            if not isinstance(value, int | float | str | None):
                raise TypeError(f"{name!r} is a {type(value).__name__}, not a number, a bool or a string")
        self.rubric = asdict(known) | own

    def _call(self, what: str, function: Callable[..., Any], *arguments: object) -> Any:
        return self._part.run(f"{what} the environment", function, *arguments)

    def _checked(self, what: str, messages: Any) -> list[Message]:
        given = messages if isinstance(messages, list) else [messages]
        are_texts = all(isinstance(one, Message) and isinstance(one.content, str) for one in given)
        wanted = "a list of Messages (emailrl.records.trajectory) with text"
        self._expect(given is messages and are_texts, what, messages, wanted)
        # No tokenizer or server accepts half of a character.
        half = re.search("[\ud800-\udfff]", "".join(message.content for message in given))
        self._expect(half is None, what, half and half[0], "valid Unicode: a Message contains a lone surrogate")
        return given

    def _expect(self, holds: bool, what: str, value: object, wanted: str) -> None:
        if not holds:
            shown = cut(" ".join(repr(value).split()), 80)
            raise EmailRLError(f"{what} the environment {self._part.name} returned {shown}, not {wanted}.")
