"""One micro-batch's share of an optimizer update's loss: surrogate, KL, entropy, critic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from emailrl.policy.logprobs import TokenLogprobs
from emailrl.settings import Settings
from emailrl.training.algorithms import Algorithm
from emailrl.training.kl import AdaptiveKL, estimate
from emailrl.training.losses import aggregate, correction_weights, count_for, policy_loss, value_loss
from emailrl.training.step.batches import MicroBatch
from emailrl.training.step.meter import Meter
from emailrl.training.step.prepared import Prepared


@dataclass(frozen=True, slots=True)
class Denominators:
    """Denominators over a whole mini-batch, so that the losses of its micro-batches add up."""

    policy: float
    """As counted by the policy's aggregation; a trajectory in several samples is one sequence."""
    tokens: float
    """Trainable tokens."""


class Objective:
    """The loss of an algorithm; reads the KL weight, which is adapted elsewhere."""

    def __init__(self, algorithm: Algorithm, settings: Settings, kl: AdaptiveKL) -> None:
        self.algorithm, self.wanted, self.kl = algorithm, settings.algorithm, kl
        self.constant_length = settings.algorithm.constant_length or settings.agent.max_tokens

    def count(self, prepared: Sequence[Prepared]) -> Denominators:
        """Count a mini-batch."""
        aggregation, length = self.algorithm.aggregation, self.constant_length
        batches = [item.batch for item in prepared]
        return Denominators(
            policy=sum(float(count_for(b.loss_mask, aggregation, length, share=b.share)) for b in batches),
            tokens=sum(batch.num_trainable for batch in batches),
        )

    def loss(
        self,
        item: Prepared,
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
        old = scored.logprobs.detach() if item.old_logprobs is None else item.old_logprobs
        weight = item.batch.num_trainable
        if first_pass:
            _compare(old, item.batch, meter)
        loss = self._surrogate(item, scored.logprobs, old, denominators.policy, meter, first_pass=first_pass)
        losses = {"policy_loss": float(loss.detach())}
        if item.ref_logprobs is not None:
            kl = estimate(scored.logprobs, item.ref_logprobs, self.algorithm.kl_estimator)
            meter.add("kl", float(kl.detach().sum()) / weight, weight)
            if self.algorithm.kl_in == "loss":
                penalty = self.kl.coef * self._aggregate(kl, item, denominators.policy)
                losses["kl_loss"] = float(penalty.detach())
                loss = loss + penalty
        if scored.entropy is not None:
            meter.add("entropy", float(scored.entropy.detach().sum()) / weight, weight)
            if self.wanted.entropy_coef:
                loss = loss - self.wanted.entropy_coef * self._aggregate(scored.entropy, item, denominators.policy)
        if scored.values is not None:
            error = self._value_error(item, scored.values, denominators.tokens, meter)
            losses["value_loss"] = float(error.detach())
            loss = self.wanted.value_coef * error + (0 if critic_only else loss)
        losses["loss"] = float(loss.detach())
        return loss, losses, old

    def _surrogate(
        self, item: Prepared, logprobs: Tensor, old: Tensor, denominator: float, meter: Meter, *, first_pass: bool
    ) -> Tensor:
        """The clipped policy loss, each token weighted by the importance correction, if enabled."""
        assert item.advantages is not None
        algorithm, batch = self.algorithm, item.batch
        loss, ratios = policy_loss(
            logprobs,
            old,
            item.advantages,
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

    def _value_error(self, item: Prepared, values: Tensor, tokens: float, meter: Meter) -> Tensor:
        """The critic's loss: a token mean, whatever the policy's aggregation."""
        assert item.old_values is not None and item.returns is not None
        clip = self.algorithm.value_clip
        loss, metrics = value_loss(
            values, item.old_values, item.returns, item.batch.loss_mask, clip=clip, denominator=tokens
        )
        for name, value in metrics.items():
            meter.add(name, value, item.batch.num_trainable)
        return loss

    def _aggregate(self, per_token: Tensor, item: Prepared, denominator: float) -> Tensor:
        share = self._share(item.batch)
        return aggregate(
            per_token if share is None else per_token * share,
            item.batch.loss_mask,
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
