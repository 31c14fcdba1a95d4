"""Sends prompts concurrently, within a budget, and saves each reply as it arrives.

An unanswered prompt ends the run with an error: requests in flight are awaited and saved, and no more are sent.
Rerunning sends only the missing prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pydantic import SecretStr

from emailrl.errors import EmailRLError, UsageError
from emailrl.questions.llm.cache import Reply, ReplyCache
from emailrl.questions.llm.client import GenerationError, PromptRefused, ReplyClient, Sleep
from emailrl.questions.llm.plan import QuestionPlan, price_of, tokens_of_prompt, tokens_of_reply
from emailrl.questions.llm.prompts import Batch
from emailrl.questions.llm.replies import read_reply
from emailrl.settings import GenerationSettings

MAX_UNREADABLE = 2
"""Maximum attempts at a readable reply; the last reply is kept as is."""
MAX_REFUSED = 3
"""Number of initial refusals, without an answer, after which the request itself is considered faulty."""


@dataclass(slots=True)
class Spending:
    """What a run has spent so far."""

    tokens_in: int = 0
    tokens_out: int = 0
    cost: float | None = None
    """Dollars; None if prices are unknown."""
    num_answered: int = 0
    """Prompts answered by the server in this run."""
    num_refused: int = 0


Progress = Callable[[Spending], None]


@dataclass(slots=True)
class _Run:
    """State shared by the workers of one run."""

    pending: Iterator[Batch]
    spending: Spending = field(default_factory=Spending)
    expected_in_flight: float = 0.0
    """Estimated dollars for the prompts in flight."""
    failure: EmailRLError | None = None


class QuestionWriter:
    """Sends the prompts of a plan to a model."""

    def __init__(
        self,
        settings: GenerationSettings,
        *,
        openrouter_api_key: SecretStr | None = None,
        timeout: float = 60,
        max_cost: float | None = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        """``timeout`` is the limit per reply in seconds, ``max_cost`` the limit per ``ask`` in dollars.

        Raises UsageError for a missing key, and for ``max_cost`` without prices.
        """
        self._settings = settings
        self._client = ReplyClient(settings, openrouter_api_key, timeout=timeout, sleep=sleep)
        self._cache = ReplyCache(settings.generator_cache)
        self._price = price_of(settings)
        self._max_cost = max_cost
        if max_cost is not None and self._price.cost(0, 0) is None:
            raise UsageError("--max-cost needs prices.", "Set GENERATOR_INPUT_PRICE and GENERATOR_OUTPUT_PRICE.")

    def ask(self, plan: QuestionPlan, progress: Progress | None = None) -> Spending:
        """Send every prompt that the cache does not answer, and store the replies there.

        ``progress`` is called after each. Raises GenerationError if a prompt stays unanswered, or if the next one may
        exceed ``max_cost``.
        """
        self._cache.prepare()
        run = _Run(iter([batch for batch in plan.batches if self._cache.get(self._name(batch)) is None]))
        asyncio.run(self._send_all(run, progress))
        if run.failure is not None:
            raise run.failure
        return run.spending

    async def _send_all(self, run: _Run, progress: Progress | None) -> None:
        self._count(run, Reply("", 0, 0))
        async with self._client:
            await asyncio.gather(*(self._work(run, progress) for _ in range(self._settings.generator_concurrency)))

    async def _work(self, run: _Run, progress: Progress | None) -> None:
        while run.failure is None and (batch := next(run.pending, None)) is not None:
            expected = self._expected_cost(batch, run.spending)
            if self._is_too_dear(run, expected):
                run.failure = GenerationError(
                    f"--max-cost {self._max_cost:g} was reached after {run.spending.num_answered} replies.",
                    "They are saved: rerun with a higher --max-cost to continue.",
                )
                return
            run.expected_in_flight += expected
            try:
                await self._answer(batch, run)
            except PromptRefused as error:
                run.spending.num_refused += 1
                if not run.spending.num_answered and run.spending.num_refused >= MAX_REFUSED:
                    run.failure = run.failure or error
            except EmailRLError as error:
                run.failure = run.failure or error
            finally:
                run.expected_in_flight -= expected
            if progress is not None:
                progress(run.spending)

    async def _answer(self, batch: Batch, run: _Run) -> None:
        """Get a readable reply into the cache, or the last unreadable one."""
        for attempt in range(1, MAX_UNREADABLE + 1):
            reply = await self._client.send(batch, lambda: run.failure is not None)
            self._count(run, reply)
            if attempt == MAX_UNREADABLE or read_reply(reply.text) is not None:
                break
        self._cache.put(self._name(batch), self._settings.generator_model, reply)
        run.spending.num_answered += 1

    def _count(self, run: _Run, reply: Reply) -> None:
        run.spending.tokens_in += reply.tokens_in
        run.spending.tokens_out += reply.tokens_out
        run.spending.cost = self._price.cost(run.spending.tokens_in, run.spending.tokens_out)

    def _expected_cost(self, batch: Batch, spending: Spending) -> float:
        """Dollars for a prompt: the estimate, or the average billed so far if that is more."""
        estimated = self._price.cost(tokens_of_prompt(batch), tokens_of_reply()) or 0.0
        return max(estimated, (spending.cost or 0.0) / max(spending.num_answered, 1))

    def _is_too_dear(self, run: _Run, expected: float) -> bool:
        if self._max_cost is None:
            return False
        return (run.spending.cost or 0.0) + run.expected_in_flight + expected > self._max_cost

    def _name(self, batch: Batch) -> str:
        return batch.cache_key(self._settings.generator_model)
