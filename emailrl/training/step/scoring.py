"""The policy's forward passes: log-probabilities, entropy and values of micro-batches, by it and by its reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from emailrl.errors import EmailRLError
from emailrl.policy.layout import micro_batch_cap
from emailrl.policy.load import Policy
from emailrl.policy.logprobs import TokenLogprobs, token_logprobs
from emailrl.policy.packing import shares_prefixes, takes_packed
from emailrl.settings import Settings
from emailrl.training.step.batches import MicroBatch, micro_batches
from emailrl.training.step.prepared import halves_of
from emailrl.training.step.samples import TrainingSample


class LogprobScorer:
    """Scores micro-batches under a cap of tokens, which falls where memory runs out."""

    def __init__(self, policy: Policy, settings: Settings) -> None:
        self.policy, self.settings = policy, settings
        self.max_tokens = micro_batch_cap(settings.training, on_gpu=policy.device.type == "cuda")

    def micro_batches(self, samples: Sequence[TrainingSample], chosen: Sequence[int] | None = None) -> list[MicroBatch]:
        """Split the samples, or those at the indices ``chosen``, under the present cap."""
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
        """Whether tokens that samples of a micro-batch begin with alike are computed once."""
        return self.settings.training.prefix_sharing and shares_prefixes(self.policy.model)

    def forward(self, batch: MicroBatch, *, entropy_grad: bool = False, critic_only: bool = False) -> TokenLogprobs:
        """Score by the policy as it is, with entropy; with its critic's values where it has one.

        ``critic_only`` cuts the values' gradient at the hidden states: nothing but the critic's head then gets one.
        """
        return self._score(batch, entropy=True, entropy_grad=entropy_grad, critic_only=critic_only)

    @torch.no_grad()
    def score(self, batch: MicroBatch) -> TokenLogprobs:
        """Score by the policy as it is, without gradients."""
        return self._score(batch)

    @torch.no_grad()
    def reference(self, batch: MicroBatch) -> Tensor:
        """Log-probabilities under the reference policy."""
        with self.policy.reference():
            return self._score(batch, critic=False).logprobs

    def size(self, batch: MicroBatch) -> int:
        """Tokens of a micro-batch that take memory: those to compute where it is packed, padding too where not."""
        return batch.num_tokens if takes_packed(self.policy.model) else batch.token_ids.numel()

    def ran_out(self, batch: MicroBatch) -> None:
        """Note that a micro-batch did not fit: later ones are no larger than its halves.

        Raises EmailRLError for a single sample.
        """
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()
        if len(batch.indices) == 1:
            raise EmailRLError(
                f"Out of memory on a single sample of {batch.num_tokens} tokens.",
                "Set GRADIENT_CHECKPOINTING=on, lower MAX_TURNS or MAX_TOKENS, or choose a smaller model.",
            )
        # Where prefixes are shared a half is more than half: a lower cap would tear apart what would have fitted.
        halves = max(map(self.size, halves_of(batch)))
        self.max_tokens = min(self.max_tokens, halves, self.size(batch) - 1)

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
