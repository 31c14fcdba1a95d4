"""Imitation: a model made to say what experts said."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedModel

Example = tuple["np.ndarray", "np.ndarray"]
"""Token ids (uint32) and loss mask (bool) of one sample, equally long."""
SHOWN_WEIGHT = 0.1
"""Weight of a shown token's loss beside a sampled one's."""


def fit(
    model: PreTrainedModel, examples: Iterator[Example], *, steps: int, batch_size: int, learning_rate: float,
    report: Callable[[int, float], None],
) -> None:  # fmt: skip
    """Maximise the likelihood of the experts' tokens: AdamW, linear warm-up over 5 % of the steps, then a cosine to 0.

    Tokens that were shown count too, ``SHOWN_WEIGHT`` each: tool results repeat what stood in earlier ones, and a model
    made from nothing learns to copy from them. ``report(step, loss)`` is called after each update with the mean loss of
    the experts' tokens in nats. Stops early when the examples run out.
    """
    import torch
    import torch.nn.functional as F

    device = model.device
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.05)
    warmup = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min(1.0, (i + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * i / steps))
    )
    model.train()
    for step in range(1, steps + 1):
        batch = list(itertools.islice(examples, batch_size))
        if not batch:
            return
        ids_BT, mask_BT, length_B = _collate(batch, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(input_ids=ids_BT, use_cache=False).logits
        loss_BT = F.cross_entropy(logits[:, :-1].float().transpose(1, 2), ids_BT[:, 1:], reduction="none")
        shown_BT = (torch.arange(1, ids_BT.shape[1], device=device) < length_B[:, None]) & ~mask_BT[:, 1:]
        loss = loss_BT[mask_BT[:, 1:]].mean()
        total = loss + SHOWN_WEIGHT * loss_BT[shown_BT].sum() / mask_BT.sum()
        optimizer.zero_grad(set_to_none=True)
        total.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        report(step, loss.item())
    model.eval()


def _collate(batch: list[Example], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Right-padded ids and loss mask ``(B, T)``, T a multiple of 64, and lengths ``(B,)``.

    Padding needs no attention mask: attention is causal, so what stands to the right of a token cannot reach it.
    """
    import torch

    width = -(-max(len(ids) for ids, _ in batch) // 64) * 64
    ids_BT = torch.zeros(len(batch), width, dtype=torch.long)
    mask_BT = torch.zeros(len(batch), width, dtype=torch.bool)
    for row, (ids, mask) in enumerate(batch):
        ids_BT[row, : len(ids)] = torch.from_numpy(ids.astype("int64"))
        mask_BT[row, : len(ids)] = torch.from_numpy(mask)
    lengths = torch.tensor([len(ids) for ids, _ in batch])
    return ids_BT.to(device), mask_BT.to(device), lengths.to(device)
