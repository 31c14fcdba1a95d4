"""Strict parsing of vLLM server responses: an unexpected format is an error that names the server.

Pydantic parses and checks a body in one pass, a nesting bound included, faster than ``json`` alone parses it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from emailrl.errors import EmailRLError

LONGEST = 200
"""Maximum characters quoted from a server's error message."""
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


class SampledLogprob(_Answer):
    """The log-probability of a sampled token, in nats; vLLM sends -9999 for a missing one."""

    logprob: Annotated[FiniteFloat, Field(gt=-9999)]


class SampledLogprobs(_Answer):
    """One entry per sampled token."""

    content: list[SampledLogprob]


class PromptLogprob(_Answer):
    """One token's entry at one prompt position."""

    logprob: FiniteFloat


class Choice(_Answer):
    """One completion."""

    token_ids: list[TokenId]
    logprobs: SampledLogprobs
    finish_reason: str | None = None


class Usage(_Answer):
    """Token counts."""

    prompt_tokens: int


class Generated(_Answer):
    """``/inference/v1/generate``; ``prompt_logprobs`` holds a mapping by token id for each position, None for the
    first."""

    model: str
    choices: Annotated[list[Choice], Field(min_length=1, max_length=1)]
    usage: Usage
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None

    @property
    def token_ids(self) -> list[int]:
        """The sampled tokens."""
        return self.choices[0].token_ids

    @property
    def logprobs(self) -> list[float]:
        """The sampled tokens' log-probabilities."""
        return [sampled.logprob for sampled in self.choices[0].logprobs.content]


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


def read_generated(
    who: str, response: httpx.Response, *, model: str, prompt: Sequence[int], vocabulary: int
) -> Generated:
    """The completion of ``prompt`` by ``model``, checked for ids below ``vocabulary``; raises as ``read_answer``."""
    answer = read_answer(Generated, who, response)
    if answer.model != model:
        raise EmailRLError(f"{who} answered with {_short(answer.model)!r} when asked for {model!r}.", "Restart it.")
    if answer.usage.prompt_tokens != len(prompt):
        raise EmailRLError(
            f"{who} read {answer.usage.prompt_tokens} tokens of a prompt of {len(prompt)}.",
            "vLLM 0.26 or newer is required.",
        )
    sampled, logprobs = answer.token_ids, answer.choices[0].logprobs.content
    if len(sampled) != len(logprobs):
        raise EmailRLError(
            f"{who} returns {len(sampled)} token ids with {len(logprobs)} log-probabilities.",
            "vLLM 0.26 or newer is required.",
        )
    if max(sampled, default=0) >= vocabulary:  # the trainer's embedding has no row for it
        raise EmailRLError(
            f"{who} returns token {max(sampled)}, outside the vocabulary of {vocabulary}.", "Check its base model."
        )
    return answer


def prompt_logprobs(who: str, ids: Sequence[int], answer: Generated) -> list[float]:
    """The log-probabilities of ``ids[1:]``; EmailRLError if one is missing."""
    entries = answer.prompt_logprobs or []
    found = [(entry or {}).get(str(token)) for token, entry in zip(ids[1:], entries[1:], strict=False)]
    values = [one.logprob for one in found if one is not None]
    if len(entries) != len(ids) or len(values) != len(ids) - 1:
        raise EmailRLError(f"{who} returns no prompt log-probabilities.", "vLLM 0.26 or newer is required.")
    return values


def lacks_route(response: httpx.Response) -> bool:
    """Whether a vLLM server has no such route; for an unknown model it answers with an error object."""
    return response.status_code == 404 and response.content.strip() == b'{"detail":"Not Found"}'


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
