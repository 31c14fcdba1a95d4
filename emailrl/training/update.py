"""The updates of a step: samples and rewards in, an updated adapter and the step's metrics out.

A step is one iteration of the loop; an update is one step of the optimizer. ``Updater.train`` makes all of a step's
updates: old and reference log-probabilities first, then ``update_epochs`` passes over ``num_mini_batches``
mini-batches, one update each, whose micro-batches share one global denominator. Each rank adds its share of one loss,
however the samples are split, and may have any number of micro-batches, even none.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from emailrl.base.errors import EmailRLError
from emailrl.model.device import enough_memory
from emailrl.model.policy import Policy
from emailrl.settings import AgentSettings, AlgorithmSettings, TrainingSettings
from emailrl.training.across import Across
from emailrl.training.algorithms import Algorithm
from emailrl.training.batch import MicroBatch, Share, TrainingSample, make_shares, micro_batches, mini_batches
from emailrl.training.forward import Forward
from emailrl.training.kl import AdaptiveKL
from emailrl.training.objective import Denominators, Meter, Objective
from emailrl.training.passes import needs_old_logprobs, needs_reference
from emailrl.training.shaping import shape_advantages


@dataclass(frozen=True, slots=True)
class TokenNumbers:
    """One sample's token numbers in its last pass; lists as long as its ids, meaningless outside its mask."""

    old_logprobs: list[float]
    logprobs: list[float]
    advantages: list[float]


@dataclass(frozen=True, slots=True)
class Skipped:
    """An update whose loss or gradient was not finite: what is not, by name, and its micro-batches on the CPU."""

    broken: dict[str, float]
    batches: list[MicroBatch]


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Results of a step's updates."""

    metrics: dict[str, float] = field(default_factory=dict)
    tokens: list[TokenNumbers] = field(default_factory=list)
    """Per sample, in order."""
    skipped: list[Skipped] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over a mini-batch, and besides the gradients left in the parameters, its results."""

    step: int
    first: bool
    """Of the step's passes over this mini-batch; it measures what does not change between them."""
    critic_only: bool
    losses: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    meter: Meter = field(default_factory=Meter)
    tokens: dict[int, Tensor] = field(default_factory=dict)
    """By the sample's index on this rank: old and current log-probabilities and advantages, ``(3, T)``."""
    skipped: list[Skipped] = field(default_factory=list)

    def again(self) -> Pass:
        """The same pass without results."""
        return Pass(self.step, self.first, self.critic_only)

    def not_finite(self) -> dict[str, float]:
        """Losses and gradient norms that are not finite."""
        return {name: value for name, value in self.losses.items() if not math.isfinite(value)}


class Updater:
    """Holds the optimizer and the KL weight of a trainable policy; follows an algorithm given as data."""

    def __init__(
        self,
        policy: Policy,
        algorithm: Algorithm,
        training: TrainingSettings,
        wanted: AlgorithmSettings,
        agent: AgentSettings,
        *,
        total_steps: int | None = None,
        across: Across | None = None,
        largest_gap: float = math.inf,
    ) -> None:
        """``total_steps`` is where a linear or cosine schedule ends; None takes ``training.max_steps``.

        ``largest_gap``, in nats, is how far sampled log-probabilities may be off on average before the run ends.
        """
        self.policy, self.algorithm, self.training, self.wanted = policy, algorithm, training, wanted
        self.across = across or Across()
        self.total_steps, self.largest_gap = total_steps or training.max_steps, largest_gap
        named = policy.trainable_parameters()
        if not named:
            raise EmailRLError("The policy has no trainable parameters.", "Load it with trainable=True.")
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        critic = list(policy.value_head.named_parameters()) if policy.value_head is not None else []
        self.critic = [parameter for _, parameter in critic]
        self.names += [f"value_head.{name}" for name, _ in critic]
        self.optimizer = torch.optim.AdamW(
            [{"params": params} for params in (self.parameters, self.critic) if params],
            lr=training.learning_rate,
            betas=(training.adam_beta1, training.adam_beta2),
            weight_decay=training.weight_decay,
        )
        # Gradients divided by many tokens underflow in 16-bit floats, so the loss is scaled up.
        self.loss_scale = torch.amp.GradScaler(policy.device.type, enabled=policy.dtype == torch.float16)
        self.kl = AdaptiveKL(coef=wanted.beta, target=wanted.kl_target, horizon=wanted.kl_horizon)
        self.forward = Forward(policy, training, agent.temperature)
        self.objective = Objective(algorithm, wanted, self.kl, agent.max_tokens)
        self.skipped_in_a_row = 0
        """Consecutive updates that were not finite."""

    def train(self, samples: Sequence[TrainingSample], paid: Mapping[str, float], *, step: int) -> UpdateResult:
        """Make the updates of step ``step`` (from 1), and return its metrics and token numbers.

        ``paid`` is the reward of each trajectory by id (``shaping.terminal_rewards``). Mini-batch order and dropout
        depend only on (seed, ``step``). An update with a non-finite loss or gradient is skipped and counted in
        ``updates_skipped``; those in a row in ``skipped_in_a_row``. Raises ValueError without samples.
        """
        if not samples:
            raise ValueError("a step without samples: skip it")
        training = self.training
        shares = make_shares(
            samples,
            paid,
            list(mini_batches(samples, training.num_mini_batches, seed=f"{training.seed}/{step}")),
            self.across.world,
            step=step,
            share_prefixes=self.forward.shares_prefixes,
        )
        with self.across.at_work():
            metrics, tokens, skipped = self.take(self.across.share(shares))
        metrics |= {
            "trainable_tokens": sum(sample.num_trainable for sample in samples),
            "total_tokens": sum(len(sample.token_ids) for sample in samples),
        }
        rows = (tokens[i][:, : len(sample.token_ids)].tolist() for i, sample in enumerate(samples))
        return UpdateResult(metrics, [TokenNumbers(*row) for row in rows], skipped)

    def take(self, share: Share) -> tuple[dict[str, float], dict[int, Tensor], list[Skipped]]:
        """Make the updates of a step from this rank's share of it.

        Returns its metrics, each sample's tokens ``(3, T)`` by its index in the step, and what was skipped, of all
        ranks.
        """
        training, step, meter = self.training, share.step, Meter()
        critic_only = bool(self.critic) and step <= self.wanted.critic_warmup_steps
        tokens: dict[int, Tensor] = {}
        skipped: list[Skipped] = []
        rate = self._set_rates(step)
        summing = self.across.seconds
        with torch.random.fork_rng([self.policy.device] if self.policy.device.type == "cuda" else []):
            torch.manual_seed((training.seed * 1_000_003 + step + self.across.rank * 2**32) % 2**63)
            rounds, metrics = self._prepare(share, meter)
            for epoch in range(training.update_epochs):
                for n, batches in enumerate(rounds):
                    rounds[n], done = self._update(batches, Pass(step, epoch == 0, critic_only), meter)
                    tokens |= done.tokens
                    skipped += done.skipped
        self.policy.model.eval()
        metrics = meter.means() | metrics | {"learning_rate": rate, "kl_coef": self.kl.coef}
        if self.kl.coef and "kl" in metrics and not critic_only:
            self.kl.update(metrics["kl"], share.num_trajectories)
        metrics |= {name: meter.counts[name] for name in ("updates_skipped", "micro_batches_halved")}
        computed = sum(batch.num_tokens for batches in rounds for batch in batches)
        placed = {share.places[i]: columns.cpu() for i, columns in tokens.items()}
        _, every = self.across.totals(lambda: (None, (computed, placed, skipped)))
        if self.across.world > 1:
            metrics |= {
                "rank_tokens_mean": sum(count for count, _, _ in every) / self.across.world,
                "rank_tokens_max": max(count for count, _, _ in every),
                "all_reduce_seconds": self.across.seconds - summing,
            }
        tokens = {i: columns for _, each, _ in every for i, columns in each.items()}
        of_all = [
            Skipped(parts[0].broken, [batch for part in parts for batch in part.batches])
            for parts in zip(*(each for _, _, each in every), strict=True)
        ]
        return metrics, tokens, of_all

    def synchronize(self) -> None:
        """Copy rank 0's weights and state to all ranks; raises EmailRLError if one differs afterwards."""
        self.across.synchronize([*self.parameters, *self.critic], self.state_dict, self.load_state_dict)

    def state_dict(self) -> dict[str, Any]:
        """Return everything the next step depends on besides adapter and critic, ready for ``torch.save``."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "kl_coef": self.kl.coef,
            "parameters": self.names,
            "skipped_in_a_row": self.skipped_in_a_row,
            "loss_scale": self.loss_scale.state_dict(),
            "start": self.policy.start,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue bit for bit from ``state``; raises EmailRLError for another adapter's state."""
        if state["parameters"] != self.names:
            if any(name.startswith("value_head.") for name in state["parameters"]) != bool(self.critic):
                raise EmailRLError(
                    f"The trainer state is from a run {'without' if self.critic else 'with'} a critic.",
                    "Resume with the run's --algorithm.",
                )
            raise EmailRLError("The trainer state belongs to another adapter.", "Resume with the run's LoRA settings.")
        if self.policy.start is not None:
            if state["start"] is None:
                raise EmailRLError(
                    "The run was started with REFERENCE=base.", "Unset REFERENCE, or start a new run with --adapter."
                )
            for own, value in zip(self.policy.start, state["start"], strict=True):
                own.copy_(value)
        # A copy: the optimizer would otherwise go on writing into the caller's tensors.
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.kl.coef = float(state["kl_coef"])
        self.skipped_in_a_row = int(state["skipped_in_a_row"])
        if state["loss_scale"]:
            self.loss_scale.load_state_dict(state["loss_scale"])

    def _set_rates(self, step: int) -> float:
        """Set the learning rates of adapter and critic, which follow one schedule; returns the adapter's."""
        rate = learning_rate(step, self.training, self.total_steps)
        critic = self.wanted.critic_learning_rate * (rate / self.training.learning_rate)
        for group, group_rate in zip(self.optimizer.param_groups, (rate, critic), strict=False):
            group["lr"] = group_rate
        return rate

    def _prepare(self, share: Share, meter: Meter) -> tuple[list[list[MicroBatch]], dict[str, float]]:
        """Pad the mini-batches, score them by policy, critic and reference, and shape the advantages of the step."""
        self.policy.model.eval()
        updates = len(share.mini_batches) * self.training.update_epochs
        old = needs_old_logprobs(self.algorithm, kl_coef=self.kl.coef, updates=updates)
        reference = needs_reference(self.kl.coef)
        rounds = [micro_batches(share.samples, self.forward.layout(), mini) for mini in share.mini_batches]
        _, every = self.across.totals(lambda: (None, [len(batches) for batches in rounds]))

        def score() -> tuple[list[list[MicroBatch]], int]:
            scored, halved = [], 0
            for batches, counts in zip(rounds, zip(*every, strict=True), strict=True):
                blanks = self._blanks(len(batches), counts)
                done, times = self.forward.score_all(batches, blanks=blanks, old=old, reference=reference)
                scored.append(done)
                halved += times
            return scored, halved

        rounds, halves = self.across.totals(score)
        meter.counts["micro_batches_halved"] += sum(halves)
        shaped, metrics = shape_advantages(
            [batch for batches in rounds for batch in batches],
            share.paid,
            self.algorithm,
            self.wanted,
            kl_coef=self.kl.coef,
            across=self.across,
        )
        self.policy.model.train()
        following = iter(shaped)
        return [[next(following) for _ in batches] for batches in rounds], metrics

    def _update(self, batches: list[MicroBatch], wanted: Pass, meter: Meter) -> tuple[list[MicroBatch], Pass]:
        """Make one update from the micro-batches of a mini-batch, or skip it if it would not be finite.

        Returns the micro-batches, halved if they did not fit into memory, and the pass with its results.
        """
        batches, done = self._clipped_gradients(batches, wanted, meter)
        if broken := done.not_finite():
            self.optimizer.zero_grad(set_to_none=True)
            self.loss_scale.update()
            self.skipped_in_a_row += 1
            meter.counts["updates_skipped"] += 1
            done.skipped.append(Skipped(broken, [batch.on_cpu() for batch in batches]))
            return batches, done
        self._check_gap(done)
        self.skipped_in_a_row = 0
        self.across.totals(self._move)
        self.loss_scale.update()
        meter.merge(done.meter)
        for name, value in done.losses.items():
            meter.add(name, value)
        return batches, done

    def _clipped_gradients(
        self, batches: list[MicroBatch], wanted: Pass, meter: Meter
    ) -> tuple[list[MicroBatch], Pass]:
        """Gradients of a mini-batch, the same on every rank; recomputed at half the loss scale after an overflow."""
        limit = self.training.max_grad_norm or math.inf
        while True:
            batches, done = self._summed_gradients(batches, wanted, meter)
            self.loss_scale.unscale_(self.optimizer)
            scaled_up = self.loss_scale.is_enabled() and self.loss_scale.get_scale() > 1
            retry = scaled_up and not done.not_finite()
            done.losses["grad_norm"] = float(nn.utils.clip_grad_norm_(self.parameters, limit))
            if self.critic:
                done.losses["critic_grad_norm"] = float(nn.utils.clip_grad_norm_(self.critic, limit))
            if not (retry and done.not_finite()):
                return batches, done
            self.loss_scale.update()

    def _summed_gradients(self, batches: list[MicroBatch], wanted: Pass, meter: Meter) -> tuple[list[MicroBatch], Pass]:
        """The mini-batch's gradients and losses, summed over the ranks; the tokens are this rank's."""
        _, counts = self.across.totals(lambda: (None, self.objective.count(batches)))
        whole = Denominators(sum(each.policy for each in counts), sum(each.tokens for each in counts))
        blanks = self._blanks(len(batches), [each.micro_batches for each in counts])
        parameters = [*self.parameters, *self.critic]

        def work() -> tuple[tuple[list[MicroBatch], Pass], tuple[Any, ...]]:
            fitting, own, halved = self._accumulate(batches, blanks, whole, wanted)
            have = [parameter.grad is not None for parameter in parameters]
            return (fitting, own), (dict(own.losses), own.meter, halved, have, self.forward.max_tokens)

        (batches, own), every = self.across.totals(work)
        done = Pass(own.step, own.first, own.critic_only, tokens=own.tokens)
        for losses, measured, halved, _, _ in every:
            for name, value in losses.items():
                done.losses[name] += value
            done.meter.merge(measured)
            meter.counts["micro_batches_halved"] += halved
        self.forward.max_tokens = min(each[-1] for each in every)
        has_one = [any(flags) for flags in zip(*(each[3] for each in every), strict=True)]
        self.across.gradients([parameter for parameter, has in zip(parameters, has_one, strict=True) if has])
        return batches, done

    def _accumulate(
        self, batches: list[MicroBatch], blanks: int, whole: Denominators, wanted: Pass
    ) -> tuple[list[MicroBatch], Pass, int]:
        """This rank's gradients, restarted with smaller micro-batches when memory runs out; and the number of restarts.

        It restarts because an interrupted backward pass leaves partial gradients.
        """
        halved = 0
        if not batches:  # an unused scaler has no scale to divide by
            self.loss_scale.scale(torch.zeros((), device=self.policy.device))
        while True:
            self.optimizer.zero_grad(set_to_none=True)
            own, failed = wanted.again(), None
            try:
                for failed in batches:
                    self._backward(failed, whole, own)
                for _ in range(blanks):
                    self._backward_blank(critic_only=own.critic_only)
                return batches, own, halved
            except torch.OutOfMemoryError:
                pass  # handled below, where the traceback holds no tensors any more
            assert failed is not None
            self.forward.ran_out(failed)
            halved += 1
            batches = self.forward.smaller(batches, failed)

    def _blanks(self, own: int, every: Sequence[int]) -> int:
        """How many blank micro-batches make this rank run as many passes as every other."""
        return max(every) - own if self.policy.sharded else 0

    def _backward_blank(self, *, critic_only: bool) -> None:
        """Run a blank micro-batch forward and backward; it adds nothing to the gradients."""
        scored = self.forward.train(self.forward.blank(), critic_only=critic_only)
        wanted = scored.values if critic_only else scored.logprobs
        assert wanted is not None
        self.loss_scale.scale(0.0 * wanted.sum()).backward()

    def _backward(self, batch: MicroBatch, whole: Denominators, own: Pass) -> None:
        """Add one micro-batch's gradient, its share of the losses and its tokens."""
        wants_entropy = self.wanted.entropy_coef > 0
        scored = self.forward.train(batch, entropy_grad=wants_entropy, critic_only=own.critic_only)
        loss, losses, old = self.objective.loss(
            batch, scored, whole, own.meter, first_pass=own.first, critic_only=own.critic_only
        )
        for name, value in losses.items():
            own.losses[name] += value
        assert batch.advantages is not None
        columns = torch.stack((old, scored.logprobs.detach(), batch.advantages), dim=1)
        own.tokens.update(zip(batch.indices, columns, strict=True))
        self.loss_scale.scale(loss).backward()

    def _check_gap(self, done: Pass) -> None:
        """End the run before an update on log-probabilities that the policy cannot have sampled with."""
        gap = done.meter.means().get("sampler_gap_mean", 0.0)
        if gap > self.largest_gap:
            raise EmailRLError(
                f"Step {done.step} is not trained: the log-probabilities from the vLLM servers are off by {gap:.2f}"
                f" nats on average, above {self.largest_gap:g}.",
                "Check that nothing caches or changes their replies and restart them; then resume with MAX_STALENESS=0"
                " to sample the step again.",
            )

    def _move(self) -> tuple[None, None]:
        with enough_memory("updating the adapter"):
            self.loss_scale.step(self.optimizer)
        return None, None


def learning_rate(step: int, training: TrainingSettings, total_steps: int) -> float:
    """Learning rate of all updates of step ``step`` (from 1): linear warm-up, then constant, linear or cosine decay.

    The last step of the warm-up is the first at full rate; step ``total_steps`` is the last above ``min_lr_ratio`` of
    it.
    """
    warmup = training.warmup_steps
    if training.warmup_ratio is not None:
        warmup = math.ceil(training.warmup_ratio * total_steps)
    if step < warmup:
        return training.learning_rate * step / warmup
    start = max(warmup, 1)
    progress = min((step - start) / max(total_steps + 1 - start, 1), 1.0)
    decay = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    left = decay[training.lr_scheduler]
    return training.learning_rate * (training.min_lr_ratio + (1 - training.min_lr_ratio) * left)
