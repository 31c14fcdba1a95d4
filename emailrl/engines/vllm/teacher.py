"""A vLLM server as the teacher of on-policy distillation: it tells the log-probabilities of a prompt's tokens, but only
before temperature (vLLM #37082), so the policy samples at temperature 1."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, Self, TypeVar

import httpx
import torch
from torch import Tensor

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.http import Failed, retried, tell
from emailrl.engines.vllm.arguments import api_key, read_urls
from emailrl.engines.vllm.replica import Replica, ReplicaDown
from emailrl.engines.vllm.servers import with_client
from emailrl.model.policy import Policy
from emailrl.model.teacher import other_tokenizer
from emailrl.settings import PolicySettings

T = TypeVar("T")
TOKENS_A_TEXT: Final = 2_000  # of the vocabulary in one request, which fits into any context window


class ServerTeacher:
    """The base model of the server that TEACHER names, a ``model.teacher.Teacher``. EmailRLError if it fails."""

    def __init__(self, settings: PolicySettings) -> None:
        urls = read_urls(settings.training.teacher or "", "TEACHER")
        if len(urls) != 1:
            raise UsageError(f"TEACHER names {len(urls)} servers.", "Name one.")
        self._vllm, self._key = settings.vllm, api_key(settings.vllm)
        self._replica = Replica(urls[0], self._key, setting="TEACHER")
        tell(self._replica.url, "teacher", with_key=bool(self._key))

    def identify(self) -> str:
        """The server's name for its model."""
        self._ask(self._replica.models)
        return self._replica.base

    def checked(self, policy: Policy) -> Self:
        """This teacher, whose tokenizer reads the text of each token of the policy's; UsageError if it reads others."""
        self.identify()
        own = policy.tokenizer
        texts = [str(own.decode([token])) for token in range(len(own))]
        parts = ["\n".join(texts[at : at + TOKENS_A_TEXT]) for at in range(0, len(texts), TOKENS_A_TEXT)]
        theirs = self._ask(*(partial(self._replica.tokenize, text=part) for part in parts))
        if theirs != [own.encode(part, add_special_tokens=False) for part in parts]:
            raise other_tokenizer(self._replica)
        return self

    def __call__(self, token_ids: Tensor, loss_mask: Tensor, shared: Tensor) -> Tensor:
        scores = torch.zeros(token_ids.shape, device=token_ids.device)
        ends = [int(mask.nonzero()[-1]) + 1 for mask in loss_mask]  # nothing after a row's last trained token is asked
        rows = [ids[:end] for ids, end in zip(token_ids.tolist(), ends, strict=True)]
        answers = self._ask(*(partial(self._replica.score, ids=ids) for ids in rows))
        for row, logprobs in zip(scores, answers, strict=True):
            row[: len(logprobs)] = torch.tensor(logprobs)
        return scores * loss_mask

    def _ask(self, *asked: Callable[[httpx.AsyncClient], Awaitable[T]]) -> list[T]:
        """The answers, all asked for at once, each again as VLLM_RETRIES says."""

        async def answer(client: httpx.AsyncClient, ask: Callable[[httpx.AsyncClient], Awaitable[T]]) -> T:
            async def attempt() -> T:
                try:
                    return await ask(client)
                except ReplicaDown as error:
                    raise Failed(str(error)) from error

            found = await retried(attempt, self._vllm.vllm_retries)
            if isinstance(found, Failed):
                said = f"The teacher at {self._replica.shown} does not answer: {found.why.rstrip('.')}."
                raise EmailRLError(said, "Start it, then resume.")
            return found

        async def answers(client: httpx.AsyncClient) -> list[T]:
            return await asyncio.gather(*(answer(client, ask) for ask in asked))

        return with_client(self._key, self._vllm.vllm_timeout, answers)
