"""One micro-batch's share of an optimizer update's loss: surrogate, KL, entropy, critic; and what is measured on it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from emailrl.model.logprobs import TokenLogprobs
from emailrl.settings import AlgorithmSettings
from emailrl.training.algorithms import Algorithm
from emailrl.training.batch import MicroBatch
from emailrl.training.kl import AdaptiveKL, estimate
from emailrl.training.losses import aggregate, correction_weights, count_for, policy_loss, value_loss


class Meter:
    """Weighted means and extremes: a name that ends in ``_min`` or ``_max`` keeps the extreme."""

    def __init__(self) -> None:
        self.sums: defaultdict[str, float] = defaultdict(float)
        self.weights: defaultdict[str, float] = defaultdict(float)
        self.extremes: dict[str, float] = {}
        self.counts: Counter[str] = Counter()

    def add(self, name: str, value: float, weight: float = 1.0) -> None:
        """Count ``value`` with ``weight`` into the mean of ``name``, or take it as its extreme."""
        if name.endswith(("_min", "_max")):
            pick = min if name.endswith("_min") else max
            self.extremes[name] = pick(self.extremes.get(name, value), value)
        else:
            self.sums[name] += value * weight
            self.weights[name] += weight

    def merge(self, other: Meter) -> None:
        """Add the means and extremes of ``other``."""
        for name, value in other.sums.items():
            self.sums[name] += value
            self.weights[name] += other.weights[name]
        for name, value in other.extremes.items():
            self.add(name, value)

    def means(self) -> dict[str, float]:
        """Return every metric under its name."""
        return {name: value / self.weights[name] for name, value in self.sums.items()} | self.extremes


@dataclass(frozen=True, slots=True)
class Denominators:
    """Denominators over a whole mini-batch, so that the losses of its micro-batches add up."""

    policy: float
    """As counted by the policy's aggregation; a trajectory in several samples is one sequence."""
    tokens: float
    """Trainable tokens."""
    micro_batches: int = 0
    """Of one rank."""


class Objective:
    """The loss of an algorithm; reads the KL weight, which is adapted elsewhere."""

    def __init__(self, algorithm: Algorithm, wanted: AlgorithmSettings, kl: AdaptiveKL, max_tokens: int) -> None:
        """``max_tokens`` (per completion) is the constant length unless CONSTANT_LENGTH is set."""
        self.algorithm, self.wanted, self.kl = algorithm, wanted, kl
        self.constant_length = wanted.constant_length or max_tokens

    def count(self, batches: Sequence[MicroBatch]) -> Denominators:
        """Count a mini-batch."""
        aggregation, length = self.algorithm.aggregation, self.constant_length
        return Denominators(
            policy=sum(float(count_for(b.loss_mask, aggregation, length, share=b.share)) for b in batches),
            tokens=sum(batch.num_trainable for batch in batches),
            micro_batches=len(batches),
        )

    def loss(
        self,
        batch: MicroBatch,
        scored: TokenLogprobs,
        denominators: Denominators,
        meter: Meter,
        *,
        first_pass: bool,
        critic_only: bool = False,
    ) -> tuple[Tensor, dict[str, float], Tensor]:
        """Return a micro-batch's share of the loss, of its parts by name, and the old log-probabilities ``(B, T)``.

        Without old log-probabilities, those of ``scored`` are used. With ``critic_only`` only the critic's loss counts;
        the others are still measured.
        """
        old = scored.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        weight = batch.num_trainable
        if first_pass:
            _compare(old, batch, meter)
        loss = self._surrogate(batch, scored.logprobs, old, denominators.policy, meter, first_pass=first_pass)
        losses = {"policy_loss": float(loss.detach())}
        if batch.ref_logprobs is not None:
            kl = estimate(scored.logprobs, batch.ref_logprobs, self.algorithm.kl_estimator)
            meter.add("kl", float(kl.detach().sum()) / weight, weight)
            if self.algorithm.kl_in == "loss":
                penalty = self.kl.coef * self._aggregate(kl, batch, denominators.policy)
                losses["kl_loss"] = float(penalty.detach())
                loss = loss + penalty
        if scored.entropy is not None:
            meter.add("entropy", float(scored.entropy.detach().sum()) / weight, weight)
            if self.wanted.entropy_coef:
                loss = loss - self.wanted.entropy_coef * self._aggregate(scored.entropy, batch, denominators.policy)
        if scored.values is not None:
            error = self._value_error(batch, scored.values, denominators.tokens, meter)
            losses["value_loss"] = float(error.detach())
            loss = self.wanted.value_coef * error + (0 if critic_only else loss)
        losses["loss"] = float(loss.detach())
        return loss, losses, old

    def _surrogate(
        self, batch: MicroBatch, logprobs: Tensor, old: Tensor, denominator: float, meter: Meter, *, first_pass: bool
    ) -> Tensor:
        """The clipped policy loss, each token weighted by the importance correction, if enabled."""
        assert batch.advantages is not None
        algorithm = self.algorithm
        loss, ratios = policy_loss(
            logprobs,
            old,
            batch.advantages,
            batch.loss_mask,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            dual_clip=algorithm.dual_clip,
            ratio_level=algorithm.ratio_level,
            aggregation=algorithm.aggregation,
            constant_length=self.constant_length,
            weights=self._weights(old, batch, meter, first_pass=first_pass),
            denominator=denominator,
        )
        for name, value in ratios.items():
            meter.add(name, value, batch.num_trainable)
        return loss

    def _weights(self, old: Tensor, batch: MicroBatch, meter: Meter, *, first_pass: bool) -> Tensor | None:
        correction, share = self._correction(old, batch, meter, first_pass=first_pass), self._share(batch)
        return share if correction is None else correction if share is None else correction * share

    def _share(self, batch: MicroBatch) -> Tensor | None:
        """Weight of a row's token mean, ``(B, 1)``: a trajectory in several samples counts as one."""
        return batch.share[:, None] if self.algorithm.aggregation == "sequence_mean" else None

    def _correction(self, old: Tensor, batch: MicroBatch, meter: Meter, *, first_pass: bool) -> Tensor | None:
        """Token weights, from old and sampler log-probabilities, so the same in every pass."""
        kind = self.algorithm.importance_correction
        if kind == "off":
            return None
        weights, found = correction_weights(
            old,
            batch.sampler_logprobs,
            batch.loss_mask,
            kind=kind,
            low=self.wanted.correction_low,
            high=self.wanted.correction_high,
            ratio_level=self.algorithm.ratio_level,
        )
        by_token = self.algorithm.ratio_level == "token"
        sampled = batch.loss_mask & ~batch.sampler_logprobs.isnan() if by_token else batch.loss_mask
        for name, value in found.items() if first_pass else ():
            meter.add(name, value, float(sampled.sum()))
        return weights

    def _value_error(self, batch: MicroBatch, values: Tensor, tokens: float, meter: Meter) -> Tensor:
        """The critic's loss: a token mean, whatever the policy's aggregation."""
        assert batch.old_values is not None and batch.returns is not None
        clip = self.algorithm.value_clip
        loss, metrics = value_loss(
            values, batch.old_values, batch.returns, batch.loss_mask, clip=clip, denominator=tokens
        )
        for name, value in metrics.items():
            meter.add(name, value, batch.num_trainable)
        return loss

    def _aggregate(self, per_token: Tensor, batch: MicroBatch, denominator: float) -> Tensor:
        share = self._share(batch)
        return aggregate(
            per_token if share is None else per_token * share,
            batch.loss_mask,
            self.algorithm.aggregation,
            constant_length=self.constant_length,
            denominator=denominator,
        )


def _compare(old_logprobs: Tensor, batch: MicroBatch, meter: Meter) -> None:
    """Record the difference between the trainer's and the sampler's log-probabilities over sampled tokens."""
    known = batch.loss_mask & ~batch.sampler_logprobs.isnan()
    gap = (old_logprobs - batch.sampler_logprobs)[known].abs()
    if gap.numel():
        meter.add("sampler_gap_mean", float(gap.mean()), gap.numel())
        meter.add("sampler_gap_max", float(gap.max()))
