"""Filters a model's questions: only claims confirmed by the database are accepted.

A reply may be wrong, or controlled by the author of an email in the prompt. An item therefore becomes a question only
if its ids are emails of its own prompt, its answer is stated in those emails and too specific to be in any email, and
its text is printable. Unlike template questions, it cannot be proven to have only one answer in the mailbox.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from random import Random
from typing import Any

from emailrl.questions.inbox.mail import Mail
from emailrl.questions.inbox.mailbox import MAX_DAYS_LATER
from emailrl.questions.llm.prompts import Batch
from emailrl.questions.llm.stated import is_specific, is_stated, plain
from emailrl.trajectory import Scenario

MAX_QUESTION_CHARS = 400
MAX_ANSWER_CHARS = 300


def check_item(
    item: Any, batch: Batch, *, is_stored: Callable[[str], bool], seed: int, dropped: Counter[str]
) -> Scenario | None:
    """Return the question in an item of a reply, or None with the reason counted in ``dropped``.

    ``is_stored`` is whether the database has a message id. Reasons: ``malformed``, ``confabulated_id`` (counted once
    per id; the item keeps its other ids), ``no_source`` (all its ids were confabulated), ``outside_prompt`` (an id of
    an email that was not shown), ``yes_or_no``, ``answer_in_question``, ``answer_not_found``, ``answer_too_common``
    (in nearly every email).
    """
    fields = _fields(item)
    if fields is None:
        dropped["malformed"] += 1
        return None
    question, answer, named, realistic = fields
    sources, strangers = _sources(named, batch)
    confabulated = [stranger for stranger in strangers if not is_stored(stranger)]
    if confabulated:
        dropped["confabulated_id"] += len(confabulated)
    reason = _objection(question, answer, sources, len(strangers) > len(confabulated))
    if reason:
        dropped[reason] += 1
        return None
    ids = sorted(mail.message_id for mail in sources)
    identity = hashlib.sha256("\0".join((batch.inbox, question, *ids)).encode()).hexdigest()
    return Scenario(
        id=f"llm-{identity[:12]}",
        question=question,
        answer=answer,
        message_ids=ids,
        inbox_address=batch.inbox,
        query_date=_ask_day(batch, seed),
        how_realistic=realistic,
        split=batch.split,
        kind="llm",
    )


def _fields(item: Any) -> tuple[str, str, list[str], float] | None:
    """Question, answer, ids and realism of an item, or None if one of them is missing or has the wrong type."""
    if not isinstance(item, dict):
        return None
    question, answer = _line(item.get("question"), MAX_QUESTION_CHARS), _line(item.get("answer"), MAX_ANSWER_CHARS)
    ids = item.get("message_ids")
    ids = [ids] if isinstance(ids, str) else ids
    realistic = item.get("how_realistic")
    if isinstance(realistic, bool) or not isinstance(realistic, int | float) or not 0 <= realistic <= 1:
        return None
    if question is None or answer is None or not isinstance(ids, list) or not ids:
        return None
    if not all(isinstance(message_id, str) and message_id.isprintable() for message_id in ids):
        return None
    return question, answer, ids, float(realistic)


def _line(value: Any, most: int) -> str | None:
    """Text on one line; None for anything else and for unprintable characters."""
    line = " ".join(value.split()) if isinstance(value, str) else ""
    return line if line and len(line) <= most and line.isprintable() else None


def _sources(named: list[str], batch: Batch) -> tuple[list[Mail], list[str]]:
    """The batch's emails with these ids, with or without brackets, and the ids that match none of them."""
    shown = {mail.message_id.strip("<> "): mail for mail in batch.mails}
    bare = dict.fromkeys(message_id.strip("<> ") for message_id in named)
    sources = [shown[name] for name in bare if name in shown]
    strangers = [message_id.strip() for message_id in named if message_id.strip("<> ") not in shown]
    return sources, list(dict.fromkeys(strangers))


def _objection(question: str, answer: str, sources: list[Mail], names_others: bool) -> str | None:
    if names_others:
        return "outside_prompt"
    if not sources:
        return "no_source"
    if re.match(r"(?:yes|no)\b(?!\.?\s*\d)", answer, re.IGNORECASE):
        return "yes_or_no"
    if f" {plain(answer)} " in f" {plain(question)} ":
        return "answer_in_question"
    if not is_stated(answer, sources):
        return "answer_not_found"
    return None if is_specific(answer, sources) else "answer_too_common"


def _ask_day(batch: Batch, seed: int) -> str:
    """A day soon after the newest email of the batch, so that all of it is visible."""
    newest = batch.mails[-1]
    later = Random(f"{seed}/{batch.inbox}/{newest.message_id}").randint(1, MAX_DAYS_LATER)
    return (newest.day + timedelta(days=later)).isoformat()
