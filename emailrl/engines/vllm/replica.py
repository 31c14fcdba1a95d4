"""One vLLM server: what is asked of it over HTTP, its loaded adapters, and strict reading of its answers. Pydantic
parses and checks a body in one pass, a nesting bound included, faster than ``json`` alone parses it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from emailrl.base.credentials import redacted, secrets_in, split_credentials, without_credentials
from emailrl.base.errors import EmailRLError
from emailrl.base.http import IncompleteReply, may_pass
from emailrl.base.plain import counted, cut, one_line
from emailrl.engines.base import Completion, Request, SamplingParams
from emailrl.engines.vllm.probe import Expected, Probe

COMPLETIONS = "/v1/completions"
HEALTH_TIMEOUT = 10.0  # seconds, of requests that cost a server nothing: its health, its models, unloading an adapter
TOO_OLD = "vLLM 0.26 or newer is required."
OTHERWISE = (
    "Check its base model and --max-model-len, and start it as emailrl serve does: with --generation-config vllm and "
    "--logprobs-mode processed_logprobs."
)
NEEDED = (
    "It needs --enable-lora, --max-lora-rank, VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and the adapter's folder "
    "(VLLM_ADAPTER_PATH_MAP)."
)
LONGEST = 200  # characters quoted from a server's error message
HIGHEST_LOGPROB = 1e-4
"""Log-probabilities are at most 0, to which float32 rounding adds less; the audit of rollouts allows no more either."""
LOWEST_LOGPROB = -110.0
"""The smallest positive float32 is 2^-149, or -103.3 nats: a token of lower probability has probability 0 and cannot be
sampled. The rest leaves room for rounding."""


class ReplicaDown(Exception):
    """The server is unreachable or unhealthy, or something else answers in its place."""


@dataclass(eq=False)
class Replica:
    """A server's address, state and adapters. Methods raise ReplicaDown, or EmailRLError for what no retry fixes."""

    url: str  # without ``/v1``; user and password, if any, are kept separately
    key: str = ""
    needed: int | None = None  # conversations get no longer than this: a smaller window may be as large
    alive: bool = True  # False once it has failed, until it is admitted again
    base: str = ""  # the server's name for its base model
    max_model_len: int | None = None
    loaded: list[str] = field(default_factory=list)  # adapters this engine loaded there, newest last
    in_flight: list[str] = field(default_factory=list)  # the model of each request in flight, of all threads
    setting: str = "VLLM_URLS"  # what names it

    def __post_init__(self) -> None:
        self._secrets = [self.key, *secrets_in(self.url)]
        self.shown = without_credentials(self.url)
        self.url, self._credentials = split_credentials(self.url)  # httpx logs request URLs

    def __str__(self) -> str:
        return f"The vLLM server {self.shown}"

    def redact(self, text: str) -> str:
        """The server's text on one line, without the secrets sent to it."""
        return redacted(text, *self._secrets)

    async def complete(self, client: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response:
        """Request a completion; returns the response whatever its status, raises httpx.RequestError without one."""
        self.in_flight.append(body["model"])
        try:
            return await self._send(client, COMPLETIONS, body)
        finally:
            self.in_flight.remove(body["model"])

    async def check_health(self, client: httpx.AsyncClient) -> list[str]:
        """The models it lists, if it is healthy; a proxy may answer ``/health`` with its own page."""
        await self._call(client, "/health", quick=True)
        return await self.models(client)

    async def models(self, client: httpx.AsyncClient) -> list[str]:
        """The models it lists; also records its base model and context window. Raises ReplicaDown if the window has
        become smaller, as conversations would be cut earlier from then on."""
        response = await self._call(client, "/v1/models", quick=True)
        listed = read_answer(_ModelList, str(self), response).data
        base = next((model for model in listed if not model.parent), None)
        if base is None:
            raise EmailRLError(f"{self} lists no base model.", "Check that it is a vLLM server.")
        window, before = base.max_model_len, self.max_model_len
        if window is not None and before is not None and window < min(before, self.needed or before):
            raise ReplicaDown(f"its --max-model-len is {window} now and was {before}; restart it with the larger one")
        self.base, self.max_model_len = base.id, window
        return [model.id for model in listed]

    async def load(self, client: httpx.AsyncClient, name: str, path: str) -> None:
        """Load an adapter under a new name and check that it is listed."""
        if name not in await self.models(client):
            body = {"lora_name": name, "lora_path": path}
            response = await self._call(client, "/v1/load_lora_adapter", body, refused=True)
            if name not in await self.models(client):
                why = f"{self.redact(refusal(response)).rstrip('.')}, and does not list it"
                raise EmailRLError(f"{self} did not load the adapter {path}: {why}.", NEEDED)
        if name not in self.loaded:
            self.loaded.append(name)

    async def unload(self, client: httpx.AsyncClient, name: str) -> None:
        """Unload an adapter; a missing one is no error."""
        await self._call(client, "/v1/unload_lora_adapter", {"lora_name": name}, quick=True, refused=True)
        self.loaded.remove(name)

    async def prove(
        self, client: httpx.AsyncClient, name: str, probe: Probe, sampling: SamplingParams, expected: Expected
    ) -> None:
        """Compare the tokens it draws after the probe's prefixes with the expected ones; ProbeError if they differ."""
        body = completion_body(name, sampling, probe.prefixes, 0, sampling.max_tokens)
        try:
            response = await self._call(client, COMPLETIONS, body)
        except EmailRLError:
            if name not in await self.models(client):
                raise ReplicaDown("it restarted and lost its adapters") from None
            raise
        drawn = read_choices(str(self), response, name, probe.vocabulary, most=1, count=len(probe.prefixes))
        if not all(each.token_ids for each in drawn):
            raise EmailRLError(f"{self} returns no token when asked for one.", "Check that it is a vLLM server.")
        logprobs = [each.logprobs.token_logprobs[0] for each in drawn]
        probe.check(str(self), [each.token_ids[0] for each in drawn], logprobs, expected)

    async def tokenize(self, client: httpx.AsyncClient, text: str) -> list[int]:
        """The ids that its tokenizer reads in a text; EmailRLError if it has none (as with ``emailrl serve``)."""
        body = {"model": self.base, "prompt": text, "add_special_tokens": False}
        return read_answer(_Tokens, str(self), await self._call(client, "/tokenize", body)).tokens

    async def score(self, client: httpx.AsyncClient, ids: Sequence[int]) -> list[float]:
        """Its base model's log-probabilities of the tokens, before temperature; 0 for the first."""
        body = completion_body(self.base, SamplingParams(1, 1.0), ids, 0, 1) | {"prompt_logprobs": 0}
        answer = read_answer(_Scores, str(self), await self._call(client, COMPLETIONS, body)).choices[0].prompt_logprobs
        found = [(each or {}).get(str(token), {}).get("logprob") for token, each in zip(ids, answer, strict=False)]
        logprobs = [each for each in found[1:] if isinstance(each, int | float) and -math.inf < each <= HIGHEST_LOGPROB]
        if not len(logprobs) + 1 == len(answer) == len(ids):
            raise EmailRLError(f"{self} does not return the log-probability of each token of a prompt.", TOO_OLD)
        return [0.0, *logprobs]

    async def _call(
        self, client: httpx.AsyncClient, path: str, body: Any = None, *, quick: bool = False, refused: bool = False
    ) -> httpx.Response:
        """Get ``path``, or post ``body`` to it, within ``HEALTH_TIMEOUT`` if ``quick``. A 4xx that a retry cannot
        change is returned if it may be ``refused``, else raised as EmailRLError."""
        try:
            response = await self._send(client, path, body, HEALTH_TIMEOUT if quick else httpx.USE_CLIENT_DEFAULT)
        except httpx.RequestError as error:
            raise ReplicaDown(self.redact(cause(error))) from error
        if may_pass(response.status_code):
            raise ReplicaDown(f"HTTP {response.status_code}")
        if response.status_code >= 400 and not refused:
            reason = self.redact(refusal(response)).rstrip(".")
            raise EmailRLError(f"{self} refused {path}: {reason}.", f"Check {self.setting} and VLLM_API_KEY.")
        return response

    async def _send(
        self, client: httpx.AsyncClient, path: str, body: Any, timeout: Any = httpx.USE_CLIENT_DEFAULT
    ) -> httpx.Response:
        method, url = "GET" if body is None else "POST", self.url + path
        return await client.request(method, url, json=body, timeout=timeout, auth=self._credentials)


def completion_body(
    name: str, sampling: SamplingParams, prompt: Sequence[Any], seed: int, room: int, stop_ids: Sequence[int] = ()
) -> dict[str, Any]:
    """The request body for vLLM's completions endpoint: ids in, ids and log-probabilities out. Every sampling parameter
    is explicit: the server takes missing ones from the model's generation config."""
    drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": 0.0}
    penalties = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    # A server without a tokenizer cannot name tokens otherwise than by their ids.
    told = {"logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True, "skip_special_tokens": False}
    asked = {"model": name, "prompt": prompt, "max_tokens": min(sampling.max_tokens, room), "seed": seed}
    return asked | drawn | penalties | told | {"stop_token_ids": list(stop_ids)}


def read_completion(
    replica: Replica, request: Request, body: dict[str, Any], response: httpx.Response, vocabulary: int
) -> Completion:
    """Parse the completion of ``body``. Raises as ``read_choices``, and EmailRLError if its prompt ids differ or it
    stopped at a token that ends no turn of the trainer's model: the next prompt would continue an unended turn."""
    [choice] = read_choices(str(replica), response, body["model"], vocabulary, most=body["max_tokens"])
    if choice.prompt_token_ids not in (None, request.prompt_ids):
        raise EmailRLError(f"{replica} read tokens that differ from the prompt's.", TOO_OLD)
    reason = choice.finish_reason
    if reason == "stop" and (not choice.token_ids or choice.token_ids[-1] not in body["stop_token_ids"]):
        last = f"at token {choice.token_ids[-1]}" if choice.token_ids else "before its first token"
        hint = "Give it the trainer's model, with the same tokenizer and generation_config.json."
        raise EmailRLError(f"{replica} stopped a completion {last}, where the trainer's model ends no turn.", hint)
    error = None if reason in ("stop", "length") else f"{replica} ended a completion by {reason!r}"
    logprobs, ended = choice.logprobs.token_logprobs, "error" if error else str(reason)
    return Completion(request.trajectory_id, choice.token_ids, logprobs, ended, error=error)


def cause(error: httpx.RequestError | ReplicaDown) -> str:
    """Why a server did not answer, as part of a sentence."""
    text = str(error) if isinstance(error, (IncompleteReply, ReplicaDown)) else f"{type(error).__name__} {error}"
    return " ".join(text.split()).rstrip(".")


class _Answer(BaseModel):
    model_config = ConfigDict(strict=True)


class _Model(_Answer):
    id: str
    parent: str | None = None  # the base model of an adapter
    max_model_len: int | None = None


class _ModelList(_Answer):
    data: list[_Model]


class _Logprobs(_Answer):
    token_logprobs: list[FiniteFloat]  # of the sampled tokens, in nats


class _Choice(_Answer):
    token_ids: list[Annotated[int, Field(ge=0, lt=2**31)]]
    logprobs: _Logprobs
    finish_reason: str | None = None
    prompt_token_ids: list[int] | None = None


class _Scored(_Answer):
    prompt_logprobs: list[dict[str, dict[str, Any]] | None]  # by token id; None for the first


class _Scores(_Answer):
    choices: Annotated[list[_Scored], Field(min_length=1, max_length=1)]


class _Tokens(_Answer):
    tokens: list[int]


class _Completions(_Answer):
    model: str
    choices: Annotated[list[_Choice], Field(min_length=1)]


A = TypeVar("A", bound=_Answer)


def read_answer(shape: type[A], who: str, response: httpx.Response) -> A:
    """A response's body as ``shape``. Raises ReplicaDown for a body that is not JSON (a proxy's error page),
    EmailRLError naming ``who`` and the field for JSON of another format."""
    try:
        return shape.model_validate_json(response.content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        raise ReplicaDown(f"HTTP {response.status_code} without a JSON body")
    wrong = cut(one_line(f"{'.'.join(map(str, first['loc'])) or 'the whole'}: {first['msg']}"), LONGEST)
    path = response.request.url.path
    raise EmailRLError(f"{who} answers {path} in a format other than vLLM's ({wrong}).", f"Check VLLM_URLS; {TOO_OLD}")


def read_choices(
    who: str, response: httpx.Response, name: str, vocabulary: int, *, most: int, count: int = 1
) -> list[_Choice]:
    """The completions of ``count`` prompts by model ``name``. Raises as ``read_answer``, and EmailRLError for a
    completion that no sampler can draw: more than ``most`` tokens, or fewer though it ended by length, ids outside
    ``vocabulary``, implausible log-probabilities."""
    answer = read_answer(_Completions, who, response)
    if answer.model != name:
        raise EmailRLError(f"{who} answered with {answer.model[:LONGEST]!r} when asked for {name!r}.", "Restart it.")
    if len(answer.choices) != count:
        raise EmailRLError(f"{who} returns {len(answer.choices)} completions of {counted(count, 'prompt')}.", TOO_OLD)
    for choice in answer.choices:
        ids, logprobs, last = choice.token_ids, choice.logprobs.token_logprobs, max(choice.token_ids, default=0)
        wrong = next((value for value in logprobs if not LOWEST_LOGPROB <= value <= HIGHEST_LOGPROB), None)
        faults = {
            f"returns {len(ids)} token ids with {len(logprobs)} log-probabilities": len(ids) != len(logprobs),
            f"returns {len(ids)} tokens when asked for at most {most}": len(ids) > most,
            f"returns {wrong or 0:.6g} as the log-probability of a token that it sampled": wrong is not None,
            # The trainer's embedding has no row for it.
            f"returns token {last}, outside the vocabulary of {vocabulary}": last >= vocabulary,
            f"cut a completion after {len(ids)} of {counted(most, 'token')}": (
                choice.finish_reason == "length" and len(ids) < most
            ),
        }
        for what in (what for what, holds in faults.items() if holds):
            raise EmailRLError(f"{who} {what}.", OTHERWISE)
    return answer.choices


def refusal(response: httpx.Response) -> str:
    """The status of a response and the server's full error message."""
    try:
        body: Any = json.loads(response.content)
    except (ValueError, RecursionError):
        body = None
    error = body.get("error") if isinstance(body, dict) else None
    text = error.get("message") if isinstance(error, dict) else error
    return f"HTTP {response.status_code} {text or ''}".strip()
