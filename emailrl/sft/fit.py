"""Supervised updates: the trainer's packed batches and log-probabilities with a likelihood loss. The loss of an update
is the mean negative log-likelihood, in nats, of the assistant tokens in its examples, independent of the micro-batches.
Only these tokens reach the vocabulary projection."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.model.logprobs import token_logprobs
from emailrl.model.policy import Policy
from emailrl.ranks import ALONE, Activity, Ranks
from emailrl.settings import SftSettings, TrainingSettings
from emailrl.sft.examples import Example
from emailrl.training.across import Across
from emailrl.training.algorithms import learning_rate
from emailrl.training.batch import MicroBatch, TrainingSample, deal, micro_batches
from emailrl.training.forward import Forward

BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.05
WARMUP_RATIO = 0.05
SHOWN_WEIGHT = 0.1
"""Loss weight of a context token relative to an assistant token, for a model trained from scratch: tool results repeat
earlier ones, so it learns to copy from them."""
RATES = {"lora": 2e-4, "full": 5e-5, "from_scratch": 2e-3}  # Default peak learning rates
Order = tuple[int | None, int, list[TrainingSample]]
"""A rank's part of a batch: the step to make (None: only measure), the assistant tokens of all parts, the samples."""
Droppable = Callable[[], AbstractContextManager[None]]  # Marks work that an interrupt may end at once


class Fitter:
    """Optimizes a policy by imitation: its adapter, or with ``--full`` the whole model. Every rank has all weights, and
    adds its part of a batch to one gradient."""

    def __init__(
        self, policy: Policy, training: TrainingSettings, sft: SftSettings, temperature: float, ranks: Ranks = ALONE
    ) -> None:
        if policy.dtype == torch.float16:
            raise UsageError("sft trains in bf16 or fp32, not in fp16.", "Set EMAILRL_DTYPE=bf16, or fp32.")
        self.policy, self.training, self.total_steps = policy, training, sft.sft_steps
        self.ranks, self.across = ranks, Across(ranks)
        self.shown_weight = SHOWN_WEIGHT if sft.from_scratch else 0.0
        kind = "from_scratch" if sft.from_scratch else "full" if sft.full_finetuning else "lora"
        schedule = {"warmup_ratio": WARMUP_RATIO, "lr_scheduler": "cosine", "min_lr_ratio": 0.0}
        rate = sft.sft_learning_rate or RATES[kind]
        self.schedule = training.model_copy(update={**schedule, "learning_rate": rate})
        named = policy.trainable_parameters()
        self.names = [name for name, _ in named]
        self.weights = [parameter for _, parameter in named]
        narrow = [(name, weight) for name, weight in named if weight.dtype not in (torch.float32, torch.float64)]
        self.copies = {name: (weight, nn.Parameter(weight.detach().float())) for name, weight in narrow}
        """The 16-bit weights, in which small steps vanish, each with the float32 copy that is optimized instead."""
        self.masters = [self.copies.get(name, (weight, weight))[1] for name, weight in named]
        # Not the fused AdamW: it does not increment parameter versions, which the fused layers use to detect changes.
        self.optimizer = torch.optim.AdamW(self.masters, betas=BETAS, weight_decay=WEIGHT_DECAY)
        self.forward = Forward(policy, training, temperature)
        self.skipped_in_a_row = 0

    def step(self, examples: Sequence[Example], *, step: int) -> dict[str, float]:
        """Make optimizer step ``step`` (from 1) on the examples and return its metrics; ``loss`` is in nats a token.
        Dropout follows from (seed, ``step``) alone. An update whose loss or gradient is not finite is skipped and
        counted in ``updates_skipped``; those in a row in ``skipped_in_a_row``."""
        sizes = {"total_tokens": sum(len(example.token_ids) for example in examples)}
        return self._together(examples, step) | {"trainable_tokens": _num_spoken(examples)} | sizes

    def loss(self, examples: Sequence[Example], droppable: Droppable = nullcontext) -> float:
        """Mean negative log-likelihood of the assistant tokens, in nats; leaves the model unchanged."""
        return self._together(examples, None, droppable)["loss"]

    def _together(self, examples: Sequence[Example], step: int | None, *how: Droppable) -> dict[str, float]:
        """On rank 0: have each rank take its part of the examples, about as many tokens."""
        samples, total = [self._sample(example) for example in examples], _num_spoken(examples)
        parts = deal(samples, range(len(samples)), self.across.world, share_prefixes=False)
        with self.across.shared([(step, total, [samples[i] for i in part]) for part in parts]) as own:
            return self.take(own, *how)

    def take(self, order: Order, droppable: Droppable = nullcontext) -> dict[str, float]:
        """Do this rank's part of a batch; returns the metrics of all parts."""
        step, total, samples = order
        if step is None:
            self.policy.model.eval()
            with droppable():
                own = self.ranks.apart(partial(self._measure, samples))
            return {"loss": sum(self.across.gather(own)) / total}
        rate = learning_rate(step, self.schedule, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.policy.model.train()
        with torch.random.fork_rng([self.policy.device] if self.policy.device.type == "cuda" else []):
            torch.manual_seed((self.training.seed * 1_000_003 + step + self.across.rank * 2**32) % 2**63)
            own = self.across.agree(lambda: self._sum(samples, partial(self._backward, total=total)))
        self.policy.model.eval()
        loss = sum(self.across.gather(own)) / total
        self.across.gradients(self.masters)
        norm = float(nn.utils.clip_grad_norm_(self.masters, self.training.max_grad_norm or math.inf))
        skipped = not (math.isfinite(loss) and math.isfinite(norm))
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if not skipped:
            self.optimizer.step()
            with torch.no_grad():
                for weight, master in self.copies.values():
                    weight.copy_(master)
        return {"loss": loss, "grad_norm": norm, "learning_rate": rate, "updates_skipped": float(skipped)}

    def state_dict(self) -> dict[str, Any]:
        """Everything the next step depends on besides the weights, for ``torch.save``."""
        return {
            "parameters": self.names,
            "optimizer": self.optimizer.state_dict(),
            "masters": {name: master.detach() for name, (_, master) in self.copies.items()},
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state`` bit for bit; raises EmailRLError for another model's state."""
        if state["parameters"] != self.names:
            hint = "Resume with the run's --model."
            raise EmailRLError("The trainer state belongs to another model or adapter.", hint)
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.skipped_in_a_row = int(state["skipped_in_a_row"])
        with torch.no_grad():
            for name, (_, master) in self.copies.items():
                if name in state["masters"]:
                    master.copy_(state["masters"][name])

    @torch.no_grad()
    def _measure(self, samples: Sequence[TrainingSample], activity: Activity) -> float:
        """The summed loss of the assistant tokens."""

        def score(batch: MicroBatch, spoken: Tensor) -> float:
            activity.note("validating")
            return -float((self._logprobs(batch) * spoken).sum())

        return self._sum(samples, score)

    def _sum(self, samples: Sequence[TrainingSample], work: Callable[[MicroBatch, Tensor], float]) -> float:
        """Sum ``work`` over micro-batches, smaller ones whenever memory runs out."""
        batches = micro_batches(samples, self.forward.layout())

        def attempt(each: Iterable[MicroBatch]) -> float:
            for parameter in (*self.weights, *self.masters):
                parameter.grad = None  # an interrupted backward pass leaves partial gradients
            return sum(work(batch, ~batch.sampler_logprobs.isnan()) for batch in each)

        return self.forward.fitting(batches, attempt)[1]

    def _backward(self, batch: MicroBatch, spoken: Tensor, *, total: int) -> float:
        """Add one micro-batch's gradient; returns the summed loss of its assistant tokens, of ``total`` in all."""
        losses = -self._logprobs(batch)
        weights = torch.where(spoken, 1.0, self.shown_weight)
        ((losses * weights).sum() / total).backward()
        for weight, master in self.copies.values():
            if weight.grad is not None:
                grad = weight.grad.to(master.dtype)
                master.grad = grad if master.grad is None else master.grad.add_(grad)
                weight.grad = None
        return float((losses.detach() * spoken).sum())

    def _logprobs(self, batch: MicroBatch) -> Tensor:
        return token_logprobs(self.policy.model, batch.token_ids, batch.loss_mask, shared=batch.shared).logprobs

    def _sample(self, example: Example) -> TrainingSample:
        trained = example.spoken
        if self.shown_weight:
            trained = trained | True
            trained[0] = False  # nothing predicts it
        end = int(trained.nonzero()[0][-1]) + 1
        ids, mask = example.token_ids[:end].tolist(), trained[:end].astype(int).tolist()
        sampled = [0.0 if spoken else None for spoken in example.spoken[:end]]
        return TrainingSample(example.conversation, example.conversation, ids, mask, sampled)


def _num_spoken(examples: Sequence[Example]) -> int:
    return sum(int(example.spoken.sum()) for example in examples)
