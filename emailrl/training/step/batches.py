"""From samples to padded tensors (packed only in the forward pass): bounded micro-batches, seeded mini-batches."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from emailrl.training.step.prefixes import shared_with_last, split_by_prefix
from emailrl.training.step.samples import TrainingSample


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples padded on the right to one length; tensors are ``(B, T)``, but ``share`` and ``shared`` ``(B,)``."""

    token_ids: Tensor
    loss_mask: Tensor
    """bool"""
    sampler_logprobs: Tensor
    """NaN for unsampled tokens."""
    share: Tensor
    """Share of its trajectory's trainable tokens in a row: 1 unless the trajectory has several samples."""
    shared: Tensor
    """Number of leading tokens a row shares with the previous row; 0 if prefixes are not shared."""
    indices: tuple[int, ...]
    """Each row's index in the step's list of samples."""
    num_tokens: int
    """Tokens to compute: without padding, shared ones once."""

    @property
    def num_trainable(self) -> int:
        """Tokens in the loss."""
        return int(self.loss_mask.sum())


def micro_batches(
    samples: Sequence[TrainingSample],
    max_tokens: int,
    *,
    chosen: Sequence[int] | None = None,
    max_rows: int | None = None,
    pad_id: int = 0,
    device: torch.device | str = "cpu",
    packing: bool = False,
    share_prefixes: bool = False,
) -> list[MicroBatch]:
    """Split ``samples``, or those at the indices ``chosen``, into batches of at most ``max_tokens`` and ``max_rows``.

    Padded, a batch counts as rows x longest; sorting by length leaves little padding. With ``packing``, padding is
    free: first-fit decreasing finds the number of batches, then their tokens are balanced. With ``share_prefixes``
    (also packed), common prefixes within a batch count once, and rows that share them are grouped. A sample longer
    than ``max_tokens`` gets its own batch. ``samples`` must include all samples of each trajectory. The same samples
    always give the same batches.
    """
    chosen = range(len(samples)) if chosen is None else chosen
    max_rows = max_rows or len(chosen)
    if share_prefixes:
        parts = split_by_prefix([samples[i].token_ids for i in chosen], max_tokens, max_rows)
        rows = [[chosen[place] for place in part] for part in parts]
    else:
        by_length = sorted(chosen, key=lambda i: -len(samples[i].token_ids))
        lengths = {i: len(samples[i].token_ids) for i in by_length}
        rows = (_packed if packing else _padded)(lengths, max_tokens, max_rows)
    trainable = Counter[str]()
    for sample in samples:
        trainable[sample.trajectory_id] += sample.num_trainable
    return [
        _pad([samples[i] for i in indices], tuple(indices), trainable, pad_id, device, share_prefixes)
        for indices in rows
    ]


def _padded(lengths: dict[int, int], max_tokens: int, max_rows: int) -> list[list[int]]:
    """Split the samples, longest first, wherever one more row would not fit."""
    rows: list[list[int]] = []
    for i in lengths:
        if rows and len(rows[-1]) < max_rows and lengths[rows[-1][0]] * (len(rows[-1]) + 1) <= max_tokens:
            rows[-1].append(i)
        else:
            rows.append([i])
    return rows


def _packed(lengths: dict[int, int], max_tokens: int, max_rows: int) -> list[list[int]]:
    """Assign the samples, longest first, each to the emptiest of as few batches as first-fit needs."""
    fitted: list[list[int]] = []
    room: list[int] = []
    for i, length in lengths.items():
        fits = (n for n, left in enumerate(room) if length <= left and len(fitted[n]) < max_rows)
        place = next(fits, len(room))
        if place == len(room):
            fitted.append([])
            room.append(max_tokens)
        fitted[place].append(i)
        room[place] -= length
    # A sample over the cap stays alone; the rest is reassigned for balance.
    alone = [[i] for i, length in lengths.items() if length > max_tokens]
    num = len(fitted) - len(alone)
    even: list[list[int]] = [[] for _ in range(num)]
    filled = [0] * num
    for i, length in lengths.items():
        if length <= max_tokens:
            place = min((n for n in range(num) if len(even[n]) < max_rows), key=filled.__getitem__)
            even[place].append(i)
            filled[place] += length
    if any(tokens > max_tokens for tokens in filled):  # first-fit packs tighter than balancing
        return fitted
    return alone + even


def mini_batches(samples: Sequence[TrainingSample], num: int, *, seed: str) -> Iterator[list[int]]:
    """Split the samples of one step into ``num`` lists of nearly equal size, by trajectory, shuffled with ``seed``.

    Yields their indices. A trajectory's samples stay together. Fewer trajectories than ``num`` give fewer lists, never
    an empty one.
    """
    ids = sorted({sample.trajectory_id for sample in samples})
    random.Random(seed).shuffle(ids)
    num = min(num, len(ids))
    place = {trajectory_id: i % num for i, trajectory_id in enumerate(ids)}
    for which in range(num):
        yield [i for i, sample in enumerate(samples) if place[sample.trajectory_id] == which]


def _pad(
    samples: list[TrainingSample],
    indices: tuple[int, ...],
    trainable: Mapping[str, int],
    pad_id: int,
    device: torch.device | str,
    share_prefixes: bool,
) -> MicroBatch:
    width = max(len(sample.token_ids) for sample in samples)
    shared = shared_with_last([sample.token_ids for sample in samples]) if share_prefixes else [0] * len(samples)
    shape = (len(samples), width)
    token_ids = torch.full(shape, pad_id, dtype=torch.long)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    sampler_logprobs = torch.full(shape, torch.nan)
    for row, sample in enumerate(samples):
        length = len(sample.token_ids)
        token_ids[row, :length] = torch.tensor(sample.token_ids)
        loss_mask[row, :length] = torch.tensor(sample.loss_mask, dtype=torch.bool)
        known = [torch.nan if logprob is None else logprob for logprob in sample.sampler_logprobs]
        sampler_logprobs[row, :length] = torch.tensor(known)
    return MicroBatch(
        token_ids=token_ids.to(device),
        loss_mask=loss_mask.to(device),
        sampler_logprobs=sampler_logprobs.to(device),
        share=torch.tensor([sample.num_trainable / trainable[sample.trajectory_id] for sample in samples]).to(device),
        shared=torch.tensor(shared).to(device),
        indices=indices,
        num_tokens=sum(len(sample.token_ids) for sample in samples) - sum(shared),
    )
