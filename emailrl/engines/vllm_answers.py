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
from emailrl.plain import counted

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
            "vLLM 0.26 or newer is required.",
        )
    for choice in answer.choices:
        _check_choice(who, choice, vocabulary, most)
    return answer.choices


def _check_choice(who: str, choice: Choice, vocabulary: int, most: int) -> None:
    logprobs = choice.logprobs.token_logprobs
    if len(choice.token_ids) != len(logprobs):
        raise EmailRLError(
            f"{who} returns {len(choice.token_ids)} token ids with {len(logprobs)} log-probabilities.",
            "vLLM 0.26 or newer is required.",
        )
    if len(choice.token_ids) > most:
        raise EmailRLError(
            f"{who} returns {len(choice.token_ids)} tokens when asked for at most {most}.",
            "Check that it is a vLLM server.",
        )
    for value in (max(logprobs, default=0.0), min(logprobs, default=0.0)):
        if not LOWEST_LOGPROB <= value <= HIGHEST_LOGPROB:
            raise EmailRLError(
                f"{who} returns {value:.6g} as the log-probability of a token that it sampled.",
                "Check that it is a vLLM server, with --logprobs-mode processed_logprobs.",
            )
    if max(choice.token_ids, default=0) >= vocabulary:  # the trainer's embedding has no row for it
        raise EmailRLError(
            f"{who} returns token {max(choice.token_ids)}, outside the vocabulary of {vocabulary}.",
            "Check its base model.",
        )
    if choice.finish_reason == "length" and len(choice.token_ids) < most:
        raise EmailRLError(
            f"{who} cut a completion after {len(choice.token_ids)} of {counted(most, 'token')}.",
            "Check its --max-model-len, and start it with --generation-config vllm: a model's may set max_new_tokens.",
        )


def prompt_logprobs(who: str, ids: Sequence[int], choice: Choice) -> list[float]:
    """The log-probabilities of ``ids[1:]``; EmailRLError if one is missing."""
    entries = choice.prompt_logprobs or []
    found = [(entry or {}).get(str(token)) for token, entry in zip(ids[1:], entries[1:], strict=False)]
    values = [one.logprob for one in found if one is not None]
    if len(entries) != len(ids) or len(values) != len(ids) - 1:
        raise EmailRLError(f"{who} returns no prompt log-probabilities.", "vLLM 0.26 or newer is required.")
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
