"""Any OpenAI-compatible chat server, with native tool calls: to compare prompted models with trained ones. Such servers
return text, not sampled ids, so their output cannot be trained on. Usage and cost are recorded with every
completion."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from emailrl.base.credentials import check_key, names_openrouter, redacted, secrets_in, without_credentials
from emailrl.base.errors import UsageError
from emailrl.base.http import Bill, CostReached, harmless, run, sendable, tell
from emailrl.engines.base import Advance, Completion, Ended, Request, converse
from emailrl.engines.calls import checked_arguments
from emailrl.engines.dialects import parse
from emailrl.model.template import server_arguments
from emailrl.records.trajectory import Message, ToolCall
from emailrl.settings import OpenAISettings, PlayingSettings, RewardSettings

if TYPE_CHECKING:
    import openai

    from emailrl.base.chat import ChatClient, ChatMessage, ChatReply

OPENAI = "api.openai.com"
OPENROUTER_KEY = "OPENROUTER_API_KEY"
TOKEN_LIMITS = ("max_tokens", "max_completion_tokens")  # the parameter's names, elsewhere and at OpenAI
_WINDOW = re.compile(r"context[ _](length|window|size)", re.IGNORECASE)
"""Server error messages for a prompt and token limit that exceed the context window."""


class OpenAIEngine:
    """Queries the model named at ``openai_base_url``; ``tools`` are OpenAI function schemas. At most
    ``rollout_concurrency`` completions are in flight. Timeouts, lost connections, 408, 409, 429 and 5xx are retried
    with exponential backoff, or after ``Retry-After``; a permanent failure ends only its own trajectory. A prompt that
    fills the context window gives a completion of length zero. Raises UsageError as ``checked_key``."""

    def __init__(self, settings: PlayingSettings, tools: Sequence[dict[str, Any]], bill: Bill | None = None) -> None:
        self.model = settings.model.name
        self._settings, self._url = settings.openai, settings.openai.openai_base_url
        self._template_arguments = server_arguments(settings.model)
        self._tools, self._bill = list(tools), bill
        self._prices = settings.openai.input_price, settings.openai.output_price
        self._concurrency, self._timeout = settings.agent.rollout_concurrency, settings.rewards.litellm_timeout
        self._key_name, self._key = checked_key(settings.openai, settings.rewards)
        self._secrets = [self._key, *secrets_in(self._url)]
        tell(self._url, "policy", with_key=bool(self._key))

    def generate(self, requests: Sequence[Request], advance: Advance | None = None) -> list[Completion]:
        """See ``Engine.generate``; completions carry ``message``, usage and cost, and no token ids."""
        from emailrl.base.chat import connect

        async def generating() -> list[Completion]:
            retries, ended = self._settings.openai_retries, Ended(advance, self.model)
            paid: dict[str, Any] = {"bill": self._bill, "prices": self._prices}
            async with connect(self._url, self._key, timeout=self._timeout, retries=retries, **paid) as client:
                return await converse(requests, partial(self._complete, client), ended, limit=self._concurrency)

        return run(generating())

    def close(self) -> None:
        """Nothing to release between calls of ``generate``."""

    async def _complete(self, client: ChatClient, request: Request) -> Completion:
        import openai

        from emailrl.base.chat import describe

        started = time.perf_counter()
        completion = Completion(request.trajectory_id, [], [], "error", completion_tokens=0)
        try:
            reply = await self._ask(client, request)
            if reply is None:
                completion.finish_reason, completion.message = "length", Message("assistant", "")
            else:
                tokens = (reply.count("prompt_tokens") or 0, reply.count("completion_tokens") or 0)
                completion.prompt_tokens, completion.completion_tokens = tokens
                completion.thinking_tokens = reply.count("completion_tokens_details", "reasoning_tokens")
                completion.cost = reply.cost_at(self._prices)
                completion.message = as_message(reply.choice.message)
                completion.finish_reason = "length" if reply.choice.finish_reason == "length" else "stop"
        except CostReached:
            raise
        except openai.APIError as error:
            completion.error = self._told(describe(error), error)
        except Exception as error:  # any malformed reply ends only this trajectory
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            completion.error = self._told(f"the server's reply cannot be read: {reason}")
        completion.seconds = time.perf_counter() - started
        return completion

    def _told(self, reason: str, error: openai.APIError | None = None) -> str:
        """A failure and what to do about it; without the client's error, of a reply that is not a chat completion."""
        from emailrl.base.chat import is_incomplete, is_timeout

        key, address = self._key_name, f"OPENAI_BASE_URL ({without_credentials(self._url)})"
        status = getattr(error, "status_code", None)
        remedies = {
            401: f"Check {key}." if self._key else f"Set {key} to a key of this server.",
            402: "Add credit to the account.",
            403: f"Check what the key in {key} may use." if self._key else f"Set {key} to a key of this server.",
            404: f"Check --model ({self.model}) and {address}.",
        } | dict.fromkeys((408, 409, 429), "Try again later, or lower ROLLOUT_CONCURRENCY.")
        if error is not None and status is None and is_timeout(error):
            remedy = "If the server is only slow, raise LITELLM_TIMEOUT."
        elif error is None or (status is None and is_incomplete(error)):
            whole = self._url.rstrip("/").endswith("/v1")
            remedy = f"Check {address}" + (" and the server's log." if whole else ": most addresses end in /v1.")
        elif status is None:
            remedy = "Check OPENAI_BASE_URL, and that the server runs."
        elif status < 400:
            remedy = f"The server redirects requests: check {address}."
        elif status >= 500:
            remedy = "Try again later, or check the server's log."
        else:
            remedy = remedies.get(status, f"Check that {self.model} supports tool calls and the sampling settings.")
        return f"{redacted(reason, *self._secrets).rstrip('.')}. {redacted(remedy, *self._secrets)}"

    async def _ask(self, client: ChatClient, request: Request) -> ChatReply | None:
        """Request up to the token limit; if prompt and limit exceed the context window, retry with what is left of
        it. None: the prompt alone fills the window."""
        import openai

        from emailrl.base.chat import complete

        body = self._body(request)
        for _ in range(2):
            try:
                return await complete(client, **body)
            except openai.BadRequestError as error:
                if not _WINDOW.search(f"{error.code} {error.message}"):
                    raise
            body = {name: value for name, value in body.items() if name not in TOKEN_LIMITS}
        return None

    def _body(self, request: Request) -> dict[str, Any]:
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [as_api(message) for message in request.messages],
            TOKEN_LIMITS[urlsplit(self._url).hostname == OPENAI]: sampling.max_tokens,
            "temperature": sampling.temperature,
            "seed": request.seed & 0x7FFFFFFF,  # some servers read 32 bits
        }
        body |= {"tools": self._tools} if self._tools else {}
        body |= {"top_p": sampling.top_p} if sampling.top_p < 1 else {}
        extra: dict[str, Any] = {"top_k": sampling.top_k} if sampling.top_k else {}
        if self._template_arguments:
            extra["chat_template_kwargs"] = self._template_arguments
        if self._key_name == OPENROUTER_KEY:
            extra["usage"] = {"include": True}  # OpenRouter then states what the request cost
        return body | ({"extra_body": extra} if extra else {})


def as_api(message: Message) -> dict[str, Any]:
    """The message in the chat API's format. Of several tool calls only the first was executed, so only that one is
    sent: servers reject a call without a result. A space is inserted into control-token strings in all text that the
    model did not write."""
    if message.role == "tool":
        return {"role": "tool", "tool_call_id": message.tool_call_id or "", "content": harmless(message.content)}
    if message.role != "assistant":
        return {"role": message.role, "content": harmless(message.content)}
    if not message.tool_calls:
        return {"role": "assistant", "content": sendable(message.content)}
    call = message.tool_calls[0]
    function = {"name": sendable(call.name), "arguments": sendable(json.dumps(call.arguments, ensure_ascii=False))}
    calls = [{"id": call.id or "", "type": "function", "function": function}]
    return {"role": "assistant", "content": sendable(message.content) or None, "tool_calls": calls}


def as_message(received: ChatMessage) -> Message:
    """The server's message; sets ``parse_error`` if arguments are not a JSON object or markup is left in the text.
    Arguments are JSON text by the spec, an object at some servers, or missing."""
    message = Message("assistant", received.text)
    try:
        if not received.tool_calls and parse(message.content, "hermes"):
            raise ValueError("the server left the tool call in the text: does it have a parser for this model?")
        for number, call in enumerate(received.tool_calls or ()):
            if call.type not in (None, "function") or call.function is None or not call.function.name:
                raise ValueError("tool call has no function name")
            stated: Any = call.function.arguments
            if stated is None and call.function.model_extra:
                raise ValueError("tool call's arguments are not under 'arguments'")
            stated = json.loads(stated or "{}") if stated is None or isinstance(stated, str) else stated
            made = ToolCall(call.function.name, checked_arguments(stated), call.id or f"call_{number}")
            message.tool_calls.append(made)
    except json.JSONDecodeError as error:
        message.parse_error = f"tool call's arguments are not JSON: {error}"
    except (ValueError, RecursionError) as error:
        message.parse_error = str(error)
    return message


def checked_key(openai: OpenAISettings, rewards: RewardSettings) -> tuple[str, str]:
    """The name and value of the API key, which may be empty; OpenRouter's key is sent to OpenRouter only. Raises
    UsageError for an address or a key with which no request can be sent, and if OpenRouter's key is missing."""
    url = openai.openai_base_url
    at_openrouter = names_openrouter("OPENAI_BASE_URL", url)
    if urlsplit(url).scheme not in ("http", "https"):
        what = f"OPENAI_BASE_URL is {without_credentials(url)}, which does not start with http:// or https://."
        raise UsageError(what, "Expected something like http://localhost:8000/v1.")
    secret = rewards.openrouter_api_key if at_openrouter else openai.openai_api_key
    if at_openrouter and secret is None:
        hint = "Set OPENROUTER_API_KEY, or OPENAI_BASE_URL to another server, whose key is OPENAI_API_KEY."
        raise UsageError("The openai engine needs an OpenRouter key.", hint)
    name, key = OPENROUTER_KEY if at_openrouter else "OPENAI_API_KEY", secret.get_secret_value() if secret else ""
    check_key(name, key)
    return name, key
