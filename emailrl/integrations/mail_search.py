"""The mail-search task for trainers and evaluations of others, whose models call its tools one by one. Prompt, tools,
turns, rubric and reward are those of ``emailrl train``. What differs: each call of a turn is played, and counts as a
turn; a message without a call ends the conversation, which then counts as one that called nothing."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, Final, Self

from emailrl.agent.task import MailEnvironment, agent_mailbox, prompts
from emailrl.agent.tools import TOOLS, WITH_THREADS, to_json
from emailrl.base.errors import EmailRLError
from emailrl.engines.calls import checked_arguments
from emailrl.questions.load import Split, read_questions, with_questions
from emailrl.records.trajectory import Message, Scenario, ToolCall, Trajectory, Turn
from emailrl.rewards.scorer import Scorer, build_scorer
from emailrl.settings import Settings, load_settings
from emailrl.settings.tree import MAX_RESULTS

DB: Final = "mail.db"
OVER: Final = to_json({"note": "The conversation is over."})
Calls = Iterable[tuple[str, "str | dict[str, Any]"]]
"""The calls of one assistant message: names, and arguments as an object or its JSON."""


@cache
def shared(folder: Path | None = None) -> tuple[Settings, Scorer]:
    """The settings and their scorer: of this process, from emailrl.toml and the environment; or of a published
    environment's ``folder``, from its emailrl.toml alone, so that it is the same wherever it runs."""
    if folder is None:
        settings = load_settings()
    else:
        own = {"db": folder / DB, "judge": "offline"}
        settings = load_settings(own, cwd=folder, environ={}, dotenv=False)
    return settings, build_scorer(settings.rewards, settings.reward_weights, settings.agent)


def scenarios(split: Split | None, limit: int | None = None, folder: Path | None = None) -> list[Scenario]:
    """The questions of a split, in a mixed order; None: of all."""
    settings, _ = shared(folder)
    data, _ = with_questions(settings.data, settings.store.db)
    return read_questions(None, data).of(split, limit=limit, seed=settings.training.seed).scenarios


def prompt(scenario: Scenario, folder: Path | None = None) -> list[dict[str, str]]:
    """The first messages of a conversation, in the chat API's form."""
    task, asked = prompts(scenario, shared(folder)[0].agent)
    return [{"role": "system", "content": task}, {"role": "user", "content": asked}]


class Conversation:
    """One conversation about one mailbox, played call by call."""

    def __init__(self, scenario: Scenario, folder: Path | None = None) -> None:
        settings, self._scorer = shared(folder)
        agent, db = settings.agent, settings.store.db
        self._mailbox = agent_mailbox(agent, db, scenario.inbox_address, scenario.query_date)
        self._environment = MailEnvironment(scenario, self._mailbox, agent)
        self._trajectory = Trajectory(scenario.id, scenario.id, scenario, messages=self._environment.start())

    @property
    def is_over(self) -> bool:
        return self._trajectory.stop_reason is not None

    def play(self, name: str, arguments: str | dict[str, Any]) -> str:
        """Play one call; returns what the model is shown. A call that cannot be read ends the conversation."""
        message = Message("assistant", "")
        try:
            given = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
            message.tool_calls.append(ToolCall(name, checked_arguments(given)))
        except (ValueError, RecursionError) as error:
            message.parse_error = str(error)
        return self._step(message)

    def replay(self, turns: Iterable[Calls]) -> Self:
        """Play what another program recorded; a turn without a call ends it."""
        for turn in turns:
            calls = [self.play(name, arguments) for name, arguments in turn]
            if not calls:
                self._step(Message("assistant", ""))
        return self

    def scored(self) -> Trajectory:
        """End the conversation; returns it with its reward. EmailRLError if it gets none."""
        trajectory, environment = self._trajectory, self._environment
        self._step(Message("assistant", ""))
        trajectory.rubric = asdict(environment.rubric)
        trajectory.final_answer, trajectory.final_sources = environment.final_answer, environment.final_sources
        self._scorer.score([trajectory])
        if trajectory.exception is not None:
            raise EmailRLError(trajectory.exception)
        return trajectory

    def close(self) -> None:
        self._mailbox.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _step(self, message: Message) -> str:
        if self.is_over:
            return OVER
        result = self._environment.step(message)
        self._trajectory.messages += [message, *result.messages]
        turn = Turn([], [], "stop", result.tool_name, result.tool_args, result.tool_result)
        self._trajectory.turns.append(turn)
        self._trajectory.stop_reason = result.stop_reason
        return result.messages[0].content if result.messages else OVER


class MailSearch:
    """A conversation as an object whose public methods other than ``reset`` and ``get_reward`` are the model's tools:
    TRL makes an instance a rollout and resets it for the next. ``read_threads`` gives it the tool for threads."""

    def __new__(cls, folder: Path | None = None) -> MailSearch:
        return super().__new__(_WithThreads if shared(folder)[0].agent.read_threads else cls)

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._conversation: Conversation | None = None

    def reset(self, prompt: Any = None, **row: Any) -> None:
        """Begin the question of a row: a question's fields, by name."""
        if self._conversation is not None:
            self._conversation.close()
        self._conversation = Conversation(Scenario(**row), self._folder)

    def search_emails(
        self,
        keywords: list[str],
        from_addr: str | None = None,
        to_addr: str | None = None,
        sent_after: str | None = None,
        sent_before: str | None = None,
        max_results: int = MAX_RESULTS,
    ) -> str:
        given = {"from_addr": from_addr, "to_addr": to_addr, "sent_after": sent_after, "sent_before": sent_before}
        named = {name: value for name, value in given.items() if value is not None}
        return self._begun.play("search_emails", {"keywords": keywords, "max_results": max_results} | named)

    def read_email(self, message_id: str) -> str:
        return self._begun.play("read_email", {"message_id": message_id})

    def return_final_answer(self, answer: str, sources: list[str] | None) -> str:
        return self._begun.play("return_final_answer", {"answer": answer, "sources": sources})

    for _tool in (search_emails, read_email, return_final_answer):
        _tool.__doc__ = inspect.getdoc(TOOLS[_tool.__name__])
    del _tool

    def get_reward(self) -> float:
        """The reward of the conversation, which ends."""
        return self._begun.scored().reward

    @property
    def _begun(self) -> Conversation:
        if self._conversation is None:
            raise RuntimeError("reset() begins a conversation")
        return self._conversation


class _WithThreads(MailSearch):
    def read_thread(self, message_id: str) -> str:
        return self._begun.play("read_thread", {"message_id": message_id})

    read_thread.__doc__ = inspect.getdoc(WITH_THREADS["read_thread"])
