"""One prompt to an OpenAI-compatible server: bounded in time, retried with back-off, the key kept out of errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from emailrl.errors import EmailRLError, UsageError
from emailrl.questions.llm.cache import Reply
from emailrl.questions.llm.plan import tokens_of_prompt
from emailrl.questions.llm.prompts import SYSTEM_PROMPT, Batch
from emailrl.remote.destination import tell
from emailrl.remote.retry import may_pass, pause, pause_asked_for
from emailrl.remote.text import sendable
from emailrl.settings import GenerationSettings, check_key, names_openrouter, redacted, secrets_in, without_credentials

if TYPE_CHECKING:
    from types import TracebackType

    from pydantic import SecretStr

_REFUSED: Final = (400, 413, 422)
"""Statuses of a rejected prompt: too long for the model, or filtered."""

Sleep = Callable[[float], Awaitable[None]]


class GenerationError(EmailRLError):
    """The server gave no reply, or the budget is spent."""


class PromptRefused(GenerationError):
    """The server rejects this prompt but may accept others."""


class ReplyClient:
    """Sends prompts; an async context manager, used inside one event loop."""

    def __init__(
        self,
        settings: GenerationSettings,
        openrouter_api_key: SecretStr | None,
        *,
        timeout: float,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        """``timeout`` in seconds is the limit for a complete reply, even from a slow server.

        The OpenRouter key is sent only to OpenRouter; raises UsageError if it is needed and missing.
        """
        self._settings = settings
        self._key = _key(settings, openrouter_api_key)
        tell(settings.generator_base_url, "questions", with_key=bool(self._key))
        self._timeout = timeout
        self._sleep = sleep

    async def __aenter__(self) -> ReplyClient:
        from emailrl.remote.chat import connect

        self._client = connect(self._settings.generator_base_url, self._key, timeout=self._timeout)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    async def send(self, batch: Batch, is_over: Callable[[], bool]) -> Reply:
        """One reply, with retries until ``is_over()``.

        Raises PromptRefused, or GenerationError when the tries are used up or the server refuses everything.
        """
        import openai

        from emailrl.remote.chat import describe

        failure, wait = "", 0.0
        refused = False
        for tries in range(self._settings.generator_retries + 1):
            if tries:
                await self._sleep(pause(tries, wait))
                if is_over():
                    break
            wait = 0.0
            try:
                return await self._complete(batch)
            except openai.APIError as error:
                failure = describe(error)
                if isinstance(error, openai.APIStatusError):
                    wait, refused = pause_asked_for(error.response.headers), error.status_code in _REFUSED
                    if not may_pass(error.status_code):
                        break
            except ValueError as error:
                failure = f"the reply cannot be read: {error}"
        # Raised outside the handlers: the client's exception, chained, would carry the request and with it the key.
        kind = PromptRefused if refused else GenerationError
        failure = redacted(failure, self._key, *secrets_in(self._settings.generator_base_url)).rstrip(".")
        server = without_credentials(self._settings.generator_base_url)
        raise kind(
            f"{self._settings.generator_model} at {server} returned no reply: {failure}.",
            "Check GENERATOR_BASE_URL, GENERATOR_MODEL and the key (OPENROUTER_API_KEY, GENERATOR_API_KEY); rerun the "
            "same command to continue.",
        )

    async def _complete(self, batch: Batch) -> Reply:
        from emailrl.remote.chat import complete

        messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": batch.prompt}]
        reply = await complete(
            self._client,
            model=self._settings.generator_model,
            messages=messages,
            max_tokens=self._settings.generator_max_tokens,
        )
        text = sendable(reply.choice.message.text)
        tokens_in, tokens_out = reply.count("prompt_tokens"), reply.count("completion_tokens")
        return Reply(
            text,
            tokens_of_prompt(batch) if tokens_in is None else tokens_in,
            len(text) // 3 if tokens_out is None else tokens_out,
        )


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
