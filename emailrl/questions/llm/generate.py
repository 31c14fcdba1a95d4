"""Builds questions from the replies to a plan's prompts: checked, split by email, and balanced over mailboxes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from sqlalchemy import select

from emailrl.errors import EmailRLError
from emailrl.questions.llm.cache import ReplyCache
from emailrl.questions.llm.checks import check_item
from emailrl.questions.llm.plan import QuestionPlan
from emailrl.questions.llm.replies import read_reply
from emailrl.questions.splits import SPLITS
from emailrl.settings import GenerationSettings
from emailrl.store.connection import opened
from emailrl.store.schema import emails
from emailrl.trajectory import Scenario


@dataclass(slots=True)
class Harvest:
    """The questions kept, and the number left out by reason."""

    scenarios: list[Scenario]
    dropped: dict[str, int]
    """Items by reason: those of ``check_item``, ``too_many_sources``, ``repeated``, ``over_limit``.

    Prompts by reason: ``unreadable_reply``, ``refused``.
    """


def harvest(
    plan: QuestionPlan, db: Path, settings: GenerationSettings, *, seed: int, max_source_mails: int | None = None
) -> Harvest:
    """Check every cached reply to the plan's prompts.

    A question with more than ``max_source_mails`` sources is left out, as loading would leave it out too. Raises
    EmailRLError if no question is left, and the errors of ``plan_questions`` for the database.
    """
    cache = ReplyCache(settings.generator_cache)
    dropped: Counter[str] = Counter()
    found: list[list[Scenario]] = []
    with opened(Path(db)) as connection:

        def is_stored(message_id: str) -> bool:
            return connection.scalar(select(emails.c.id).where(emails.c.message_id == message_id)) is not None

        for batch in plan.batches:
            reply = cache.get(batch.cache_key(settings.generator_model))
            items = None if reply is None else read_reply(reply.text)
            if items is None:
                dropped["refused" if reply is None else "unreadable_reply"] += 1
                continue
            checked = (check_item(item, batch, is_stored=is_stored, seed=seed, dropped=dropped) for item in items)
            found.append([scenario for scenario in checked if scenario is not None])
    scenarios = _first(found, plan.limit, max_source_mails, dropped)
    if not scenarios:
        counts = ", ".join(f"{reason} {number}" for reason, number in dropped.most_common())
        raise EmailRLError(
            f"None of the model's questions is usable ({counts or 'it wrote none'}).", "Try another model."
        )
    ordered = sorted(scenarios, key=lambda s: (SPLITS.index(s.split or "test"), s.inbox_address, s.id))
    return Harvest(ordered, dict(dropped.most_common()))


def _first(
    found: list[list[Scenario]], limit: int, max_source_mails: int | None, dropped: Counter[str]
) -> list[Scenario]:
    """The first question of every prompt, then the second, and so on up to the limit."""
    asked: set[tuple[str, str]] = set()
    kept: list[Scenario] = []
    for scenario in (scenario for turn in zip_longest(*found) for scenario in turn if scenario is not None):
        wording = (scenario.inbox_address, scenario.question.lower())
        if max_source_mails is not None and len(scenario.message_ids) > max_source_mails:
            dropped["too_many_sources"] += 1
        elif wording in asked:
            dropped["repeated"] += 1
        elif len(kept) == limit:
            dropped["over_limit"] += 1
        else:
            asked.add(wording)
            kept.append(scenario)
    return kept
