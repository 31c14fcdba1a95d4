"""Check that an engine samples from the weights it was given, by the log-probabilities of tokens that it draws after
prefixes of a text: they must agree with those of the trainer's own model to rounding; and if the trainer's changed
between two adapters, bit-identical output means unchanged weights. A silently ignored or stale adapter is the costliest
failure of a separate sampler (verl #7495, vLLM #42125, #53888). The log-probabilities of a prompt would say as much,
but asking for them beside other requests may crash vLLM (#16668)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from emailrl.base.errors import EmailRLError
from emailrl.checkpoints import WEIGHTS, sha256_of
from emailrl.engines.local.passes import device_of, sampling_weights
from emailrl.model.logprobs import hidden_states, projection
from emailrl.model.policy import Policy

TEXT = (
    "You search a mailbox with tools. When does the lease on the office end, and who signed it? "
    '{"name": "search_emails", "arguments": {"keywords": ["lease", "office"], "sent_after": "2001-03-05"}} '
    "The lease ends on 31 May 2002; Ann signed it in Houston. Please send me the agreement before Friday, thanks."
)
LONGEST = 120
"""Length of the text in tokens, and how many tokens of a rollout's completion are compared. All prefixes together have
fewer than the 2,048 tokens that a server reads in one step: on a CPU, vLLM fails on a seeded prompt read in parts."""
SHORTEST = 8  # tokens that a rollout's completion needs to be compared
PREFIXES = 32  # prefixes of the text, of evenly spaced lengths, after each of which an engine draws one token
TOLERANCE = {torch.float32: 3e-3, torch.float64: 3e-3}
ROUNDING = 0.3  # mean gap allowed in 16 bits, as different kernels round differently
STALE = 300  # an unchanged answer is wrong if the trainer's own moved by more than this part of the tolerance


class ProbeError(EmailRLError):
    """An engine that does not sample from the weights it was given."""


@dataclass(frozen=True, eq=False)
class Expected:
    """What an engine must answer under one adapter, by the trainer's model; usable in any thread."""

    adapter_sha256: str | None  # None is the bare base model
    logits: Tensor  # ``(PREFIXES, vocabulary)``, of the tokens after each of ``Probe.prefixes``; float32, on the CPU


class Probe:
    """A text, and what the trainer's base model with one adapter after another makes of it. ``temperature`` is the
    training rollouts'; ``tolerance`` bounds the mean gap in nats (None: depends on the dtype)."""

    def __init__(self, policy: Policy, *, temperature: float, tolerance: float | None = None) -> None:
        self._policy, self._weights = policy, sampling_weights(policy.model)
        self.vocabulary, self.temperature = policy.vocabulary, temperature
        self.tolerance = tolerance or TOLERANCE.get(policy.dtype, ROUNDING)
        self.ids: list[int] = policy.tokenizer.encode(TEXT, add_special_tokens=False)[:LONGEST]
        self.prefixes = [self.ids[: len(self.ids) * number // PREFIXES] for number in range(1, PREFIXES + 1)]
        self._answers: dict[str, tuple[Expected, list[int], list[float]]] = {}
        """The last tokens that every engine drew after the prefixes, and what was expected."""

    def load(self, path: Path | None) -> Expected:
        """What engines must answer under the adapter in ``path`` (None: the bare base model), whose files are checked.
        ``score`` and ``check_completion`` use that adapter from now on."""
        with ThreadPoolExecutor(1) as pool:  # hashing takes as long as the rest
            sha256 = None if path is None else pool.submit(sha256_of, path / WEIGHTS)
            self._weights.load(path)
            logits = self._logits(self.ids, 0)[[len(prefix) - 1 for prefix in self.prefixes]]
        return Expected(None if sha256 is None else sha256.result(), logits.float().cpu())

    def score(self, ids: Sequence[int], start: int = 1, temperature: float = 1.0) -> list[float]:
        """The trainer's log-probabilities of ``ids[start:]``; at temperature 0, of the untempered distribution."""
        return _logprobs(self._logits(ids[:-1], start - 1), ids[start:], temperature)

    def _logits(self, ids: Sequence[int], start: int) -> Tensor:
        """``(len(ids) - start, vocabulary)``: row ``i`` predicts what follows ``ids[: start + i + 1]``."""
        model = self._weights.model
        tokens = torch.tensor([list(ids)], device=device_of(model))
        # The model's own layers, not the trainer's fused ones: those belong to the model in training, and this may be a
        # copy of it with merged weights.
        # Not in inference mode: tensors that a sharded base gathers there could not be trained with afterwards.
        with self._policy.accompanied(), torch.no_grad(), self._weights.active():
            logits: Tensor = projection(model)(hidden_states(model, tokens)[0, start:])
        return logits

    def check(self, who: str, drawn: Sequence[int], logprobs: Sequence[float], expected: Expected) -> None:
        """Compare the token that an engine drew after each of ``prefixes`` with the expected logits. Raises ProbeError
        naming ``who``, also if they are those of another adapter bit for bit."""
        own = partial(_logprobs, expected.logits, drawn)
        self._compare(who, logprobs, own)
        before, *answer = self._answers.get(who, (expected,))
        moved = mean_gap(own(self.temperature), _logprobs(before.logits, drawn, self.temperature))
        # After a step without an update the adapter is unchanged, so identical output is correct.
        changed = expected.adapter_sha256 != before.adapter_sha256 and moved > self.tolerance / STALE
        if changed and answer == [list(drawn), list(logprobs)]:
            same = f"its output is bit-identical, while the trainer's moved by {moved:.2g}"
            raise ProbeError(f"{who} did not load the new adapter: {same}.", "Restart it.")
        self._answers[who] = expected, list(drawn), list(logprobs)

    def check_completion(
        self, who: str, prompt: Sequence[int], sampled: Sequence[int], logprobs: Sequence[float]
    ) -> None:
        """Compare what ``who`` sampled after ``prompt`` with the trainer's model; raises ProbeError."""
        ids, start = [*prompt, *sampled[:LONGEST]], len(prompt)
        self._compare(who, logprobs[:LONGEST], partial(self.score, ids, start))

    def _compare(self, who: str, logprobs: Sequence[float], own: Callable[[float], list[float]]) -> None:
        gap = mean_gap(logprobs, own(self.temperature))
        if gap <= self.tolerance:
            return
        off = f"log-probabilities of sampled tokens are off by {gap:.4f} nats"
        if mean_gap(logprobs, own(1.0)) <= self.tolerance:
            hint = "Start it with --logprobs-mode processed_logprobs, TOP_P=1 and TOP_K=0."
            raise ProbeError(f"{who} returns log-probabilities taken before temperature: {off}.", hint)
        hint = "Check its base model and dtype, and that nothing caches or mixes up replies; VLLM_PROBE_TOLERANCE is "
        raise ProbeError(f"{who} is not sampling from the adapter it was given: {off}.", f"{hint}{self.tolerance:g}.")


def _logprobs(logits: Tensor, tokens: Sequence[int], temperature: float) -> list[float]:
    labels = torch.tensor(list(tokens), device=logits.device)[:, None]
    return (logits / (temperature or 1.0)).log_softmax(-1).gather(1, labels)[:, 0].tolist()


def mean_gap(one: Sequence[float], other: Sequence[float]) -> float:
    """Mean absolute difference; infinite if the lengths differ, NaN if any value is NaN."""
    if len(one) != len(other) or not one:
        return float("inf")
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)
