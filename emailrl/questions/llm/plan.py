"""Plans a run's prompts and estimates their cost before sending any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from urllib.parse import urlsplit

from emailrl.errors import EmailRLError, UsageError
from emailrl.questions.inbox.mailbox import MailReader
from emailrl.questions.llm.cache import ReplyCache
from emailrl.questions.llm.prompts import (
    MAX_BODY_CHARS,
    MIN_BODY_CHARS,
    MIN_MAILS,
    QUESTIONS_A_PROMPT,
    SYSTEM_PROMPT,
    Batch,
    read_batches,
)
from emailrl.settings import GenerationSettings
from emailrl.store.connection import opened

DEFAULT_LIMIT = 1000
"""Default number of questions: a hundred prompts."""
CHARS_A_TOKEN = 3.0
"""Characters per token of a prompt; JSON with many addresses and ids has fewer than prose."""
TOKENS_A_QUESTION = 110
"""Tokens of one question in a reply, including its message id."""


@dataclass(frozen=True, slots=True)
class Price:
    """Dollars per million tokens; None if unknown."""

    per_million_in: float | None
    per_million_out: float | None

    def cost(self, tokens_in: int, tokens_out: int) -> float | None:
        """Dollars, or None if a price is unknown."""
        if self.per_million_in is None or self.per_million_out is None:
            return None
        return (tokens_in * self.per_million_in + tokens_out * self.per_million_out) / 1e6


@dataclass(frozen=True, slots=True)
class QuestionPlan:
    """The prompts of a run, and the estimate for those not answered by the cache."""

    batches: list[Batch]
    limit: int
    num_cached: int
    tokens_in: int
    """Estimated tokens of the prompts still to be sent."""
    tokens_out: int
    """Estimated tokens of their replies, at the expected length."""
    cost: float | None
    """Dollars; None if prices are unknown."""

    @property
    def num_to_send(self) -> int:
        return len(self.batches) - self.num_cached


def plan_questions(
    db: Path,
    settings: GenerationSettings,
    *,
    inboxes: Sequence[str] = (),
    limit: int | None = None,
    seed: int = 42,
    allow_shared: bool = False,
) -> QuestionPlan:
    """Choose the emails to show, and estimate; sends and writes nothing.

    ``limit`` is the maximum number of questions (default ``DEFAULT_LIMIT``); it determines the number of prompts,
    assuming full replies. ``allow_shared`` splits fewer than three mailboxes by subject. Raises UsageError for a file
    that is not a mail database or an inbox without mail, EmailRLError for a damaged database or if the mailboxes are
    too small.
    """
    limit = DEFAULT_LIMIT if limit is None else limit
    with opened(Path(db)) as connection:
        num_prompts = ceil(limit / QUESTIONS_A_PROMPT)
        batches = read_batches(MailReader(connection), inboxes, num_prompts, seed, allow_shared=allow_shared)
    if not batches:
        raise EmailRLError(
            f"No mailbox has {MIN_MAILS} emails with bodies of {MIN_BODY_CHARS} to {MAX_BODY_CHARS} characters.",
            "Use --generator template.",
        )
    cache = ReplyCache(settings.generator_cache)
    to_send = [batch for batch in batches if cache.get(batch.cache_key(settings.generator_model)) is None]
    tokens_in = sum(tokens_of_prompt(batch) for batch in to_send)
    tokens_out = len(to_send) * tokens_of_reply()
    cost = price_of(settings).cost(tokens_in, tokens_out)
    return QuestionPlan(batches, limit, len(batches) - len(to_send), tokens_in, tokens_out, cost)


def tokens_of_prompt(batch: Batch) -> int:
    """Return the estimated tokens of a prompt, including the system prompt."""
    return ceil((len(SYSTEM_PROMPT) + len(batch.prompt)) / CHARS_A_TOKEN)


def tokens_of_reply() -> int:
    """Return the estimated tokens of a full reply."""
    return QUESTIONS_A_PROMPT * TOKENS_A_QUESTION


def price_of(settings: GenerationSettings) -> Price:
    """Return the prices in the settings; a server on this machine is free unless they state a price."""
    free = 0.0 if host_of(settings.generator_base_url) in ("localhost", "127.0.0.1", "::1") else None
    price_in, price_out = settings.generator_input_price, settings.generator_output_price
    return Price(free if price_in is None else price_in, free if price_out is None else price_out)


def host_of(base_url: str) -> str:
    """Return the host of a server's address in lower case; raises UsageError if it is not an http(s) address."""
    try:
        parts = urlsplit(base_url)
        host = parts.hostname
    except ValueError:
        host = None
    if not host or parts.scheme not in ("http", "https"):
        raise UsageError(
            "GENERATOR_BASE_URL is not an http(s) URL.", "Expected something like https://openrouter.ai/api/v1."
        )
    return host.lower()
