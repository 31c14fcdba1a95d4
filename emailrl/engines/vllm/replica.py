"""One vLLM server: its HTTP requests, its loaded adapters, and strict parsing of its answers.

Pydantic parses and checks a body in one pass, a nesting bound included, faster than ``json`` alone parses it.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Annotated, Any, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from emailrl.base.errors import EmailRLError
from emailrl.base.plain import counted
from emailrl.base.reply import IncompleteReply
from emailrl.base.retry import may_pass
from emailrl.engines.base import Completion, Request
from emailrl.engines.vllm.probe import Expected, Probe
from emailrl.settings import redacted, secrets_in, split_credentials, without_credentials

COMPLETIONS = "/v1/completions"
HEALTH_TIMEOUT = 10.0
"""Timeout in seconds of requests that cost a server nothing: its health, its models, unloading an adapter."""
FULL = 0.02
"""Poll interval in seconds for a replica at its request limit."""
TOO_OLD = "vLLM 0.26 or newer is required."
LONGEST = 200
"""Maximum characters quoted from a server's error message."""
HIGHEST_LOGPROB = 1e-4
"""Log-probabilities are at most 0, to which float32 rounding adds less; the audit of rollouts allows no more either."""
LOWEST_LOGPROB = -110.0
"""The smallest positive float32 is 2^-149, or -103.3 nats: a token of lower probability has probability 0 and cannot be
sampled. The rest leaves room for rounding."""
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class ReplicaDown(Exception):
    """The server is unreachable or unhealthy, or something else answers in its place."""


class _Answer(BaseModel):
    model_config = ConfigDict(strict=True)


class ListedModel(_Answer):
    """A model of ``/v1/models``: a base model (no ``parent``) or an adapter."""

    id: str
    parent: str | None = None
    root: str | None = None
    """An adapter's folder, as the server sees it."""
    max_model_len: int | None = None


class ModelList(_Answer):
    """``/v1/models``."""

    data: list[ListedModel]


class SampledLogprobs(_Answer):
    """Log-probabilities of the sampled tokens, in nats."""

    token_logprobs: list[FiniteFloat]


class PromptLogprob(_Answer):
    """One token's entry at one prompt position."""

    logprob: FiniteFloat


class Choice(_Answer):
    """One completion; ``prompt_logprobs`` holds a mapping by token id for each position, None for the first."""

    token_ids: list[TokenId]
    logprobs: SampledLogprobs
    finish_reason: str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class CompletionAnswer(_Answer):
    """``/v1/completions``."""

    model: str
    choices: Annotated[list[Choice], Field(min_length=1)]


@dataclass(eq=False)
class Replica:
    """A server's address, state and adapters. Methods raise ReplicaDown, or EmailRLError for answers that a retry
    cannot fix."""

    url: str
    """Without ``/v1``; user and password, if any, are kept separately."""
    key: str = ""
    most: int = 64
    """Maximum concurrent requests, across threads."""
    alive: bool = False
    base: str = ""
    """The server's name for its base model."""
    max_model_len: int | None = None
    needed: int | None = None
    """Conversations get no longer than this, so a smaller window than ``max_model_len`` is enough if it is as large."""
    loaded: list[str] = field(default_factory=list)
    """Adapters this engine loaded there, newest last."""
    in_flight: Counter[str] = field(default_factory=Counter)
    """Requests in flight, by adapter; none of an adapter without any."""

    def __post_init__(self) -> None:
        self._counting, self._claimed = Lock(), False
        self._secrets = [self.key, *secrets_in(self.url)]
        self.shown = without_credentials(self.url)
        self.url, self._credentials = split_credentials(self.url)  # httpx logs request URLs

    def begin(self, name: str, *, above_cap: bool = False) -> bool:
        """Count a new request for ``name``; False if the replica is at its limit or reserved."""
        with self._counting:
            if self._claimed or (self.in_flight.total() >= self.most and not above_cap):
                return False
            self.in_flight[name] += 1
            return True

    def end(self, name: str) -> None:
        """Count a request as finished."""
        with self._counting:
            self.in_flight[name] -= 1
            if not self.in_flight[name]:  # waiting requests add up all names many times per second
                del self.in_flight[name]

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Wait until no request is in flight, and start none inside the block."""
        while not self._claim():
            await asyncio.sleep(FULL)
        try:
            while self.in_flight.total():
                await asyncio.sleep(FULL)
            yield
        finally:
            self._claimed = False

    def _claim(self) -> bool:
        with self._counting:
            if self._claimed:
                return False
            self._claimed = True
            return True

    def __str__(self) -> str:
        return f"The vLLM server {self.shown}"

    def redact(self, text: str) -> str:
        """The server's text on one line, without the secrets sent to it."""
        return redacted(text, *self._secrets)

    async def complete(self, client: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response:
        """Request a completion; returns the response whatever its status."""
        return await self._send(client, "POST", COMPLETIONS, body)

    async def check_health(self, client: httpx.AsyncClient) -> None:
        """Check the server's health, and that it lists its models: a proxy may answer ``/health`` with its own page."""
        await self._call(client, "GET", "/health", timeout=HEALTH_TIMEOUT)
        await self.listed(client)

    async def listed(self, client: httpx.AsyncClient) -> list[ListedModel]:
        """The models it lists; also records its base model and context window.

        Raises ReplicaDown if the window has become smaller, as conversations would be cut earlier from then on.
        """
        response = await self._call(client, "GET", "/v1/models", timeout=HEALTH_TIMEOUT)
        data = read_answer(ModelList, str(self), response).data
        bases = [model for model in data if not model.parent]
        if not bases:
            raise EmailRLError(f"{self} lists no base model.", "Check that it is a vLLM server.")
        window, before = bases[0].max_model_len, self.max_model_len
        if window is not None and before is not None and window < min(before, self.needed or before):
            raise ReplicaDown(f"its --max-model-len is {window} now and was {before}; restart it with the larger one")
        self.base, self.max_model_len = bases[0].id, window
        return data

    async def lists(self, client: httpx.AsyncClient, name: str) -> bool:
        """Whether it lists a model."""
        return any(model.id == name for model in await self.listed(client))

    async def load(self, client: httpx.AsyncClient, name: str, path: str) -> None:
        """Load an adapter under a new name and check that it is listed."""
        if not await self.lists(client, name):
            response = await self._call(
                client, "POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}, refused=True
            )
            if not await self.lists(client, name):
                raise EmailRLError(
                    f"{self} did not load the adapter {path}: {self.redact(refusal(response)).rstrip('.')},"
                    " and does not list it.",
                    "It needs --enable-lora, --max-lora-rank, VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and the adapter's "
                    "folder (VLLM_ADAPTER_PATH_MAP).",
                )
        if name not in self.loaded:
            self.loaded.append(name)

    async def unload(self, client: httpx.AsyncClient, name: str) -> None:
        """Unload an adapter; a missing one is no error."""
        await self._call(
            client, "POST", "/v1/unload_lora_adapter", {"lora_name": name}, timeout=HEALTH_TIMEOUT, refused=True
        )
        self.loaded.remove(name)

    async def probe(
        self, client: httpx.AsyncClient, name: str, probe: Probe, sampling: dict[str, Any], expected: Expected
    ) -> None:
        """Compare its log-probabilities with the expected ones; ProbeError if they differ.

        They are those of tokens sampled after prefixes of the text, and those of the text itself unless other requests
        run: prompt log-probabilities may crash vLLM's engine then (vllm #16668).
        """

        async def sample(prompts: list[list[int]], **changes: Any) -> list[Choice]:
            body = sampling | {"model": name, "prompt": prompts, "max_tokens": 1, "seed": 0} | changes
            try:
                response = await self._call(client, "POST", COMPLETIONS, body)
            except EmailRLError:
                if not await self.lists(client, name):
                    raise ReplicaDown("it restarted and lost its adapters") from None
                raise
            return read_choices(str(self), response, name, vocabulary=probe.vocabulary, most=1, count=len(prompts))

        if self.in_flight.total():
            while not self.begin(name, above_cap=True):
                await asyncio.sleep(FULL)
            try:
                drawn = await sample(probe.prefixes)
            finally:
                self.end(name)
        else:
            async with self.alone():
                [whole] = await sample([probe.ids], prompt_logprobs=0)
                drawn = await sample(probe.prefixes)
            probe.check_prompt(str(self), prompt_logprobs(str(self), probe.ids, whole), expected)
        tokens = [token for each in drawn for token in each.token_ids]
        probe.check_next(
            str(self), tokens, [value for each in drawn for value in each.logprobs.token_logprobs], expected
        )

    async def _call(
        self,
        client: httpx.AsyncClient,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        timeout: float | None = None,
        refused: bool = False,
    ) -> httpx.Response:
        """Send one request; a 4xx that a retry cannot change is returned with ``refused``, else EmailRLError."""
        limit = httpx.USE_CLIENT_DEFAULT if timeout is None else timeout
        try:
            response = await self._send(client, method, path, body, limit)
        except httpx.RequestError as error:
            raise ReplicaDown(self.redact(cause(error))) from error
        if may_pass(response.status_code):
            raise ReplicaDown(f"HTTP {response.status_code}")
        if response.status_code >= 400 and not refused:
            reason = self.redact(refusal(response)).rstrip(".")
            raise EmailRLError(f"{self} refused {path}: {reason}.", "Check VLLM_URLS and VLLM_API_KEY.")
        return response

    async def _send(
        self,
        client: httpx.AsyncClient,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        timeout: Any = httpx.USE_CLIENT_DEFAULT,
    ) -> httpx.Response:
        return await client.request(method, self.url + path, json=body, timeout=timeout, auth=self._credentials)


# -- what is asked


def completion_body(request: Request, name: str, *, stop_ids: list[int], room: int) -> dict[str, Any]:
    """The request body for vLLM's completions endpoint: ids in, ids and log-probabilities out.

    Every sampling parameter is explicit: the server takes missing ones from the model's generation config.
    """
    sampling = request.sampling
    return {
        "model": name,
        "prompt": request.prompt_ids,
        "max_tokens": min(sampling.max_tokens, room),
        "seed": request.seed,
        "stop_token_ids": stop_ids,
    } | sampling_body(sampling.temperature, sampling.top_p, sampling.top_k)


def sampling_body(temperature: float, top_p: float, top_k: int) -> dict[str, Any]:
    """Fields common to all completions."""
    return {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,  # a server without a tokenizer cannot name them otherwise
        "skip_special_tokens": False,
    }


def read_completion(
    replica: Replica, request: Request, body: dict[str, Any], response: httpx.Response, vocabulary: int
) -> Completion:
    """Parse the completion of ``body``.

    Raises as ``read_choices``, and EmailRLError if its prompt ids differ or it stopped at a token that ends no turn of
    the trainer's model: the next prompt would continue a turn that the policy did not end.
    """
    [choice] = read_choices(str(replica), response, body["model"], vocabulary=vocabulary, most=body["max_tokens"])
    if choice.prompt_token_ids not in (None, request.prompt_ids):
        raise EmailRLError(f"{replica} read tokens that differ from the prompt's.", TOO_OLD)
    reason = choice.finish_reason
    if reason == "stop" and (not choice.token_ids or choice.token_ids[-1] not in body["stop_token_ids"]):
        last = f"at token {choice.token_ids[-1]}" if choice.token_ids else "before its first token"
        raise EmailRLError(
            f"{replica} stopped a completion {last}, where the trainer's model ends no turn.",
            "Give it the trainer's model, with the same tokenizer and generation_config.json.",
        )
    completion = Completion(request.trajectory_id, choice.token_ids, choice.logprobs.token_logprobs, str(reason))
    if reason not in ("stop", "length"):
        completion.finish_reason, completion.error = "error", f"{replica} ended a completion by {reason!r}"
    return completion


def cause(error: httpx.RequestError | ReplicaDown) -> str:
    """Why a server did not answer, as part of a sentence."""
    text = str(error) if isinstance(error, (IncompleteReply, ReplicaDown)) else f"{type(error).__name__} {error}"
    return " ".join(text.split()).rstrip(".")


# -- what is answered


A = TypeVar("A", bound=_Answer)


def read_answer(shape: type[A], who: str, response: httpx.Response) -> A:
    """A response's body as ``shape``.

    Raises ReplicaDown for a body that is not JSON (a proxy's error page), EmailRLError naming ``who`` and the field for
    JSON of another format.
    """
    try:
        return shape.model_validate_json(response.content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        raise ReplicaDown(f"HTTP {response.status_code} without a JSON body")
    place = _short(".".join(str(step) for step in first["loc"])) or "the whole"
    raise EmailRLError(
        f"{who} answers {response.request.url.path} in a format other than vLLM's ({place}: {_short(first['msg'])}).",
        "Check VLLM_URLS; vLLM 0.26 or newer is required.",
    )


def read_choices(
    who: str, response: httpx.Response, name: str, *, vocabulary: int, most: int, count: int = 1
) -> list[Choice]:
    """The completions of ``count`` prompts by model ``name``.

    Raises as ``read_answer``, and EmailRLError for a completion that no sampler can draw: more than ``most`` tokens, or
    fewer though it ended by length, ids outside ``vocabulary``, implausible log-probabilities.
    """
    answer = read_answer(CompletionAnswer, who, response)
    if answer.model != name:
        raise EmailRLError(f"{who} answered with {_short(answer.model)!r} when asked for {name!r}.", "Restart it.")
    if len(answer.choices) != count:
        raise EmailRLError(
            f"{who} returns {len(answer.choices)} completions of {counted(count, 'prompt')}.",
            TOO_OLD,
        )
    for choice in answer.choices:
        _check_choice(who, choice, vocabulary, most)
    return answer.choices


def _check_choice(who: str, choice: Choice, vocabulary: int, most: int) -> None:
    """Raise EmailRLError for a completion that no sampler can draw."""
    ids, logprobs = choice.token_ids, choice.logprobs.token_logprobs
    lowest, highest, last = min(logprobs, default=0.0), max(logprobs, default=0.0), max(ids, default=0)
    if len(ids) != len(logprobs):
        what, hint = f"returns {len(ids)} token ids with {len(logprobs)} log-probabilities", TOO_OLD
    elif len(ids) > most:
        what, hint = f"returns {len(ids)} tokens when asked for at most {most}", "Check that it is a vLLM server."
    elif lowest < LOWEST_LOGPROB or highest > HIGHEST_LOGPROB:
        wrong = lowest if lowest < LOWEST_LOGPROB else highest
        what = f"returns {wrong:.6g} as the log-probability of a token that it sampled"
        hint = "Check that it is a vLLM server, with --logprobs-mode processed_logprobs."
    elif last >= vocabulary:  # the trainer's embedding has no row for it
        what, hint = f"returns token {last}, outside the vocabulary of {vocabulary}", "Check its base model."
    elif choice.finish_reason == "length" and len(ids) < most:
        what = f"cut a completion after {len(ids)} of {counted(most, 'token')}"
        hint = (
            "Check its --max-model-len, and start it with --generation-config vllm: a model's may set max_new_tokens."
        )
    else:
        return
    raise EmailRLError(f"{who} {what}.", hint)


def prompt_logprobs(who: str, ids: Sequence[int], choice: Choice) -> list[float]:
    """The log-probabilities of ``ids[1:]``; EmailRLError if one is missing."""
    entries = choice.prompt_logprobs or []
    found = [(entry or {}).get(str(token)) for token, entry in zip(ids[1:], entries[1:], strict=False)]
    values = [one.logprob for one in found if one is not None]
    if len(entries) != len(ids) or len(values) != len(ids) - 1:
        raise EmailRLError(f"{who} returns no prompt log-probabilities.", TOO_OLD)
    return values


def refusal(response: httpx.Response) -> str:
    """The status of a response and the server's full error message."""
    try:
        body: Any = json.loads(response.content)
    except (ValueError, RecursionError):
        body = None
    error = body.get("error") if isinstance(body, dict) else None
    text = error.get("message") if isinstance(error, dict) else error
    return f"HTTP {response.status_code} {text or ''}".strip()


def _short(text: str) -> str:
    return " ".join(text.split())[:LONGEST]
