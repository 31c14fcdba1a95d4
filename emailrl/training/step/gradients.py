"""Gradients of one mini-batch: micro-batch by micro-batch, summed over the ranks, clipped.

Denominators are global over the ranks, so each rank adds its share of one loss, however the samples are split. Ranks
may have any number of micro-batches, even none: they synchronize once per mini-batch, on the sums.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from emailrl.errors import EmailRLError
from emailrl.ranks import Ranks
from emailrl.settings import Settings
from emailrl.training.step.batches import MicroBatch
from emailrl.training.step.meter import Meter
from emailrl.training.step.objective import Denominators, Objective
from emailrl.training.step.prepared import Prepared
from emailrl.training.step.scoring import LogprobScorer


@dataclass(frozen=True, slots=True)
class Pass:
    """Result of a pass over a mini-batch, besides the gradients left in the parameters."""

    losses: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    meter: Meter = field(default_factory=Meter)
    tokens: dict[int, Tensor] = field(default_factory=dict)
    """By the sample's index on this rank: old and current log-probabilities and advantages, ``(3, T)``."""

    def not_finite(self) -> dict[str, float]:
        """Losses and gradient norms that are not finite."""
        return {name: value for name, value in self.losses.items() if not math.isfinite(value)}


class Gradients:
    """Computes the gradients of a mini-batch in the parameters, the same on every rank."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        critic: Sequence[nn.Parameter],
        scorer: LogprobScorer,
        objective: Objective,
        loss_scale: torch.amp.GradScaler,
        settings: Settings,
        ranks: Ranks,
    ) -> None:
        self.parameters, self.critic, self.scorer, self.objective = parameters, critic, scorer, objective
        self.loss_scale, self.settings, self.ranks = loss_scale, settings, ranks

    def compute(
        self,
        prepared: list[Prepared],
        optimizer: torch.optim.Optimizer,
        meter: Meter,
        *,
        first_pass: bool,
        critic_only: bool,
    ) -> Pass:
        """Clipped gradients of a mini-batch; recomputed at half the loss scale after an overflow.

        The result covers all ranks, except for the tokens. Halved micro-batches are counted in ``meter``.
        """
        limit = self.settings.training.max_grad_norm or math.inf
        while True:
            found = self._of_all_ranks(prepared, optimizer, meter, first_pass=first_pass, critic_only=critic_only)
            self.loss_scale.unscale_(optimizer)
            scaled_up = self.loss_scale.is_enabled() and self.loss_scale.get_scale() > 1
            retry = scaled_up and not found.not_finite()
            found.losses["grad_norm"] = float(nn.utils.clip_grad_norm_(self.parameters, limit))
            if self.critic:
                found.losses["critic_grad_norm"] = float(nn.utils.clip_grad_norm_(self.critic, limit))
            if not (retry and found.not_finite()):
                return found
            self.loss_scale.update()

    def _of_all_ranks(
        self,
        prepared: list[Prepared],
        optimizer: torch.optim.Optimizer,
        meter: Meter,
        *,
        first_pass: bool,
        critic_only: bool,
    ) -> Pass:
        """The mini-batch's gradients and losses, summed over the ranks."""
        counts = self.ranks.gather(self.objective.count(prepared))
        whole = Denominators(sum(each.policy for each in counts), sum(each.tokens for each in counts))
        idle = self.scorer.idle_batches(len(prepared))
        work = partial(
            self._accumulate, prepared, idle, whole, optimizer, first_pass=first_pass, critic_only=critic_only
        )
        own, halved = self.scorer.together(work)
        found = Pass(tokens=own.tokens)
        have = [parameter.grad is not None for parameter in (*self.parameters, *self.critic)]
        cap = self.scorer.max_tokens
        every = self.ranks.gather((dict(own.losses), own.meter, halved, have, cap))
        for losses, measured, count, _, _ in every:
            for name, value in losses.items():
                found.losses[name] += value
            found.meter.merge(measured)
            meter.counts["micro_batches_halved"] += count
        self.scorer.max_tokens = min(each[-1] for each in every)
        self._sum([any(flags) for flags in zip(*(each[3] for each in every), strict=True)])
        return found

    def _sum(self, wanted: Sequence[bool]) -> None:
        """Sum over ranks the gradients of parameters that have one on any rank, as one flat float32 tensor."""
        if self.ranks.is_alone:
            return
        parameters = [p for p, has in zip((*self.parameters, *self.critic), wanted, strict=True) if has]
        if not parameters:
            return
        flat = self.ranks.agree(lambda: _flat(parameters))
        self.ranks.sum(flat)
        parts = flat.split([p.numel() for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype)

    def _accumulate(
        self,
        prepared: list[Prepared],
        idle: list[MicroBatch],
        whole: Denominators,
        optimizer: torch.optim.Optimizer,
        *,
        first_pass: bool,
        critic_only: bool,
    ) -> tuple[Pass, int]:
        """This rank's gradients, restarted with smaller micro-batches when memory runs out; and the number of restarts.

        It restarts because an interrupted backward pass leaves partial gradients.
        """
        halved = 0
        if not prepared:  # an unused scaler has no scale to divide by
            self.loss_scale.scale(torch.zeros((), device=self.parameters[0].device))
        while True:
            optimizer.zero_grad(set_to_none=True)
            found, failed = Pass(), None
            try:
                for item in prepared:
                    failed = item.batch
                    self._backward(item, whole, found, first_pass=first_pass, critic_only=critic_only)
                for failed in idle:
                    self._idle(failed, critic_only=critic_only)
                return found, halved
            except torch.OutOfMemoryError:
                pass  # handled below, where the traceback holds no tensors any more
            assert failed is not None
            self.scorer.ran_out(failed)
            halved += 1
            prepared[:] = [part for other in prepared for part in other.halves_like(failed, self.scorer.size)]

    def _idle(self, batch: MicroBatch, *, critic_only: bool) -> None:
        """Run a blank micro-batch forward and backward; it adds nothing to the gradients."""
        scored = self.scorer.forward(batch, critic_only=critic_only)
        wanted = scored.values if critic_only else scored.logprobs
        assert wanted is not None
        self.loss_scale.scale(0.0 * wanted.sum()).backward()

    def _backward(
        self, item: Prepared, whole: Denominators, found: Pass, *, first_pass: bool, critic_only: bool
    ) -> None:
        """Add one micro-batch's gradient, its share of the losses and its tokens."""
        wants_entropy = self.settings.algorithm.entropy_coef > 0
        scored = self.scorer.forward(item.batch, entropy_grad=wants_entropy, critic_only=critic_only)
        loss, losses, old = self.objective.loss(
            item, scored, whole, found.meter, first_pass=first_pass, critic_only=critic_only
        )
        for name, value in losses.items():
            found.losses[name] += value
        assert item.advantages is not None
        columns = torch.stack((old, scored.logprobs.detach(), item.advantages), dim=1)
        found.tokens.update(zip(item.batch.indices, columns, strict=True))
        self.loss_scale.scale(loss).backward()


@contextmanager
def enough_memory(doing: str) -> Iterator[None]:
    """Turn an out-of-memory error that smaller micro-batches cannot avoid into EmailRLError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise EmailRLError(
            f"Out of memory while {doing}.", "Lower MAX_TOKENS_PER_MICRO_BATCH or LORA_RANK, or set LOAD_IN_4BIT=true."
        ) from error


def _flat(parameters: Sequence[nn.Parameter]) -> Tensor:
    """All gradients as one float32 tensor; zeros for a parameter without one."""
    with enough_memory("summing gradients"):
        return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten().float() for p in parameters])
