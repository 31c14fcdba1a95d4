"""The mail-search task for Inspect, with the settings of the folder and the environment::

inspect eval emailrl/mail_search --model openai/gpt-5-mini -T split=test --limit 20
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessageSystem, ChatMessageUser
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer, stderr
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.tool import Tool, ToolDef

from emailrl.agent.tools import tools_of
from emailrl.integrations.mail_search import Calls, Conversation, MailSearch, prompt, scenarios, shared
from emailrl.questions.load import Split
from emailrl.records.trajectory import Scenario

NO_LIMIT: Final = 0


@task
def mail_search(split: Split = "test") -> Task:
    """Questions about the folder's mailbox."""
    samples = []
    for scenario in scenarios(split):
        system, user = (message["content"] for message in prompt(scenario))
        chat = [ChatMessageSystem(content=system), ChatMessageUser(content=user)]
        samples.append(Sample(chat, target=scenario.answer, id=scenario.id, metadata=asdict(scenario)))
    return Task(MemoryDataset(samples, name="mail_search"), solver=search(), scorer=reward())


@solver
def search() -> Solver:
    """Let the model call tools until the conversation is over."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        mailbox = MailSearch()
        mailbox.reset(**state.metadata)
        state.tools = [_tool(mailbox, name) for name in tools_of(shared()[0].agent)]
        is_over = False
        while not is_over and not state.completed:
            state = await generate(state, tool_calls="single")
            with Conversation(Scenario(**state.metadata)) as conversation:
                is_over = conversation.replay(_turns(state.messages)).is_over
        return state

    return solve


@scorer(metrics={"*": [mean(), stderr()]})
def reward() -> Scorer:
    """Whether the answer is right, and the reward of the conversation."""

    async def score(state: TaskState, target: Target) -> Score:
        with Conversation(Scenario(**state.metadata)) as conversation:
            ended = conversation.replay(_turns(state.messages)).scored()
        value = {"accuracy": float(bool(ended.rubric["answer_correct"])), "reward": ended.reward}
        told = {"reward_terms": ended.reward_terms, "rubric": ended.rubric, "stop_reason": ended.stop_reason}
        return Score(value=value, answer=ended.final_answer, metadata=told)

    return score


def _turns(messages: Sequence[Any]) -> Iterator[Calls]:
    """The calls of each assistant message; one that Inspect could not read is one that we cannot read either."""
    for message in messages:
        if message.role == "assistant":
            calls = message.tool_calls or ()
            yield [(call.function, call.arguments if call.parse_error is None else call.parse_error) for call in calls]


def _tool(mailbox: MailSearch, name: str) -> Tool:
    method = getattr(mailbox, name)

    @functools.wraps(method)
    async def call(**arguments: Any) -> str:
        return str(method(**arguments))

    return ToolDef(call, name, max_output=NO_LIMIT).as_tool()
