"""Experts for one's own questions: each knows the source mail, searches for it, reads it and answers.

A search is made of words that the question shares with the source mail, so that what is taught can be done from the
question alone. Questions for which no two such words find the mail are left out, and counted in the log.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import closing

from emailrl.environment.custom import mail_agent
from emailrl.scenarios import Split, load_scenario_set
from emailrl.settings import Settings
from emailrl.sft.examples import converse
from emailrl.store import Mailbox, open_mailbox
from emailrl.trajectory import Message, Scenario

logger = logging.getLogger(__name__)

MIN_WORD = 4
"""Shorter words of a question seldom say what it is about."""
MAX_WORDS = 6
"""Of the shared words, the longest are tried."""


class OwnExpert:
    """Searches with ``keywords``, reads the scenario's first source mail and gives the scenario's answer."""

    def __init__(self, scenario: Scenario, keywords: Sequence[str]) -> None:
        source = scenario.message_ids[0]
        self._turns = iter(
            (
                _call("search_emails", {"keywords": list(keywords)}),
                _call("read_email", {"message_id": source}),
                _call("return_final_answer", {"answer": scenario.answer, "sources": [source]}),
            )
        )

    def act(self, messages: Sequence[Message]) -> str:
        """The text of the next assistant turn."""
        return next(self._turns)


def find_keywords(scenario: Scenario, mailbox: Mailbox) -> list[str] | None:
    """One or two of the question's words that find its first source mail; None where none do."""
    mail = mailbox.read(scenario.message_ids[0])
    if mail is None:
        return None
    there = set(re.findall(r"\w+", f"{mail.subject} {mail.body}".lower()))
    words = {word.lower() for word in re.findall(r"\w+", scenario.question) if len(word) >= MIN_WORD}
    shared = sorted(words & there, key=lambda word: (-len(word), word))[:MAX_WORDS]
    for keywords in (*itertools.combinations(shared, 2), *((word,) for word in shared)):
        if any(hit.message_id == mail.message_id for hit in mailbox.search(list(keywords))):
            return list(keywords)
    return None


def conversations(settings: Settings, *, split: Split, seed: int) -> Iterator[tuple[Scenario, list[Message]]]:
    """What experts do on the questions of a split; ``output_field`` holds the answer they give.

    Questions that cannot be taught are left out: MAX_TURNS below 3, or no source mail to be found.
    """
    data = settings.data
    limit = data.train_dataset_size if split == "train" else data.eval_dataset_size
    taught = data.model_copy(update={"answer_field": data.output_field or data.answer_field})
    chosen = load_scenario_set(None, split, limit=limit, seed=seed, data=taught)
    played = 0
    for scenario in chosen.scenarios:
        with closing(open_mailbox(settings.store.db, scenario.inbox_address, until=scenario.query_date)) as mailbox:
            keywords = find_keywords(scenario, mailbox)
            if keywords is not None and settings.agent.max_turns >= 3:
                played += 1
                yield scenario, converse(mail_agent(scenario, mailbox, settings), OwnExpert(scenario, keywords))
    logger.info("experts play %d of %d questions", played, len(chosen.scenarios))


def _call(name: str, arguments: dict[str, object]) -> str:
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"
