"""The updates of a step: samples and rewards in, an updated adapter and the step's metrics out. An update is one step
of the optimizer. ``Updater.train`` makes all those of one iteration of the loop: old and reference log-probabilities
first, then ``update_epochs`` passes over ``num_mini_batches`` mini-batches, one update each. Each rank adds its share
of one loss, however the samples are split, and may have no micro-batch at all."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from emailrl.base.errors import EmailRLError
from emailrl.model.logprobs import TokenLogprobs
from emailrl.model.policy import Policy, enough_memory
from emailrl.model.teacher import Teacher
from emailrl.settings import AgentSettings, AlgorithmSettings, TrainingSettings
from emailrl.training.across import Across
from emailrl.training.algorithms import Algorithm, learning_rate, needs_old_logprobs
from emailrl.training.batch import (
    MicroBatch,
    Share,
    TrainingSample,
    make_shares,
    micro_batches,
    mini_batches,
    shape_advantages,
)
from emailrl.training.forward import Forward
from emailrl.training.kl import AdaptiveKL, estimate
from emailrl.training.losses import aggregate, correction_weights, count_for, policy_loss, value_loss

CLIPPING = ("surrogate", "clip_low", "clip_high", "dual_clip", "ratio_level")
"""Fields of an algorithm, arguments of the loss."""
Noted = list[tuple[Mapping[str, float], float]]  # Measured values by name, and their weight in a mean


def means(noted: Noted) -> dict[str, float]:
    """The weighted mean of each metric, or the extreme of one whose name ends in ``_min`` or ``_max``."""
    columns: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for values, weight in noted:
        for name, value in values.items():
            columns[name].append((value, weight))

    def reduced(name: str, column: list[tuple[float, float]]) -> float:
        if name.endswith(("_min", "_max")):
            return (min if name.endswith("_min") else max)(value for value, _ in column)
        return sum(value * weight for value, weight in column) / sum(weight for _, weight in column)

    return {name: reduced(name, column) for name, column in columns.items()}


@dataclass(frozen=True, slots=True)
class TokenNumbers:
    """One sample's token numbers in its last pass; lists as long as its ids, meaningless outside its mask."""

    old_logprobs: list[float]
    logprobs: list[float]
    advantages: list[float]


Skipped = tuple[dict[str, float], list[MicroBatch]]
"""An update whose loss or gradient was not finite: what is not, by name, and its micro-batches on the CPU."""


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Results of a step's updates."""

    metrics: dict[str, float] = field(default_factory=dict)
    tokens: list[TokenNumbers] = field(default_factory=list)  # Per sample, in order
    skipped: list[Skipped] = field(default_factory=list)


@dataclass(slots=True)
class Pass:
    """One pass over a mini-batch, and besides the gradients left in the parameters, its results."""

    step: int
    first: bool  # Of the step's passes over this mini-batch; it measures what does not change between them
    critic_only: bool
    policy_count: float
    """What the policy's aggregation divides by in the whole mini-batch; a trajectory in several samples counts once."""
    num_tokens: int  # Trainable tokens of the whole mini-batch
    losses: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # And gradient norms
    noted: Noted = field(default_factory=list)
    tokens: dict[int, Tensor] = field(default_factory=dict)
    """By the sample's index on this rank: old and current log-probabilities and advantages, ``(3, T)``."""
    halved: int = 0  # How often memory ran out
    batches: list[MicroBatch] = field(default_factory=list)  # This rank's, halved if they did not fit into memory

    @property
    def broken(self) -> dict[str, float]:
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
        teacher: Teacher | None = None,
    ) -> None:
        """``total_steps`` is where a linear or cosine schedule ends; None takes ``training.max_steps``.
        ``largest_gap``, in nats, is how far sampled log-probabilities may be off on average before the run ends."""
        self.policy, self.algorithm, self.training, self.wanted = policy, algorithm, training, wanted
        self.across = across or Across()
        self.total_steps, self.largest_gap = total_steps or training.max_steps, largest_gap
        named = policy.trainable_parameters()
        if not named:
            raise EmailRLError("The policy has no trainable parameters.", "Load it with trainable=True.")
        critic = list(policy.value_head.named_parameters()) if policy.value_head is not None else []
        self.names = [name for name, _ in named] + [f"value_head.{name}" for name, _ in critic]
        self.parameters = [parameter for _, parameter in named]
        self.critic = [parameter for _, parameter in critic]
        groups = [{"params": params} for params in (self.parameters, self.critic) if params]
        betas, decay = (training.adam_beta1, training.adam_beta2), training.weight_decay
        self.optimizer = torch.optim.AdamW(groups, lr=training.peak_rate, betas=betas, weight_decay=decay)
        # Gradients divided by many tokens underflow in 16-bit floats, so the loss is scaled up.
        self.loss_scale = torch.amp.GradScaler(policy.device.type, enabled=policy.dtype == torch.float16)
        self.kl = AdaptiveKL(coef=wanted.beta, target=wanted.kl_target, horizon=wanted.kl_horizon)
        self.forward = Forward(policy, training, agent.temperature, teacher)
        self.constant_length = wanted.constant_length or agent.turn_tokens
        self.skipped_in_a_row = 0  # Consecutive updates that were not finite

    def train(self, samples: Sequence[TrainingSample], paid: Mapping[str, float], *, step: int) -> UpdateResult:
        """Make the updates of step ``step`` (from 1), and return its metrics and token numbers. ``paid`` is the reward
        of each trajectory by id (``batch.terminal_rewards``). Mini-batch order and dropout depend only on (seed,
        ``step``). An update with a non-finite loss or gradient is skipped and counted in ``updates_skipped``; those in
        a row in ``skipped_in_a_row``. Raises ValueError without samples."""
        if not samples:
            raise ValueError("a step without samples: skip it")
        training = self.training
        minis = list(mini_batches(samples, training.num_mini_batches, seed=f"{training.seed}/{step}"))
        sharing = self.forward.shares_prefixes
        shares = make_shares(samples, paid, minis, self.across.world, step=step, share_prefixes=sharing)
        with self.across.shared(shares) as own:
            metrics, tokens, skipped = self.take(own)
        metrics["trainable_tokens"] = sum(sample.num_trainable for sample in samples)
        metrics["total_tokens"] = sum(len(sample.token_ids) for sample in samples)
        rows = (tokens[i][:, : len(sample.token_ids)].tolist() for i, sample in enumerate(samples))
        return UpdateResult(metrics, [TokenNumbers(*row) for row in rows], skipped)

    def take(self, share: Share) -> tuple[dict[str, float], dict[int, Tensor], list[Skipped]]:
        """Make the updates of a step from this rank's share of it. Returns, of all ranks: metrics, each sample's tokens
        ``(3, T)`` by its index in the step, and what was skipped."""
        training, step, noted = self.training, share.step, Noted()
        critic_only = bool(self.critic) and step <= self.wanted.critic_warmup_steps
        tokens: dict[int, Tensor] = {}
        skipped: list[Skipped] = []
        rate = learning_rate(step, training, self.total_steps)
        # The critic's rate follows the adapter's schedule.
        rates = rate, self.wanted.critic_learning_rate * (rate / training.peak_rate)
        for group, group_rate in zip(self.optimizer.param_groups, rates, strict=False):
            group["lr"] = group_rate
        summing = self.across.seconds
        gpus = [self.policy.device] if self.policy.device.type == "cuda" else []
        for gpu in gpus:
            torch.cuda.reset_peak_memory_stats(gpu)
        with torch.random.fork_rng(gpus):
            torch.manual_seed((training.seed * 1_000_003 + step + self.across.rank * 2**32) % 2**63)
            rounds, metrics, halved = self._prepare(share)
            for epoch in range(training.update_epochs):
                for n, batches in enumerate(rounds):
                    done = self._update(batches, partial(Pass, step, epoch == 0, critic_only))
                    rounds[n], halved = done.batches, halved + done.halved
                    tokens |= done.tokens
                    if done.broken:
                        skipped.append((done.broken, [batch.on_cpu() for batch in done.batches]))
                    else:
                        noted += [*done.noted, (done.losses, 1.0)]
        self.policy.model.eval()
        metrics = means(noted) | metrics | {"learning_rate": rate, "kl_coef": self.kl.coef}
        if self.kl.coef and "kl" in metrics and not critic_only:
            self.kl.update(metrics["kl"], share.num_trajectories)
        metrics |= {"updates_skipped": len(skipped), "micro_batches_halved": halved}
        for gpu in gpus:
            free, whole = torch.cuda.mem_get_info(gpu)
            metrics["peak_memory_gib"] = torch.cuda.max_memory_allocated(gpu) / 2**30
            metrics["gpu_memory_gib"] = (whole - free) / 2**30
        computed = sum(batch.num_tokens for batches in rounds for batch in batches)
        placed = {share.places[i]: columns.cpu() for i, columns in tokens.items()}
        counts, placed_by, skipped_by = zip(*self.across.gather((computed, placed, skipped)), strict=True)
        if self.across.world > 1:
            metrics |= {
                "rank_tokens_mean": sum(counts) / self.across.world,
                "rank_tokens_max": max(counts),
                "all_reduce_seconds": self.across.seconds - summing,
            }
        each = zip(*skipped_by, strict=True)  # update, of all ranks
        of_all = [(parts[0][0], [batch for _, batches in parts for batch in batches]) for parts in each]
        return metrics, {i: columns for placed in placed_by for i, columns in placed.items()}, of_all

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
        if any(name.startswith("value_head.") for name in state["parameters"]) != bool(self.critic):
            kind = "without" if self.critic else "with"
            hint = "Resume with the run's --algorithm."
            raise EmailRLError(f"The trainer state is from a run {kind} a critic.", hint)
        if state["parameters"] != self.names:
            raise EmailRLError("The trainer state belongs to another adapter.", "Resume with the run's LoRA settings.")
        if self.policy.start is not None:
            if state["start"] is None:
                hint = "Unset REFERENCE, or start a new run with --adapter."
                raise EmailRLError("The run was started with REFERENCE=base.", hint)
            for own, value in zip(self.policy.start, state["start"], strict=True):
                own.copy_(value)
        # A copy: the optimizer would otherwise go on writing into the caller's tensors.
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.kl = replace(self.kl, coef=float(state["kl_coef"]))
        self.skipped_in_a_row = int(state["skipped_in_a_row"])
        if state["loss_scale"]:
            self.loss_scale.load_state_dict(state["loss_scale"])

    def _prepare(self, share: Share) -> tuple[list[list[MicroBatch]], dict[str, float], int]:
        """Pad the mini-batches, score them by policy, critic, reference and teacher, and shape the step's advantages.
        Returns the micro-batches of each mini-batch, metrics, and how often memory ran out."""
        self.policy.model.eval()
        updates, coef = len(share.mini_batches) * self.training.update_epochs, self.kl.coef
        old = needs_old_logprobs(self.algorithm, kl_coef=coef, updates=updates)
        rounds = [micro_batches(share.samples, self.forward.layout(), mini) for mini in share.mini_batches]
        every = zip(*self.across.gather([len(batches) for batches in rounds]), strict=True)

        def score(each: Iterable[MicroBatch]) -> list[MicroBatch]:
            return [self.forward.score(batch, old=old, reference=coef > 0) for batch in each]

        def score_all() -> int:
            halved = 0
            for n, (batches, counts) in enumerate(zip(rounds, every, strict=True)):
                _, rounds[n], times = self.forward.fitting(batches, score)
                score(self.forward.blank() for _ in range(self._blanks(len(batches), counts)))
                halved += times
            return halved

        halved = sum(self.across.gather(self.across.agree(score_all)))
        flat = [batch for batches in rounds for batch in batches]
        shaped, metrics = shape_advantages(
            flat, share.paid, self.algorithm, self.wanted, kl_coef=coef, gather=self.across.gather
        )
        self.policy.model.train()
        following = iter(shaped)
        return [[next(following) for _ in batches] for batches in rounds], metrics, halved

    def _update(self, batches: list[MicroBatch], wanted: Callable[[float, int], Pass]) -> Pass:
        """Make one update from the micro-batches of a mini-batch, or none if its ``broken`` pass would not be finite.
        ``wanted`` makes a pass with the mini-batch's counts. Raises EmailRLError before an update on what the policy
        cannot have sampled."""
        limit, halved = self.training.max_grad_norm or math.inf, 0
        while True:  # again at half the loss scale after an overflow
            done = self._gradients(batches, wanted)
            batches, halved = done.batches, halved + done.halved
            self.loss_scale.unscale_(self.optimizer)
            scaled_up = self.loss_scale.is_enabled() and self.loss_scale.get_scale() > 1
            retry = scaled_up and not done.broken
            done.losses["grad_norm"] = float(nn.utils.clip_grad_norm_(self.parameters, limit))
            if self.critic:
                done.losses["critic_grad_norm"] = float(nn.utils.clip_grad_norm_(self.critic, limit))
            if not (retry and done.broken):
                break
            self.loss_scale.update()
        done.halved = halved
        if done.broken:
            self.optimizer.zero_grad(set_to_none=True)
            self.loss_scale.update()
            self.skipped_in_a_row += 1
            return done
        gap = means(done.noted).get("sampler_gap_mean", 0.0)
        if gap > self.largest_gap:
            raise EmailRLError(
                f"Step {done.step} is not trained: the log-probabilities from the vLLM servers are off by {gap:.2f}"
                f" nats on average, above {self.largest_gap:g}.",
                "Check that nothing caches or changes their replies and restart them; then resume with MAX_STALENESS=0"
                " to sample the step again.",
            )
        self.skipped_in_a_row = 0
        self.across.agree(enough_memory("updating the adapter")(partial(self.loss_scale.step, self.optimizer)))
        self.loss_scale.update()
        return done

    def _gradients(self, batches: list[MicroBatch], wanted: Callable[[float, int], Pass]) -> Pass:
        """The mini-batch's gradients and losses, summed over the ranks; the tokens are this rank's."""
        aggregation, length = self.algorithm.aggregation, self.constant_length
        policy = sum(float(count_for(b.loss_mask, aggregation, length, share=b.share)) for b in batches)
        own_counts = policy, sum(batch.num_trainable for batch in batches), len(batches)
        policies, num_tokens, num_batches = zip(*self.across.gather(own_counts), strict=True)
        blanks, new = self._blanks(len(batches), num_batches), partial(wanted, sum(policies), sum(num_tokens))
        parameters = [*self.parameters, *self.critic]

        def attempt(each: Iterable[MicroBatch]) -> Pass:
            self.optimizer.zero_grad(set_to_none=True)  # an interrupted backward pass leaves partial gradients
            own = new()
            for batch in each:
                self._backward(batch, own)
            for _ in range(blanks):  # adds nothing to the gradients
                scored = self.forward.train(self.forward.blank(), critic_only=own.critic_only)
                unused = scored.values if own.critic_only and scored.values is not None else scored.logprobs
                self.loss_scale.scale(0.0 * unused.sum()).backward()
            return own

        def work() -> tuple[list[MicroBatch], Pass, int]:
            if not batches:  # an unused scaler has no scale to divide by
                self.loss_scale.scale(torch.zeros((), device=self.policy.device))
            return self.forward.fitting(batches, attempt)

        done = new()
        done.batches, own, halved = self.across.agree(work)
        every = self.across.gather((dict(own.losses), own.noted, halved, self.forward.max_tokens))
        for losses, noted, times, _ in every:
            for name, value in losses.items():
                done.losses[name] += value
            done.noted += noted
            done.halved += times
        done.tokens = own.tokens
        self.forward.lower(min(each[-1] for each in every))
        self.across.gradients(parameters)
        return done

    def _blanks(self, own: int, every: Sequence[int]) -> int:
        """How many blank micro-batches make this rank run as many passes as every other."""
        return max(every) - own if self.policy.sharded else 0

    def _backward(self, batch: MicroBatch, own: Pass) -> None:
        """Add one micro-batch's gradient, its share of the losses and its tokens."""
        wants_entropy = self.wanted.entropy_coef > 0
        scored = self.forward.train(batch, entropy_grad=wants_entropy, critic_only=own.critic_only)
        old = scored.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        loss = self.loss(batch, scored, old, own)
        own.losses["loss"] += float(loss.detach())
        assert batch.advantages is not None
        columns = torch.stack((old, scored.logprobs.detach(), batch.advantages), dim=1)
        own.tokens.update(zip(batch.indices, columns, strict=True))
        self.loss_scale.scale(loss).backward()

    def loss(self, batch: MicroBatch, scored: TokenLogprobs, old: Tensor, own: Pass) -> Tensor:
        """A micro-batch's share of the loss, given the old log-probabilities ``(B, T)``; ``own`` gets its parts. With
        ``own.critic_only`` only the critic's loss counts; the others are still measured."""
        algorithm, wanted, noted, mask = self.algorithm, self.wanted, own.noted, batch.loss_mask
        num_trainable, logprobs = batch.num_trainable, scored.logprobs
        assert batch.advantages is not None
        # Weight of a row's token mean, (B, 1): a trajectory in several samples counts as one.
        share = (batch.share if algorithm.aggregation == "sequence_mean" else torch.ones_like(batch.share))[:, None]
        count, length = own.policy_count, self.constant_length
        over: dict[str, Any] = {"aggregation": algorithm.aggregation, "constant_length": length, "denominator": count}
        clip: dict[str, Any] = {name: getattr(algorithm, name) for name in CLIPPING}
        weights = share * self._correction(old, batch, own)
        loss, ratios = policy_loss(logprobs, old, batch.advantages, mask, weights=weights, **clip, **over)
        noted.append((ratios, num_trainable))
        own.losses["policy_loss"] += float(loss.detach())
        if batch.ref_logprobs is not None:
            kl = estimate(logprobs, batch.ref_logprobs, algorithm.kl_estimator)
            noted.append(({"kl": float(kl.detach().sum()) / num_trainable}, num_trainable))
            if algorithm.kl_in == "loss":
                penalty = self.kl.coef * aggregate(kl * share, mask, **over)
                own.losses["kl_loss"] += float(penalty.detach())
                loss = loss + penalty
        if scored.entropy is not None:
            noted.append(({"entropy": float(scored.entropy.detach().sum()) / num_trainable}, num_trainable))
            if wanted.entropy_coef:
                bonus = aggregate(scored.entropy * share, mask, **over)
                loss = loss - wanted.entropy_coef * bonus
        if scored.values is None:
            return loss
        assert batch.old_values is not None and batch.returns is not None
        # The critic's loss is a token mean, whatever the policy's aggregation.
        error, clipped = value_loss(
            scored.values, batch.old_values, batch.returns, mask, clip=algorithm.value_clip, denominator=own.num_tokens
        )
        noted.append((clipped, num_trainable))
        own.losses["value_loss"] += float(error.detach())
        return wanted.value_coef * error + (0 if own.critic_only else loss)

    def _correction(self, old: Tensor, batch: MicroBatch, own: Pass) -> Tensor | float:
        """Token weights from old and sampler log-probabilities, so the same in every pass; measured in the first."""
        level, kind, mask = self.algorithm.ratio_level, self.algorithm.importance_correction, batch.loss_mask
        sampled = mask & ~batch.sampler_logprobs.isnan()
        gap = (old - batch.sampler_logprobs)[sampled].abs()
        if own.first and gap.numel():
            own.noted.append(
                ({"sampler_gap_mean": float(gap.mean()), "sampler_gap_max": float(gap.max())}, gap.numel())
            )
        if kind == "off":
            return 1.0
        drawn, low, high = batch.sampler_logprobs, self.wanted.correction_low, self.wanted.correction_high
        weights, found = correction_weights(old, drawn, mask, kind=kind, low=low, high=high, ratio_level=level)
        if own.first:
            own.noted.append((found, float((sampled if level == "token" else mask).sum())))
        return weights
