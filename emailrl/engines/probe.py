"""Check that an engine samples from the weights it was given: compare its log-probabilities of one text with the
trainer's.

A silently ignored or stale adapter is the costliest failure of training with a
separate sampler (verl #7495, vLLM #42125). Two checks: the log-probabilities must agree with those of the trainer's own
model to rounding; and if the trainer's changed between two adapters, an engine whose output is bit-identical has not
changed its weights. The second check catches what rounding hides from the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from emailrl.engines.weights import adapter_sha256, device_of, sampling_weights
from emailrl.errors import EmailRLError
from emailrl.policy.logprobs import hidden_states, projection

if TYPE_CHECKING:
    from emailrl.policy.load import Policy

TEXT = (
    "You search a mailbox with tools. When does the lease on the office end, and who signed it? "
    '{"name": "search_emails", "arguments": {"keywords": ["lease", "office"], "sent_after": "2001-03-05"}} '
    "The lease ends on 31 May 2002; Ann signed it in Houston. Please send me the agreement before Friday, thanks."
)
LONGEST = 128
"""Length of the probe in tokens."""
SAMPLED = 8
"""Tokens sampled after the probe, to check that log-probabilities are taken after temperature."""
SAMPLED_ALONE = 32
"""The same when only sampled tokens are compared."""
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
ROUNDING = 0.1
"""Mean gap allowed in 16 bits, as different kernels round differently."""


class ProbeError(EmailRLError):
    """An engine that does not sample from the weights it was given."""


class Probe:
    """A text and its log-probabilities under the trainer's base model with the last loaded adapter.

    ``temperature`` is the training rollouts'; ``tolerance`` bounds the mean gap in nats (None: depends on the dtype).
    """

    def __init__(self, policy: Policy, *, temperature: float, tolerance: float | None = None) -> None:
        self._policy, self._weights = policy, sampling_weights(policy.model)
        self.temperature = temperature
        self.tolerance = tolerance or TOLERANCE.get(policy.dtype, ROUNDING)
        self.ids: list[int] = policy.tokenizer.encode(TEXT, add_special_tokens=False)[:LONGEST]
        self.expected: list[float] = []
        """The trainer's log-probabilities of ``ids[1:]`` under the adapter last loaded."""
        self.adapter_sha256: str | None = None
        """Of the adapter last loaded; None is the bare base model."""
        self._before: list[float] = []
        self._answers: dict[str, list[float]] = {}
        self._answers_before: dict[str, list[float]] = {}

    @property
    def vocabulary(self) -> int:
        """Vocabulary size of the trainer's model."""
        rows = self._weights.model.get_input_embeddings().num_embeddings
        assert isinstance(rows, int)
        return rows

    def load(self, path: Path | None) -> None:
        """Take the adapter in ``path`` (None: the bare base model) as the weights that engines must sample from now
        on."""
        self._weights.load(path)
        sha256 = None if path is None else adapter_sha256(path)
        # After a step without an update the adapter is unchanged, so identical output is correct.
        self._before, self._answers_before = self.expected, {} if sha256 == self.adapter_sha256 else self._answers
        self.adapter_sha256 = sha256
        self.expected, self._answers = self.score(self.ids), {}

    def score(self, ids: Sequence[int], start: int = 1, temperature: float = 1.0) -> list[float]:
        """The trainer's log-probabilities of ``ids[start:]``; at temperature 0, of the untempered distribution."""
        model = self._weights.model
        tokens = torch.tensor([list(ids)], device=device_of(model))
        # The model's own layers, not the trainer's fused ones: those belong to the model in training, and this may be a
        # copy of it with merged weights.
        # Not in inference mode: tensors that a sharded base gathers there could not be trained with afterwards.
        with self._policy.accompanied(), torch.no_grad(), self._weights.active():
            logits = projection(model)(hidden_states(model, tokens)[0, start - 1 : -1]) / (temperature or 1.0)
            logprobs = logits.log_softmax(-1).gather(1, tokens[0, start:, None])[:, 0]
        return logprobs.tolist()

    def check(self, who: str, prompt: Sequence[float], sampled: Sequence[int], logprobs: Sequence[float]) -> float:
        """Compare an engine's log-probabilities; returns the mean gap over the probe.

        ``prompt`` holds those of ``ids[1:]``; ``sampled`` and ``logprobs`` are the tokens drawn next at
        ``temperature``. Raises ProbeError naming ``who``.
        """
        gap = self.compare(who, prompt, self.expected)
        before = self._answers_before.get(who)
        moved = mean_gap(self.expected, self._before) if self._before else 0.0
        if before is not None and moved > self.tolerance / 100 and list(prompt) == before:
            raise ProbeError(
                f"{who} did not load the new adapter: its output is bit-identical, "
                f"while the trainer's moved by {moved:.2g}.",
                "Restart it.",
            )
        self.check_sampled(who, sampled, logprobs)
        self._answers[who] = list(prompt)
        return gap

    def compare(self, who: str, prompt: Sequence[float], expected: Sequence[float]) -> float:
        """Compare log-probabilities of ``ids[1:]`` with recorded ones, without a model; returns the mean gap. Raises
        ProbeError naming ``who``.
        """
        gap = mean_gap(prompt, expected)
        if not gap <= self.tolerance:
            raise ProbeError(
                f"{who} is not sampling from the adapter it was given: log-probabilities are off by {gap:.4f} nats.",
                f"Check its base model and dtype; VLLM_PROBE_TOLERANCE is {self.tolerance:g}.",
            )
        return gap

    def check_sampled(self, who: str, sampled: Sequence[int], logprobs: Sequence[float]) -> None:
        """Compare an engine's samples after the probe text with the trainer's model; raises ProbeError naming
        ``who``."""
        ids, start = [*self.ids, *sampled], len(self.ids)
        gap = mean_gap(logprobs, self.score(ids, start, self.temperature))
        # Few tokens are sampled, so their gap is noisier than the mean over the text.
        if not gap <= 3 * self.tolerance:
            untempered = mean_gap(logprobs, self.score(ids, start)) <= 3 * self.tolerance
            raise ProbeError(
                f"{who} returns log-probabilities of sampled tokens that are off by {gap:.4f} nats"
                + (": they are taken before temperature." if untempered else "."),
                "Start it with --logprobs-mode processed_logprobs, TOP_P=1 and TOP_K=0." if untempered else "",
            )


def mean_gap(one: Sequence[float], other: Sequence[float]) -> float:
    """Mean absolute difference; infinite if the lengths differ, NaN if any value is NaN."""
    if len(one) != len(other) or not one:
        return float("inf")
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)
