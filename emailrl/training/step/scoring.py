"""Forward passes of the policy and its reference: log-probabilities, entropy and values of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from emailrl.errors import EmailRLError
from emailrl.policy.layout import micro_batch_cap
from emailrl.policy.load import Policy
from emailrl.policy.logprobs import TokenLogprobs, hidden_states, token_logprobs
from emailrl.policy.packing import shares_prefixes, takes_packed
from emailrl.ranks import ALONE, Ranks
from emailrl.settings import Settings
from emailrl.training.step.batches import MicroBatch, micro_batches
from emailrl.training.step.prepared import Prepared, halves_of
from emailrl.training.step.samples import TrainingSample
from emailrl.training.step.spread import Share

T = TypeVar("T")


class LogprobScorer:
    """Scores micro-batches under a token cap, which is lowered when memory runs out."""

    def __init__(self, policy: Policy, settings: Settings, ranks: Ranks = ALONE) -> None:
        self.policy, self.settings, self.ranks = policy, settings, ranks
        hidden = policy.model.config.get_text_config().hidden_size
        self.max_tokens = micro_batch_cap(settings.training, on_gpu=policy.device.type == "cuda", hidden=hidden)

    def micro_batches(self, samples: Sequence[TrainingSample], chosen: Sequence[int] | None = None) -> list[MicroBatch]:
        """Split the samples, or those at the indices ``chosen``, under the current cap."""
        policy = self.policy
        return micro_batches(
            samples,
            self.max_tokens,
            chosen=chosen,
            max_rows=self.settings.training.max_rows_per_micro_batch,
            pad_id=policy.tokenizer.pad_token_id or 0,
            device=policy.device,
            packing=takes_packed(policy.model),
            share_prefixes=self.shares_prefixes,
        )

    @property
    def shares_prefixes(self) -> bool:
        """Whether common prefixes in a micro-batch are computed once."""
        return self.settings.training.prefix_sharing and shares_prefixes(self.policy.model)

    def forward(self, batch: MicroBatch, *, entropy_grad: bool = False, critic_only: bool = False) -> TokenLogprobs:
        """Score with the current policy, with entropy, and values if it has a critic.

        ``critic_only`` stops the values' gradient at the hidden states: only the critic's head gets one.
        """
        return self._score(batch, entropy=True, entropy_grad=entropy_grad, critic_only=critic_only)

    @torch.no_grad()
    def score(self, batch: MicroBatch) -> TokenLogprobs:
        """Score with the current policy, without gradients."""
        return self._score(batch)

    @torch.no_grad()
    def reference(self, batch: MicroBatch) -> Tensor:
        """Log-probabilities under the reference policy."""
        with self.policy.reference():
            return self._score(batch, critic=False).logprobs

    def idle_batches(self, count: int) -> list[MicroBatch]:
        """Blank micro-batches for a rank with ``count`` of its own, so that all ranks run equally many passes.

        Only a sharded base needs them: every rank takes part in every pass.
        """
        if not self.policy.sharded:
            return []
        device = self.policy.device
        ids, one = torch.zeros((1, 2), dtype=torch.long, device=device), torch.ones(1, device=device)
        mask = torch.tensor([[False, True]], device=device)
        blank = MicroBatch(ids, mask, torch.full((1, 2), torch.nan, device=device), one, one.long() * 0, (0,), 2)
        return [blank] * (max(self.ranks.gather(count)) - count)

    def together(self, work: Callable[[], T]) -> T:
        """Do ``work`` on all ranks; an error on one is raised on all.

        Not with a sharded base: the other ranks wait for this rank's part of a layer and end when it does.
        """
        return work() if self.policy.sharded else self.ranks.agree(work)

    @torch.no_grad()
    def pass_along(self) -> None:
        """Take part in a forward pass that only another rank needs."""
        hidden_states(self.policy.model, torch.zeros((1, 1), dtype=torch.long, device=self.policy.device))

    @contextmanager
    def accompanied(self) -> Iterator[None]:
        """Run the block's one forward pass; with a sharded base the other ranks run it too."""
        if not self.policy.sharded:
            yield
            return
        with self.ranks.at_work():
            self.ranks.scatter([None] * self.ranks.world)
            yield

    def size(self, batch: MicroBatch) -> int:
        """Tokens of a micro-batch that take memory: including padding unless it is packed."""
        return batch.num_tokens if takes_packed(self.policy.model) else batch.token_ids.numel()

    def ran_out(self, batch: MicroBatch) -> None:
        """Record that a micro-batch did not fit: later ones are no larger than its halves.

        Raises EmailRLError for a single sample.
        """
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()
        if self.policy.sharded:
            raise EmailRLError(
                f"Out of memory on a micro-batch of {batch.num_tokens} tokens, which ranks with a sharded base model "
                "cannot split.",
                "Set GRADIENT_CHECKPOINTING=on, or lower MAX_TOKENS_PER_MICRO_BATCH.",
            )
        if len(batch.indices) == 1:
            raise EmailRLError(
                f"Out of memory on a single sample of {batch.num_tokens} tokens.",
                "Set GRADIENT_CHECKPOINTING=on, lower MAX_TURNS or MAX_TOKENS, or choose a smaller model.",
            )
        # With shared prefixes a half is more than half: a lower cap would split batches that fit.
        halves = max(map(self.size, halves_of(batch)))
        self.max_tokens = min(self.max_tokens, halves, self.size(batch) - 1)

    def score_all(self, share: Share, *, old: bool, reference: bool) -> tuple[list[list[Prepared]], int]:
        """Score the micro-batches of each mini-batch with the policy (``old``) and its ``reference``, as requested.

        Returns them and the number of times one was halved to fit into memory.
        """
        rounds, halved = [], 0
        for mini in share.mini_batches:
            prepared: list[Prepared] = []
            waiting = self.micro_batches(share.samples, mini)[::-1]
            idle = self.idle_batches(len(waiting))
            while waiting:
                batch = waiting.pop()
                try:
                    prepared.append(
                        self._prepare(batch, [share.samples[i] for i in batch.indices], old=old, reference=reference)
                    )
                    continue
                except torch.OutOfMemoryError:
                    pass  # handled below, where the traceback holds no tensors any more
                self.ran_out(batch)
                halved += 1
                waiting += halves_of(batch)[::-1]
            for blank in idle:
                self._prepare(blank, [], old=old, reference=reference)
            rounds.append(prepared)
        return rounds, halved

    def _prepare(self, batch: MicroBatch, rows: list[TrainingSample], *, old: bool, reference: bool) -> Prepared:
        ref = self.reference(batch) if reference else None
        scored = self.score(batch) if old else None
        return Prepared(
            batch,
            rows,
            old_logprobs=scored.logprobs if scored else None,
            ref_logprobs=ref,
            old_values=scored.values if scored else None,
        )

    def _score(
        self,
        batch: MicroBatch,
        *,
        entropy: bool = False,
        entropy_grad: bool = False,
        critic: bool = True,
        critic_only: bool = False,
    ) -> TokenLogprobs:
        head = self.policy.value_head if critic else None
        return token_logprobs(
            self.policy.model,
            batch.token_ids,
            batch.loss_mask,
            temperature=self.settings.agent.temperature,
            entropy=entropy,
            entropy_grad=entropy_grad,
            value_head=(lambda hidden: head(hidden.detach())) if head is not None and critic_only else head,
            shared=batch.shared,
        )
