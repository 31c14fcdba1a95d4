"""Sends a plan's prompts to an OpenAI-compatible server, within a budget, and saves each reply as it arrives.

An unanswered prompt ends the run with an error, once requests in flight are saved. Rerunning sends only the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from emailrl.base import http
from emailrl.base.cache import ReplyCache
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.http import Failed, sendable, tell
from emailrl.questions.llm.harvest import read_reply
from emailrl.questions.llm.plan import SYSTEM_PROMPT, TOKENS_A_REPLY, Batch, QuestionPlan, cost_of
from emailrl.settings import GenerationSettings, check_key, names_openrouter, redacted, secrets_in, without_credentials

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from pydantic import SecretStr

    from emailrl.base.chat import ChatReply

MAX_UNREADABLE = 2
"""Maximum attempts at a readable reply; the last reply is kept as is."""
MAX_REFUSED = 3
"""Number of initial refusals, without an answer, after which the request itself is considered faulty."""
_REFUSED: Final = (400, 413, 422)
"""Statuses of a rejected prompt: too long for the model, or filtered."""


class GenerationError(EmailRLError):
    """The server gave no reply, or the budget is spent."""


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


class QuestionWriter:
    """Sends the prompts of a plan to a model."""

    def __init__(
        self,
        settings: GenerationSettings,
        *,
        openrouter_api_key: SecretStr | None = None,
        timeout: float = 60,
        max_cost: float | None = None,
    ) -> None:
        """``timeout`` is the limit per complete reply in seconds, ``max_cost`` the limit per ``ask`` in dollars.

        The OpenRouter key is sent only to OpenRouter. Raises UsageError for a missing key, and for ``max_cost`` without
        prices.
        """
        self._settings = settings
        at_openrouter = names_openrouter("GENERATOR_BASE_URL", settings.generator_base_url)
        secret = settings.generator_api_key or (openrouter_api_key if at_openrouter else None)
        self._key = secret.get_secret_value() if secret else ""
        if at_openrouter and not self._key:
            raise UsageError(
                "Generating questions with a model at OpenRouter needs a key.",
                "Set OPENROUTER_API_KEY, or GENERATOR_BASE_URL to another server; --generator template needs none.",
            )
        check_key("GENERATOR_API_KEY" if settings.generator_api_key else "OPENROUTER_API_KEY", self._key)
        self._cache = ReplyCache(settings.generator_cache, "GENERATOR_CACHE")
        self._timeout, self._max_cost = timeout, max_cost
        no_cost = cost_of(settings, 0, 0)
        if max_cost is not None and no_cost is None:
            raise UsageError("--max-cost needs prices.", "Set GENERATOR_INPUT_PRICE and GENERATOR_OUTPUT_PRICE.")
        tell(settings.generator_base_url, "questions", with_key=bool(self._key))
        self._spending = Spending(cost=no_cost)
        self._in_flight = 0.0
        """Estimated dollars for the prompts in flight."""
        self._failure: EmailRLError | None = None

    def ask(self, plan: QuestionPlan, progress: Callable[[Spending], None] | None = None) -> Spending:
        """Send every prompt that the cache does not answer, and store the replies there.

        ``progress`` is called after each. Raises GenerationError if a prompt stays unanswered, or if the next one may
        exceed ``max_cost``.
        """
        self._cache.prepare()
        model = self._settings.generator_model
        pending = [batch for batch in plan.batches if self._cache.get(batch.cache_key(model)) is None]

        async def send_all() -> None:
            from emailrl.base.chat import connect

            own, waiting = self._settings, iter(pending)
            async with connect(own.generator_base_url, self._key, timeout=self._timeout) as client:
                await asyncio.gather(*(self._work(waiting, progress, client) for _ in range(own.generator_concurrency)))

        asyncio.run(send_all())
        if self._failure is not None:
            raise self._failure
        return self._spending

    async def _work(
        self, pending: Iterator[Batch], progress: Callable[[Spending], None] | None, client: AsyncOpenAI
    ) -> None:
        spending = self._spending
        while self._failure is None and (batch := next(pending, None)) is not None:
            # The estimate, or the average billed so far if that is more.
            billed = spending.cost or 0.0
            estimated = cost_of(self._settings, batch.tokens, TOKENS_A_REPLY) or 0.0
            expected = max(estimated, billed / max(spending.num_answered, 1))
            if self._max_cost is not None and billed + self._in_flight + expected > self._max_cost:
                self._failure = GenerationError(
                    f"--max-cost {self._max_cost:g} was reached after {spending.num_answered} replies.",
                    "They are saved: rerun with a higher --max-cost to continue.",
                )
                return
            self._in_flight += expected
            try:
                await self._answer(batch, client)
            except EmailRLError as error:
                self._failure = self._failure or error
            finally:
                self._in_flight -= expected
            if progress is not None:
                progress(spending)

    async def _answer(self, batch: Batch, client: AsyncOpenAI) -> None:
        """Get a readable reply into the cache, or the last unreadable one; count a refused prompt.

        Raises GenerationError when the tries are used up or the server refuses everything.
        """
        from emailrl.base.chat import ask

        def read(reply: ChatReply) -> tuple[str, int, int]:
            """Its text and tokens, as billed or else estimated."""
            text = sendable(reply.choice.message.text)
            tokens_in, tokens_out = reply.count("prompt_tokens"), reply.count("completion_tokens")
            tokens_in = batch.tokens if tokens_in is None else tokens_in
            return text, tokens_in, len(text) // 3 if tokens_out is None else tokens_out

        async def wait(seconds: float) -> None:
            await http.sleep(seconds)
            if self._failure is not None:
                raise self._failure

        own, spending = self._settings, self._spending
        messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": batch.prompt}]
        model, limit, retries = own.generator_model, own.generator_max_tokens, own.generator_retries
        for _ in range(MAX_UNREADABLE):
            request = ask(client, read, retries=retries, wait=wait, model=model, messages=messages, max_tokens=limit)
            reply = await request
            if isinstance(reply, Failed):
                if reply.status in _REFUSED:
                    spending.num_refused += 1
                    if spending.num_answered or spending.num_refused < MAX_REFUSED:
                        return
                failure = redacted(reply.why, self._key, *secrets_in(own.generator_base_url)).rstrip(".")
                raise GenerationError(
                    f"{model} at {without_credentials(own.generator_base_url)} returned no reply: {failure}.",
                    "Check GENERATOR_BASE_URL, GENERATOR_MODEL and the key (OPENROUTER_API_KEY, GENERATOR_API_KEY); "
                    "rerun the same command to continue.",
                )
            text, tokens_in, tokens_out = reply
            spending.tokens_in += tokens_in
            spending.tokens_out += tokens_out
            spending.cost = cost_of(own, spending.tokens_in, spending.tokens_out)
            if read_reply(text) is not None:
                break
        self._cache.put(batch.cache_key(model), model, text)
        spending.num_answered += 1
