"""The mail-search task for TRL's trainers (``environment_factory``), without importing TRL::

    trainer = GRPOTrainer(model, train_dataset=rows("train"), environment_factory=MailSearch, args=...)

Prompt, tools, turns, rubric and reward are those of ``emailrl train``; the settings are those of the folder and the
environment. What differs is TRL's: it answers a call with an unknown name or argument itself, and goes on; each call of
a turn is played, and counts as a turn; the loop ends when the model stops calling, where a conversation without a final
answer is one that called nothing."""

from __future__ import annotations

import inspect
from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from emailrl.agent.task import mail_agent, prompts
from emailrl.agent.tools import MAX_RESULTS, TOOLS, to_json
from emailrl.base.errors import EmailRLError
from emailrl.mail import Mailbox, open_mailbox
from emailrl.questions.load import Split, read_questions, with_questions
from emailrl.records.trajectory import Message, Scenario, ToolCall, Trajectory, Turn
from emailrl.rewards.scorer import Scorer, build_scorer
from emailrl.settings import Settings, load_settings

if TYPE_CHECKING:
    from datasets import Dataset


OVER: Final = to_json({"note": "The conversation is over."})


@cache
def _shared() -> tuple[Settings, Scorer]:
    """The settings of this process, from emailrl.toml and the environment, and the scorer that they name."""
    settings = load_settings()
    return settings, build_scorer(settings.rewards, settings.reward_weights, settings.agent)


def rows(split: Split | None = "train", limit: int | None = None) -> Dataset:
    """The questions of a split as a dataset: a prompt, and what ``MailSearch.reset`` takes."""
    from datasets import Dataset

    settings, _ = _shared()
    data, _ = with_questions(settings.data, settings.store.db)
    chosen = read_questions(None, data).of(split, limit=limit, seed=settings.training.seed).scenarios
    agent = settings.agent
    made = [prompts(one, agent.max_turns, agent.question_template, agent.mailbox_in_question) for one in chosen]
    chats = [[{"role": "system", "content": task}, {"role": "user", "content": asked}] for task, asked in made]
    return Dataset.from_list([{"prompt": chat} | asdict(one) for chat, one in zip(chats, chosen, strict=True)])


class MailSearch:
    """One conversation about one mailbox. TRL makes an instance a rollout and resets it for the next; the public
    methods other than ``reset`` and ``get_reward`` are the model's tools."""

    def __init__(self) -> None:
        self._mailbox: Mailbox | None = None

    def reset(self, prompt: Any = None, **row: Any) -> None:
        """Begin the question of a row of ``rows``."""
        agent, db = _shared()[0].agent, _shared()[0].store.db
        if self._mailbox is not None:
            self._mailbox.close()
        scenario = Scenario(**row)
        how: dict[str, Any] = {"order": agent.search_order, "without_keywords": agent.search_without_keywords}
        self._mailbox = open_mailbox(db, scenario.inbox_address, scenario.query_date, **how)
        self._environment = mail_agent(agent, scenario, self._mailbox)
        self._trajectory = Trajectory(scenario.id, scenario.id, scenario, messages=self._environment.start())

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
        return self._play("search_emails", {"keywords": keywords, "max_results": max_results} | named)

    def read_email(self, message_id: str) -> str:
        return self._play("read_email", {"message_id": message_id})

    def return_final_answer(self, answer: str, sources: list[str] | None) -> str:
        return self._play("return_final_answer", {"answer": answer, "sources": sources})

    for _tool in (search_emails, read_email, return_final_answer):
        _tool.__doc__ = inspect.getdoc(TOOLS[_tool.__name__])
    del _tool

    def get_reward(self) -> float:
        """The reward of the conversation that ended."""
        trajectory = self._trajectory
        if trajectory.stop_reason is None:
            self._step(Message("assistant", ""))
        trajectory.rubric = asdict(self._environment.rubric)
        trajectory.final_answer, trajectory.final_sources = (
            self._environment.final_answer,
            self._environment.final_sources,
        )
        _shared()[1].score([trajectory])
        if trajectory.exception is not None:
            raise EmailRLError(trajectory.exception)
        return trajectory.reward

    def _play(self, name: str, arguments: dict[str, Any]) -> str:
        return self._step(Message("assistant", "", [ToolCall(name, arguments)]))

    def _step(self, message: Message) -> str:
        """Play one call; returns what the model is shown."""
        if self._trajectory.stop_reason is not None:
            return OVER
        result = self._environment.step(message)
        self._trajectory.messages += [message, *result.messages]
        turn = Turn([], [], "stop", result.tool_name, result.tool_args, result.tool_result)
        self._trajectory.turns.append(turn)
        self._trajectory.stop_reason = result.stop_reason
        return result.messages[0].content if result.messages else OVER
