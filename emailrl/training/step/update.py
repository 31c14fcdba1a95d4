"""The updates of a step: samples and rewards in, an updated adapter and the step's metrics out.

A step is one iteration of the loop; an update is one step of the optimizer. ``Updater.train`` makes all of a step's
updates: old and reference log-probabilities first, then ``update_epochs`` passes over ``num_mini_batches``
mini-batches, one update each, whose micro-batches share one global denominator.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emailrl.errors import EmailRLError
from emailrl.policy.load import Policy
from emailrl.policy.tensors import checksum
from emailrl.policy.value_head import make_value_head
from emailrl.ranks import ALONE, Ranks
from emailrl.settings import Settings
from emailrl.training.algorithms import Algorithm
from emailrl.training.kl import AdaptiveKL
from emailrl.training.passes import needs_old_logprobs, needs_reference
from emailrl.training.step.batches import mini_batches
from emailrl.training.step.gradients import Gradients, enough_memory
from emailrl.training.step.meter import Meter, TokenNumbers, UpdateResult
from emailrl.training.step.objective import Objective
from emailrl.training.step.prepared import Prepared
from emailrl.training.step.sampler_gap import check_gap
from emailrl.training.step.samples import TrainingSample
from emailrl.training.step.schedule import learning_rate
from emailrl.training.step.scoring import LogprobScorer
from emailrl.training.step.shaping import shape_advantages
from emailrl.training.step.skipped import save_skipped
from emailrl.training.step.spread import Share, make_shares

MAX_SKIPPED_IN_A_ROW = 3
"""This many consecutive updates with a non-finite loss or gradient end the run."""


class Updater:
    """Holds the optimizer and the KL weight of a trainable policy; follows an algorithm given as data."""

    def __init__(
        self,
        policy: Policy,
        algorithm: Algorithm,
        settings: Settings,
        *,
        total_steps: int | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """``total_steps`` is where a linear or cosine schedule ends; None takes ``settings.training.max_steps``."""
        self.policy, self.algorithm, self.settings, self.ranks = policy, algorithm, settings, ranks
        self.total_steps = total_steps or settings.training.max_steps
        named = policy.trainable_parameters()
        if not named:
            raise EmailRLError("The policy has no trainable parameters.", "Load it with trainable=True.")
        if settings.algorithm.reference == "start":
            policy.keep_start()
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        policy.value_head = (policy.value_head or make_value_head(policy.model)) if algorithm.has_critic else None
        critic = list(policy.value_head.named_parameters()) if policy.value_head is not None else []
        self.critic = [parameter for _, parameter in critic]
        self.names += [f"value_head.{name}" for name, _ in critic]
        self.optimizer = torch.optim.AdamW(
            [{"params": params} for params in (self.parameters, self.critic) if params],
            lr=settings.training.learning_rate,
            betas=(settings.training.adam_beta1, settings.training.adam_beta2),
            weight_decay=settings.training.weight_decay,
        )
        # Gradients divided by many tokens underflow in 16-bit floats, so the loss is scaled up.
        self.loss_scale = torch.amp.GradScaler(policy.device.type, enabled=policy.dtype == torch.float16)
        wanted = settings.algorithm
        self.kl = AdaptiveKL(coef=wanted.beta, target=wanted.kl_target, horizon=wanted.kl_horizon)
        self.scorer = LogprobScorer(policy, settings, ranks)
        self.objective = Objective(algorithm, settings, self.kl)
        self.gradients = Gradients(
            self.parameters, self.critic, self.scorer, self.objective, self.loss_scale, settings, ranks
        )
        policy.accompanied = self.scorer.accompanied
        self.skipped_in_a_row = 0
        self.skipped_dir: Path | None = None
        """Folder for batches with a non-finite loss; None keeps none."""

    def train(self, samples: Sequence[TrainingSample], paid: Mapping[str, float], *, step: int) -> UpdateResult:
        """Make the updates of step ``step`` (from 1), and return its metrics and token numbers.

        ``paid`` is the reward of each trajectory by id (``shaping.terminal_rewards``). Mini-batch order and dropout
        depend only on (seed, ``step``). An update with a non-finite loss or gradient is skipped and counted in
        ``updates_skipped``; EmailRLError ends the run after ``MAX_SKIPPED_IN_A_ROW``. Raises ValueError without
        samples.
        """
        if not samples:
            raise ValueError("a step without samples: skip it")
        training = self.settings.training
        shares = make_shares(
            samples,
            paid,
            list(mini_batches(samples, training.num_mini_batches, seed=f"{training.seed}/{step}")),
            self.ranks.world,
            step=step,
            share_prefixes=self.scorer.shares_prefixes,
        )
        with self.ranks.at_work():
            metrics, tokens = self._train(self.ranks.scatter(shares))
        metrics |= {
            "trainable_tokens": sum(sample.num_trainable for sample in samples),
            "total_tokens": sum(len(sample.token_ids) for sample in samples),
        }
        rows = (tokens[i][:, : len(sample.token_ids)].tolist() for i, sample in enumerate(samples))
        return UpdateResult(metrics, [TokenNumbers(*row) for row in rows])

    def follow(self) -> None:
        """On ranks other than 0: receive the next share from rank 0."""
        self.take(self.ranks.scatter(None))

    def take(self, share: Share | None) -> None:
        """On ranks other than 0: train the share from rank 0's ``train``, or join its forward passes."""
        if share is None:
            self.scorer.pass_along()
        else:
            self._train(share)

    def _train(self, share: Share) -> tuple[dict[str, float], dict[int, Tensor]]:
        """Make the step's updates; return its metrics, equal on all ranks, and on rank 0 the tokens by sample."""
        training, step, meter = self.settings.training, share.step, Meter()
        tokens: dict[int, Tensor] = {}
        rate = self._set_rates(step)
        summing = self.ranks.seconds
        with torch.random.fork_rng([self.policy.device] if self.policy.device.type == "cuda" else []):
            torch.manual_seed((training.seed * 1_000_003 + step + self.ranks.rank * 2**32) % 2**63)
            rounds, metrics = self._prepare(share, meter)
            for epoch in range(training.update_epochs):
                for prepared in rounds:
                    tokens |= self._update(prepared, meter, step, first_pass=epoch == 0)
        self.policy.model.eval()
        metrics = meter.means() | metrics | {"learning_rate": rate, "kl_coef": self.kl.coef}
        if self.kl.coef and "kl" in metrics and not self._critic_only(step):
            self.kl.update(metrics["kl"], share.num_trajectories)
        metrics |= {name: meter.counts[name] for name in ("updates_skipped", "micro_batches_halved")}
        if not self.ranks.is_alone:
            computed = self.ranks.gather(sum(item.batch.num_tokens for prepared in rounds for item in prepared))
            metrics |= {
                "rank_tokens_mean": sum(computed) / self.ranks.world,
                "rank_tokens_max": max(computed),
                "all_reduce_seconds": self.ranks.seconds - summing,
            }
        placed = {share.places[i]: columns for i, columns in tokens.items()}
        every = self.ranks.collect({i: columns.cpu() for i, columns in placed.items()})
        return metrics, {i: columns for each in every for i, columns in each.items()}

    def synchronize(self) -> None:
        """Copy rank 0's weights and state to all ranks; raises EmailRLError if one differs afterwards."""
        if self.ranks.is_alone:
            return
        parameters = [*self.parameters, *self.critic]
        mine = io.BytesIO()
        if self.ranks.is_first:
            torch.save({"weights": [p.detach() for p in parameters], "state": self.state_dict()}, mine)
        saved = io.BytesIO(self.ranks.broadcast(mine.getvalue()))

        def take() -> None:
            theirs = torch.load(saved, map_location="cpu", weights_only=True)
            self.load_state_dict(theirs["state"])
            with torch.no_grad():  # not through ``data``: fused layers notice changes by a tensor's version
                for parameter, value in zip(parameters, theirs["weights"], strict=True):
                    parameter.copy_(value)

        self.ranks.agree(take)
        self.ranks.check_same("The adapter", checksum(parameters))

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
            self.policy.start = [value.to(self.policy.device, copy=True) for value in state["start"]]
        # A copy: the optimizer would otherwise go on writing into the caller's tensors.
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.kl.coef = float(state["kl_coef"])
        self.skipped_in_a_row = int(state["skipped_in_a_row"])
        if state["loss_scale"]:
            self.loss_scale.load_state_dict(state["loss_scale"])

    def _set_rates(self, step: int) -> float:
        """Set the learning rates of adapter and critic, which follow one schedule; returns the adapter's."""
        training = self.settings.training
        rate = learning_rate(step, training, self.total_steps)
        critic = self.settings.algorithm.critic_learning_rate * (rate / training.learning_rate)
        for group, group_rate in zip(self.optimizer.param_groups, (rate, critic), strict=False):
            group["lr"] = group_rate
        return rate

    def _critic_only(self, step: int) -> bool:
        return bool(self.critic) and step <= self.settings.algorithm.critic_warmup_steps

    def _prepare(self, share: Share, meter: Meter) -> tuple[list[list[Prepared]], dict[str, float]]:
        """Pad the mini-batches, score them by policy, critic and reference, and shape the advantages of the step."""
        self.policy.model.eval()
        updates = len(share.mini_batches) * self.settings.training.update_epochs
        old = needs_old_logprobs(self.algorithm, kl_coef=self.kl.coef, updates=updates)
        reference = needs_reference(self.kl.coef)
        rounds, halved = self.scorer.together(lambda: self.scorer.score_all(share, old=old, reference=reference))
        meter.counts["micro_batches_halved"] += sum(self.ranks.gather(halved))
        items = [item for prepared in rounds for item in prepared]
        metrics = shape_advantages(
            items, share.paid, self.algorithm, self.settings.algorithm, kl_coef=self.kl.coef, ranks=self.ranks
        )
        self.policy.model.train()
        return rounds, metrics

    def _update(self, prepared: list[Prepared], meter: Meter, step: int, *, first_pass: bool) -> dict[int, Tensor]:
        """Make one update from the micro-batches of a mini-batch, or skip it if it would not be finite.

        Returns the token numbers.
        """
        found = self.gradients.compute(
            prepared, self.optimizer, meter, first_pass=first_pass, critic_only=self._critic_only(step)
        )
        if broken := found.not_finite():
            self.loss_scale.update()
            self._skip(prepared, meter, step, broken)
            return found.tokens
        check_gap(found.meter, self.settings, step)
        self.skipped_in_a_row = 0
        self.ranks.agree(self._move)
        self.loss_scale.update()
        meter.merge(found.meter)
        for name, value in found.losses.items():
            meter.add(name, value)
        return found.tokens

    def _move(self) -> None:
        with enough_memory("updating the adapter"):
            self.loss_scale.step(self.optimizer)

    def _skip(self, prepared: list[Prepared], meter: Meter, step: int, broken: dict[str, float]) -> None:
        """Leave the weights unchanged and keep the batch for inspection; too many in a row end the run."""
        self.optimizer.zero_grad(set_to_none=True)
        self.skipped_in_a_row += 1
        meter.counts["updates_skipped"] += 1
        every = self.ranks.collect([item if self.ranks.is_alone else item.on_cpu() for item in prepared])
        name = f"step-{step:06d}-{meter.counts['updates_skipped']}"
        self.ranks.agree(lambda: self._keep_skipped(name, [item for items in every for item in items], step, broken))

    def _keep_skipped(self, name: str, batch: Sequence[Prepared], step: int, broken: dict[str, float]) -> None:
        if self.skipped_dir is not None:
            save_skipped(self.skipped_dir, name, batch, step, broken)
        if self.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            name, value = next(iter(broken.items()))
            kept = f" Their batches are in {self.skipped_dir}." if self.skipped_dir is not None else ""
            raise EmailRLError(
                f"The {name} is {value} at step {step}, in the third update in a row; the weights are as before them.",
                f"Lower LEARNING_RATE, or resume from an earlier checkpoint.{kept}",
            )
