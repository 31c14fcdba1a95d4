"""Conversations of searchers with the real tools, on the questions of a set."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

from emailrl.agent.mail_env import MailEnvironment
from emailrl.agent.task import mail_agent
from emailrl.mail import open_mailbox
from emailrl.questions import Split, load_scenario_set
from emailrl.records.trajectory import Message, Scenario
from emailrl.rewards.matching import match
from emailrl.settings import Settings
from emailrl.sft.examples import converse
from emailrl.sft.searching.asked import ShownMail, answer_of, read_question
from emailrl.sft.searching.searcher import PLANS, Given, Habits, Searcher, by_topic, by_words


def conversations(
    settings: Settings, *, split: Split = "train", seed: int, draw: int = 0
) -> Iterator[tuple[Scenario, list[Message]]]:
    """Searchers' conversations on the questions of a split that end in a correct answer; deterministic by ``seed``.

    Another ``draw`` gives other routes on the same questions; another seed may also choose other questions. Template
    questions are answered from the emails read. Free-form questions, and all if ``output_field`` is set, are answered
    with the reference answer (or that field) once one of their source emails was read.
    """
    yield from conversations_on(questions_of(settings, split, seed), settings, seed=seed, draw=draw)


def questions_of(settings: Settings, split: Split, seed: int) -> list[Scenario]:
    """The questions of a split that experts are asked."""
    data = settings.data
    limit = data.train_dataset_size if split == "train" else data.eval_dataset_size
    taught = data.model_copy(update={"answer_field": data.output_field or data.answer_field})
    return load_scenario_set(None, split, limit=limit, seed=seed, data=taught).scenarios


def conversations_on(
    questions: Iterable[Scenario], settings: Settings, *, seed: int, draw: int = 0
) -> Iterator[tuple[Scenario, list[Message]]]:
    """The conversations on these questions that end in a correct answer."""
    for scenario in questions:
        environment, messages = play(scenario, settings, Habits(), random.Random(f"{seed}/{draw}/{scenario.id}"))
        if is_right(environment):
            yield scenario, messages


def play(
    scenario: Scenario, settings: Settings, habits: Habits, rng: random.Random
) -> tuple[MailEnvironment, list[Message]]:
    """One conversation and its environment."""
    agent, me = settings.agent, scenario.inbox_address
    asked = None if settings.data.output_field else read_question(scenario.question)

    def judge(mail: ShownMail) -> str | None:
        if asked is not None:
            return answer_of(asked, mail, me)
        return scenario.answer if mail["message_id"] in scenario.message_ids else None

    plan = by_words if asked is None else PLANS.get(asked.kind, by_topic)
    given = Given(scenario.question, asked, me, scenario.query_date)
    searcher = Searcher(given, plan, judge, agent=agent, habits=habits, rng=rng)
    order, without_keywords = agent.search_order, agent.search_without_keywords
    with open_mailbox(
        settings.store.db, me, scenario.query_date, order=order, without_keywords=without_keywords
    ) as mailbox:
        environment = mail_agent(agent, scenario, mailbox)
        return environment, converse(environment, searcher)


def is_right(environment: MailEnvironment) -> bool:
    """Whether a conversation ended in the reference answer or one that agrees with it."""
    scenario, answer = environment.scenario, environment.final_answer
    if answer is None or answer == scenario.answer:
        return answer is not None
    return match(scenario.question, scenario.answer, answer, kind=scenario.kind)
