"""Sends a plan's prompts to an OpenAI-compatible server, within a budget, and saves each reply as it arrives.

An unanswered prompt ends the run with an error: requests in flight are awaited and saved, and no more are sent.
Rerunning sends only the missing prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from emailrl.base import http
from emailrl.base.cache import ReplyCache
from emailrl.base.credentials import check_key, names_openrouter, redacted, secrets_in, without_credentials
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.http import Failed, sendable, tell
from emailrl.questions.llm.harvest import read_reply
from emailrl.questions.llm.plan import SYSTEM_PROMPT, TOKENS_A_REPLY, Batch, QuestionPlan, cost_of
from emailrl.settings import GenerationSettings

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from pydantic import SecretStr

MAX_UNREADABLE = 2
"""Maximum attempts at a readable reply; the last reply is kept as is."""
MAX_REFUSED = 3
"""Number of initial refusals, without an answer, after which the request itself is considered faulty."""
_REFUSED: Final = (400, 413, 422)
"""Statuses of a rejected prompt: too long for the model, or filtered."""


class GenerationError(EmailRLError):
    """The server gave no reply, or the budget is spent."""


class PromptRefused(GenerationError):
    """The server rejects this prompt but may accept others."""


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


class _Reply(NamedTuple):
    text: str
    tokens_in: int
    """Billed, or else estimated."""
    tokens_out: int


Progress = Callable[[Spending], None]


@dataclass(slots=True)
class _Run:
    """State shared by the workers of one run."""

    pending: Iterator[Batch]
    progress: Progress | None
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
    ) -> None:
        """``timeout`` is the limit per complete reply in seconds, ``max_cost`` the limit per ``ask`` in dollars.

        The OpenRouter key is sent only to OpenRouter. Raises UsageError for a missing key, and for ``max_cost`` without
        prices.
        """
        self._settings = settings
        self._key = _key(settings, openrouter_api_key)
        self._cache = ReplyCache(settings.generator_cache, "GENERATOR_CACHE")
        self._timeout, self._max_cost = timeout, max_cost
        if max_cost is not None and cost_of(settings, 0, 0) is None:
            raise UsageError("--max-cost needs prices.", "Set GENERATOR_INPUT_PRICE and GENERATOR_OUTPUT_PRICE.")
        tell(settings.generator_base_url, "questions", with_key=bool(self._key))

    def ask(self, plan: QuestionPlan, progress: Progress | None = None) -> Spending:
        """Send every prompt that the cache does not answer, and store the replies there.

        ``progress`` is called after each. Raises GenerationError if a prompt stays unanswered, or if the next one may
        exceed ``max_cost``.
        """
        self._cache.prepare()
        run = _Run(iter([batch for batch in plan.batches if self._cache.get(self._name(batch)) is None]), progress)
        asyncio.run(self._send_all(run))
        if run.failure is not None:
            raise run.failure
        return run.spending

    async def _send_all(self, run: _Run) -> None:
        from emailrl.base.chat import connect

        self._count(run, _Reply("", 0, 0))
        async with connect(self._settings.generator_base_url, self._key, timeout=self._timeout) as client:
            await asyncio.gather(*(self._work(run, client) for _ in range(self._settings.generator_concurrency)))

    async def _work(self, run: _Run, client: AsyncOpenAI) -> None:
        while run.failure is None and (batch := next(run.pending, None)) is not None:
            # The estimate, or the average billed so far if that is more.
            billed = run.spending.cost or 0.0
            estimated = cost_of(self._settings, batch.tokens, TOKENS_A_REPLY) or 0.0
            expected = max(estimated, billed / max(run.spending.num_answered, 1))
            if self._max_cost is not None and billed + run.expected_in_flight + expected > self._max_cost:
                run.failure = GenerationError(
                    f"--max-cost {self._max_cost:g} was reached after {run.spending.num_answered} replies.",
                    "They are saved: rerun with a higher --max-cost to continue.",
                )
                return
            run.expected_in_flight += expected
            try:
                await self._answer(batch, run, client)
            except PromptRefused as error:
                run.spending.num_refused += 1
                if not run.spending.num_answered and run.spending.num_refused >= MAX_REFUSED:
                    run.failure = run.failure or error
            except EmailRLError as error:
                run.failure = run.failure or error
            finally:
                run.expected_in_flight -= expected
            if run.progress is not None:
                run.progress(run.spending)

    async def _answer(self, batch: Batch, run: _Run, client: AsyncOpenAI) -> None:
        """Get a readable reply into the cache, or the last unreadable one."""
        for attempt in range(1, MAX_UNREADABLE + 1):
            reply = await self._send(batch, run, client)
            self._count(run, reply)
            if attempt == MAX_UNREADABLE or read_reply(reply.text) is not None:
                break
        self._cache.put(self._name(batch), self._settings.generator_model, reply.text)
        run.spending.num_answered += 1

    async def _send(self, batch: Batch, run: _Run, client: AsyncOpenAI) -> _Reply:
        """One reply, with retries until the run ends.

        Raises PromptRefused, or GenerationError when the tries are used up or the server refuses everything.
        """
        from emailrl.base.chat import ChatReply, ask

        def read(reply: ChatReply) -> _Reply:
            text = sendable(reply.choice.message.text)
            tokens_in, tokens_out = reply.count("prompt_tokens"), reply.count("completion_tokens")
            return _Reply(
                text,
                batch.tokens if tokens_in is None else tokens_in,
                len(text) // 3 if tokens_out is None else tokens_out,
            )

        async def wait(seconds: float) -> None:
            await http.sleep(seconds)
            if run.failure is not None:
                raise run.failure

        own = self._settings
        messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": batch.prompt}]
        model, limit, retries = own.generator_model, own.generator_max_tokens, own.generator_retries
        reply = await ask(client, read, retries=retries, wait=wait, model=model, messages=messages, max_tokens=limit)
        if isinstance(reply, Failed):
            failure = redacted(reply.why, self._key, *secrets_in(own.generator_base_url)).rstrip(".")
            raise (PromptRefused if reply.status in _REFUSED else GenerationError)(
                f"{own.generator_model} at {without_credentials(own.generator_base_url)} returned no reply: {failure}.",
                "Check GENERATOR_BASE_URL, GENERATOR_MODEL and the key (OPENROUTER_API_KEY, GENERATOR_API_KEY); rerun "
                "the same command to continue.",
            )
        return reply

    def _count(self, run: _Run, reply: _Reply) -> None:
        run.spending.tokens_in += reply.tokens_in
        run.spending.tokens_out += reply.tokens_out
        run.spending.cost = cost_of(self._settings, run.spending.tokens_in, run.spending.tokens_out)

    def _name(self, batch: Batch) -> str:
        return batch.cache_key(self._settings.generator_model)


def _key(settings: GenerationSettings, openrouter_api_key: SecretStr | None) -> str:
    at_openrouter = names_openrouter("GENERATOR_BASE_URL", settings.generator_base_url)
    secret = settings.generator_api_key or (openrouter_api_key if at_openrouter else None)
    key = secret.get_secret_value() if secret else ""
    if at_openrouter and not key:
        raise UsageError(
            "Generating questions with a model at OpenRouter needs a key.",
            "Set OPENROUTER_API_KEY, or GENERATOR_BASE_URL to another server; --generator template needs none.",
        )
    check_key("GENERATOR_API_KEY" if settings.generator_api_key else "OPENROUTER_API_KEY", key)
    return key
