"""Any OpenAI-compatible chat server, with native tool calls: to measure prompted models beside trained ones.

Such servers hand back text, never sampled ids, so nothing they say can be trained on. Usage and cost are kept with
every completion.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from emailrl.engines.base import Advance, Completion, Request
from emailrl.engines.pacing import converse
from emailrl.engines.renderer import MARKUP, parse_tool_calls
from emailrl.errors import UsageError
from emailrl.remote.text import sendable
from emailrl.settings import Settings, is_openrouter, redacted
from emailrl.trajectory import Message, ToolCall

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types import CompletionUsage
    from openai.types.chat import ChatCompletion, ChatCompletionMessage

OPENAI = "api.openai.com"
TOKEN_LIMITS = ("max_tokens", "max_completion_tokens")
"""What the limit of sampled tokens is called, elsewhere and at OpenAI."""

_WINDOW = re.compile(r"context[ _](length|window|size)", re.IGNORECASE)
"""How servers say that prompt and token limit together are too long."""

_CONTROL = re.compile(r"<\|[^|>]{1,64}\|>|</?s>|\[/?INST\]|<(?:start|end)_of_turn>|" + "|".join(map(re.escape, MARKUP)))
"""What servers' tokenizers turn into control tokens, in the families of Llama, Qwen, Mistral and Gemma."""


class PromptTooLong(Exception):
    """The prompt alone fills the context window."""


class OpenAIEngine:
    """Asks ``settings.model.name`` at ``settings.openai.openai_base_url``; ``tools`` are OpenAI function schemas.

    At most ``rollout_concurrency`` completions are in flight. Timeouts, lost connections, 408, 409, 429 and 5xx are
    tried again with a growing pause, or after what ``Retry-After`` says; what fails for good ends its own trajectory
    alone. A prompt that leaves no room in the context window is a completion of length zero. Raises UsageError where
    OpenRouter's key is missing.
    """

    def __init__(self, settings: Settings, tools: Sequence[dict[str, Any]]) -> None:
        self.model = settings.model.name
        self._settings = settings.openai
        self._tools = list(tools)
        self._concurrency = settings.agent.rollout_concurrency
        try:
            self._at_openrouter = is_openrouter(self._settings.openai_base_url)
            self._at_openai = urlsplit(self._settings.openai_base_url).hostname == OPENAI
        except ValueError as error:
            raise UsageError("OPENAI_BASE_URL is no address.", "It looks like https://openrouter.ai/api/v1.") from error
        self._key = _key(settings, self._at_openrouter)
        self._timeout = settings.rewards.litellm_timeout

    def generate(self, requests: Sequence[Request], advance: Advance | None = None) -> list[Completion]:
        """See ``Engine.generate``; completions carry ``message``, usage and cost, and no token ids."""
        return asyncio.run(self._generate(requests, advance))

    def close(self) -> None:
        """Nothing is held between two calls of ``generate``."""

    async def _generate(self, requests: Sequence[Request], advance: Advance | None) -> list[Completion]:
        from emailrl.remote.chat import connect_async

        wanted = self._settings
        async with connect_async(
            wanted.openai_base_url, self._key, timeout=self._timeout, retries=wanted.openai_retries
        ) as client:
            return await converse(requests, partial(self._complete, client), advance, limit=self._concurrency)

    async def _complete(self, client: AsyncOpenAI, request: Request) -> Completion:
        import openai

        from emailrl.remote.chat import told

        started = time.perf_counter()
        completion = Completion(request.trajectory_id, [], [], "error", policy_version=self.model, completion_tokens=0)
        try:
            self._read(await self._ask(client, request), completion)
        except PromptTooLong:
            completion.finish_reason, completion.message = "length", Message("assistant", "")
        except openai.APIError as error:
            completion.error = redacted(told(error), self._key)
        except (ValueError, RecursionError) as error:  # a reply that is no chat completion, or nested too deep
            completion.error = f"the server's reply cannot be read: {redacted(str(error), self._key)}"
        completion.seconds = time.perf_counter() - started
        return completion

    async def _ask(self, client: AsyncOpenAI, request: Request) -> ChatCompletion:
        """Ask with the token limit, and where prompt and limit exceed the context window, for what is left of it."""
        import openai

        body = self._body(request)
        for _ in range(2):
            try:
                return await client.chat.completions.create(**body)
            except openai.BadRequestError as error:
                if not _WINDOW.search(f"{error.code} {error.message}"):
                    raise
            body = {name: value for name, value in body.items() if name not in TOKEN_LIMITS}
        raise PromptTooLong

    def _body(self, request: Request) -> dict[str, Any]:
        sampling = request.sampling
        length = TOKEN_LIMITS[self._at_openai]
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [as_api(message) for message in request.messages],
            length: sampling.max_tokens,
            "temperature": sampling.temperature,
            "seed": request.seed & 0x7FFFFFFF,  # some servers read 32 bits
        }
        extra: dict[str, Any] = {}
        if self._tools:
            body["tools"] = self._tools
        if sampling.top_p < 1:
            body["top_p"] = sampling.top_p
        if sampling.top_k:
            extra["top_k"] = sampling.top_k
        if self._at_openrouter:
            extra["usage"] = {"include": True}  # OpenRouter then states what the request cost
        return body | ({"extra_body": extra} if extra else {})

    def _read(self, reply: ChatCompletion, completion: Completion) -> None:
        """Fill the completion from a reply; ValueError for what is none."""
        choices = getattr(reply, "choices", None)
        if not choices or choices[0].message is None:
            stated = getattr(reply, "error", None)  # OpenRouter says so with status 200
            raise ValueError(f"no choices{f': {stated}' if stated else ''}")
        self._count(reply.usage, completion)
        completion.message = as_message(choices[0].message)
        completion.finish_reason = "length" if choices[0].finish_reason == "length" else "stop"

    def _count(self, usage: CompletionUsage | None, completion: Completion) -> None:
        prices = (self._settings.input_price, self._settings.output_price)
        if usage is None:
            return
        completion.prompt_tokens, completion.completion_tokens = usage.prompt_tokens or 0, usage.completion_tokens or 0
        if any(price is not None for price in prices):
            tokens = (completion.prompt_tokens, completion.completion_tokens)
            completion.cost = sum(count * (price or 0.0) for count, price in zip(tokens, prices, strict=True)) / 1e6
        elif isinstance(stated := getattr(usage, "cost", None), (int, float)):
            completion.cost = float(stated)


def as_api(message: Message) -> dict[str, Any]:
    """The message as a chat server takes it.

    Of several tool calls only the first was played, so only it is told again: servers refuse a call without an answer.
    Strings that tokenizers read as control tokens are broken by a space in all that the model did not say itself.
    """
    if message.role == "tool":
        return {"role": "tool", "tool_call_id": message.tool_call_id or "", "content": harmless(message.content)}
    if message.role != "assistant":
        return {"role": message.role, "content": harmless(message.content)}
    if not message.tool_calls:
        return {"role": "assistant", "content": sendable(message.content)}
    call = message.tool_calls[0]
    function = {"name": sendable(call.name), "arguments": sendable(json.dumps(call.arguments, ensure_ascii=False))}
    return {
        "role": "assistant",
        "content": sendable(message.content) or None,
        "tool_calls": [{"id": call.id or "", "type": "function", "function": function}],
    }


def as_message(said: ChatCompletionMessage) -> Message:
    """The server's message; arguments that are no JSON object, or markup left in the text, make a ``parse_error``."""
    message = Message("assistant", said.content or "")
    try:
        if not said.tool_calls and parse_tool_calls(message.content):
            raise ValueError("the server left the tool call in the text: does it have a parser for this model?")
        for number, call in enumerate(said.tool_calls or ()):
            if call.type != "function" or call.function is None or not call.function.name:
                raise ValueError("tool call has no function name")
            arguments = json.loads(call.function.arguments or "{}")
            if not isinstance(arguments, dict):
                raise ValueError("tool call's arguments are not an object")
            message.tool_calls.append(ToolCall(call.function.name, arguments, call.id or f"call_{number}"))
    except json.JSONDecodeError as error:
        message.parse_error = f"tool call's arguments are not JSON: {error}"
    except (ValueError, RecursionError) as error:
        message.parse_error = str(error)
    return message


def harmless(text: str) -> str:
    """The text with a space after the first character of each string that looks like a control token."""
    while _CONTROL.search(text):
        text = _CONTROL.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)
    return text


def _key(settings: Settings, at_openrouter: bool) -> str:
    """OpenRouter's key for OpenRouter alone; any other server never sees it."""
    secret = settings.rewards.openrouter_api_key if at_openrouter else settings.openai.openai_api_key
    if at_openrouter and secret is None:
        raise UsageError(
            "The engine openai at OpenRouter needs a key.",
            "Set OPENROUTER_API_KEY, or OPENAI_BASE_URL to another server.",
        )
    return secret.get_secret_value() if secret else ""
