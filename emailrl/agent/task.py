"""User-defined environments, by Python path (``emailrl.base.custom``), and the one that ``environment`` names. A user's
``make(scenario, mailbox, settings)`` returns, for each trajectory, an object with ``start()`` → first messages and
``step(message)`` → ``StepResult``; ``final_answer``, ``final_sources`` and ``rubric`` (a dict or a dataclass) are read
if present, as are the maker's own ``tools`` (OpenAI function schemas, by default the mail tools)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from emailrl.agent.mail_env import MailEnvironment, Rubric, StepResult, cites_sources
from emailrl.agent.tools import tool_schemas
from emailrl.base.custom import CustomPart, load_part
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.plain import cut
from emailrl.facts.words import is_i_dont_know
from emailrl.records.trajectory import Message, Scenario, StopReason
from emailrl.settings import AgentSettings, PlayingSettings

if TYPE_CHECKING:
    from emailrl.mail import Mailbox

MAIL: Final = "mail"
DEFAULTS: Final = PlayingSettings()


@dataclass(frozen=True, slots=True)
class Task:
    """A task: a maker of environments, one per trajectory, and the policy's tools."""

    make: Callable[[Scenario, Mailbox], MailEnvironment | CustomEnvironment]
    tools: list[dict[str, Any]]


def load_task(name: str, settings: PlayingSettings = DEFAULTS) -> Task:
    """The task for a name, ``mail`` or a Python path; raises UsageError if it cannot be loaded."""
    if name == MAIL:
        return Task(partial(mail_agent, settings.agent), tool_schemas(settings.agent))
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


def mail_agent(
    agent: AgentSettings,
    scenario: Scenario,
    mailbox: Mailbox,
    report: Callable[[StepResult], None] = lambda result: None,
) -> MailEnvironment:
    """The mailbox with its tools; ``report`` is called with the result of each step."""
    max_turns, template = agent.max_turns, agent.question_template
    return MailEnvironment(scenario, mailbox, max_turns=max_turns, question_template=template, report=report)


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
