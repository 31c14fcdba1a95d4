"""Forward passes over micro-batches: log-probabilities, entropy and values, by the policy and its reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from emailrl.base.errors import EmailRLError
from emailrl.model.layout import micro_batch_cap
from emailrl.model.logprobs import TokenLogprobs, hidden_states, token_logprobs
from emailrl.model.packing import shares_prefixes, takes_packed
from emailrl.model.policy import Policy
from emailrl.model.teacher import Teacher
from emailrl.settings import TrainingSettings
from emailrl.training.batch import Layout, MicroBatch

T = TypeVar("T")
Head = Callable[[Tensor], Tensor] | None  # The critic's, which gives a value of each state


class Forward:
    """Scores micro-batches under a token cap, which is lowered when memory runs out."""

    def __init__(
        self, policy: Policy, training: TrainingSettings, temperature: float, teacher: Teacher | None = None
    ) -> None:
        self.policy, self.training, self.temperature, self.teacher = policy, training, temperature, teacher
        hidden = policy.model.config.get_text_config().hidden_size
        self.max_tokens = micro_batch_cap(training, on_gpu=policy.device.type == "cuda", hidden=hidden)

    def layout(self) -> Layout:
        """How micro-batches are laid out, under the current cap."""
        policy, max_rows = self.policy, self.training.max_rows_per_micro_batch
        pad_id, packing = policy.tokenizer.pad_token_id or 0, takes_packed(policy.model)
        return Layout(self.max_tokens, max_rows, pad_id, policy.device, packing, self.shares_prefixes)

    @property
    def shares_prefixes(self) -> bool:
        """Whether common prefixes in a micro-batch are computed once."""
        return self.training.prefix_sharing and shares_prefixes(self.policy.model)

    def train(self, batch: MicroBatch, *, entropy_grad: bool = False, critic_only: bool = False) -> TokenLogprobs:
        """Score for a backward pass, with entropy and values; ``critic_only``: only the critic's head learns."""
        critic = self.policy.value_head
        head = (lambda hidden: critic(hidden.detach())) if critic is not None and critic_only else critic
        return self._score(batch, head, entropy=True, entropy_grad=entropy_grad)

    def fitting(
        self, batches: list[MicroBatch], attempt: Callable[[Iterable[MicroBatch]], T]
    ) -> tuple[list[MicroBatch], T, int]:
        """``attempt`` all micro-batches, again from the start with smaller ones whenever memory runs out. Returns those
        that fit, the result, and how often memory ran out. Then those as large as the one that did not fit are
        halved."""
        halved, last = 0, batches[:0]

        def each() -> Iterator[MicroBatch]:
            for batch in batches:
                last[:] = [batch]
                yield batch

        while True:
            try:
                return batches, attempt(each()), halved
            except torch.OutOfMemoryError:
                pass  # handled below, where the traceback holds no tensors any more
            self.ran_out(last[0])
            halved, limit = halved + 1, self.size(last[0])
            parts = (b.halves() if self.size(b) >= limit and len(b.indices) > 1 else [b] for b in batches)
            batches = [part for whole in parts for part in whole]

    def blank(self) -> MicroBatch:
        """A micro-batch that adds nothing: with a sharded base every rank takes part in every pass."""
        device = self.policy.device
        ids, one = torch.zeros((1, 2), dtype=torch.long, device=device), torch.ones(1, device=device)
        mask = torch.tensor([[False, True]], device=device)
        return MicroBatch(ids, mask, torch.full((1, 2), torch.nan, device=device), one, one.long() * 0, (0,), ("",), 2)

    @torch.no_grad()
    def pass_along(self) -> None:
        """Take part in a forward pass that only another rank needs."""
        hidden_states(self.policy.model, torch.zeros((1, 1), dtype=torch.long, device=self.policy.device))

    def size(self, batch: MicroBatch) -> int:
        """Tokens of a micro-batch that take memory: including padding unless it is packed."""
        return batch.num_tokens if takes_packed(self.policy.model) else batch.token_ids.numel()

    def ran_out(self, batch: MicroBatch) -> None:
        """Let later micro-batches be no larger than the halves of one that did not fit; EmailRLError if it has none."""
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()
        on, lower = "Set GRADIENT_CHECKPOINTING=on, ", "lower MAX_TURNS or MAX_TOKENS, or choose a smaller model."
        if self.policy.sharded:
            what = f"a micro-batch of {batch.num_tokens} tokens, which ranks with a sharded base model cannot split"
            raise EmailRLError(f"Out of memory on {what}.", f"{on}or lower MAX_TOKENS_PER_MICRO_BATCH.")
        if len(batch.indices) == 1:
            raise EmailRLError(f"Out of memory on a single sample of {batch.num_tokens} tokens.", on + lower)
        # With shared prefixes a half is more than half: a lower cap would split batches that fit.
        halves = max(map(self.size, batch.halves()))
        self.lower(min(halves, self.size(batch) - 1))

    def lower(self, most: int) -> None:
        """Run at most ``most`` tokens in a pass from now on."""
        self.max_tokens = min(self.max_tokens, most)

    @torch.no_grad()
    def score(self, batch: MicroBatch, *, old: bool = True, reference: bool = False) -> MicroBatch:
        """The micro-batch scored by the current policy (``old``), its ``reference``, as requested, and a teacher."""
        if old:
            scored = self._score(batch, self.policy.value_head)
            batch = replace(batch, old_logprobs=scored.logprobs, old_values=scored.values)
        if reference:
            with self.policy.reference():
                batch = replace(batch, ref_logprobs=self._score(batch, None).logprobs)
        if self.teacher is not None:
            scores = self.teacher(batch.token_ids, batch.loss_mask, batch.shared)
            batch = replace(batch, teacher_logprobs=scores)
        return batch

    def _score(
        self, batch: MicroBatch, head: Head, *, entropy: bool = False, entropy_grad: bool = False
    ) -> TokenLogprobs:
        model, ids, mask, shared = self.policy.model, batch.token_ids, batch.loss_mask, batch.shared
        wanted = {"entropy": entropy, "entropy_grad": entropy_grad}
        return token_logprobs(model, ids, mask, temperature=self.temperature, value_head=head, shared=shared, **wanted)
