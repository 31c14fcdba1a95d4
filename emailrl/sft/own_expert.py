"""Experts for one's own questions: each knows the source mail, searches for it, reads it and answers.

A search is made of words that the question shares with the source mail, so that what is taught can be done from the
question alone. Questions for which no two such words find the mail are left out, and counted in the log.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from emailrl.environment.custom import mail_agent
from emailrl.errors import UsageError
from emailrl.scenarios import load_scenario_set
from emailrl.settings import Settings
from emailrl.sft.imitation import Example
from emailrl.sft.warm_start import converse, samples_of
from emailrl.store import Mailbox, open_mailbox
from emailrl.trajectory import Message, Scenario

if TYPE_CHECKING:
    from emailrl.engines.renderer import ChatRenderer

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


def own_conversations(settings: Settings) -> list[list[Message]]:
    """What experts do on the training questions; ``output_field`` holds the answer they give.

    Raises UsageError where no question can be taught: MAX_TURNS below 3, or no source mail to be found.
    """
    data = settings.data
    taught = data.model_copy(update={"answer_field": data.output_field or data.answer_field})
    chosen = load_scenario_set(None, "train", limit=data.train_dataset_size, seed=settings.training.seed, data=taught)
    found = []
    for scenario in chosen.scenarios:
        with closing(open_mailbox(settings.store.db, scenario.inbox_address, until=scenario.query_date)) as mailbox:
            keywords = find_keywords(scenario, mailbox)
            if keywords is not None and settings.agent.max_turns >= 3:
                found.append(converse(mail_agent(scenario, mailbox, settings), OwnExpert(scenario, keywords)))
    if not found:
        raise UsageError(f"None of the questions in {chosen.source} can be taught.", "Check --db and MAX_TURNS (3).")
    logger.info("experts play %d of %d questions", len(found), len(chosen.scenarios))
    return found


def own_examples(settings: Settings, tokenizer_path: Path) -> Iterator[Example]:
    """Examples without end: the conversations again and again, each time in another order."""
    import numpy as np
    from transformers import AutoTokenizer

    from emailrl.engines.renderer import ChatRenderer
    from emailrl.environment.tools import tool_schemas

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path, trust_remote_code=False)
    renderer: ChatRenderer = ChatRenderer(tokenizer, tool_schemas(settings.agent))
    samples = [sample for messages in own_conversations(settings) for sample in samples_of(messages, renderer)]
    examples = [(np.array(s.token_ids, dtype=np.uint32), np.array(s.loss_mask, dtype=bool)) for s in samples]
    rng = random.Random(f"{settings.training.seed}/own")

    def again() -> Iterator[Example]:
        while True:
            rng.shuffle(examples)
            yield from examples

    return again()


def _call(name: str, arguments: dict[str, object]) -> str:
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"
