"""The policy and value losses: pure functions on ``(B, T)`` tensors, each a scalar to minimize plus metrics.
``logprobs[b, t]`` belongs to ``token_ids[b, t]``: natural logarithm, after temperature, before top-p / top-k. Masks may
be bool, int or float; arithmetic is in float32, or float64 when given float64. Values outside the mask, even NaN and
infinity, affect neither the loss nor its gradient, and targets are detached here. A ``denominator`` replaces the local
count with the update's global one, so that the losses of micro-batches, or of ranks, add up to the total loss."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from emailrl.training.algorithms import default_low

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to this before ``exp``: beyond it e^d overflows, and 0 * inf in the backward pass is NaN."""

Aggregation = Literal["token_mean", "sequence_mean", "constant"]
AGGREGATIONS = get_args(Aggregation)
RatioLevel = Literal["token", "sequence"]
Surrogate = Literal["ppo", "cispo"]
Correction = Literal["tis", "icepop", "sequence_mask"]


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    ratio_level: RatioLevel = "token",
    surrogate: Surrogate = "ppo",
    aggregation: Aggregation = "token_mean",
    constant_length: float | None = None,
    weights: Tensor | None = None,
    denominator: float | Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Clipped surrogate: -min(rA, clip(r, 1 - clip_low, 1 + clip_high)A) with r = exp(logprobs - old_logprobs).
    PPO (arXiv 1707.06347); separate clips: DAPO (2503.14476). ``dual_clip`` c > 1 bounds the loss where A < 0 by
    -max(min(...), cA) (1912.09729). ``surrogate="cispo"`` is -sg(clip(r, ...)) A logprobs, sg without gradient, so that
    clipped tokens keep theirs (MiniMax-M1, 2506.13585); it has no dual clip. ``ratio_level="sequence"`` takes r =
    exp(masked mean of the log-ratio) for every token of a row (GSPO, 2507.18071). ``advantages`` is ``(B, T)``, or
    ``(B,)`` for one per sequence; ``weights`` multiplies after clipping. Log-ratios are clamped to ±20. See
    ``aggregate`` for the rest."""
    trainable = _trainable(loss_mask, logprobs, old_logprobs)
    log_ratio = masked(logprobs, trainable) - masked(old_logprobs.detach(), trainable)
    if ratio_level == "sequence":
        log_ratio = _row_mean(log_ratio, trainable).expand_as(log_ratio)
    elif ratio_level != "token":
        raise ValueError(f"unknown ratio_level {ratio_level!r}: token or sequence")
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    advantages = advantages[:, None].expand_as(ratio) if advantages.ndim == 1 else advantages
    advantages = masked(advantages.detach(), trainable)
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    if surrogate == "cispo":
        gain, bound = bounded.detach() * advantages * masked(logprobs, trainable), bounded != ratio
    elif surrogate == "ppo":
        unclipped, clipped = ratio * advantages, bounded * advantages
        gain, bound = torch.minimum(unclipped, clipped), clipped < unclipped
    else:
        raise ValueError(f"unknown surrogate {surrogate!r}: ppo or cispo")
    if dual_clip is not None and surrogate == "ppo":
        if dual_clip <= 1:
            raise ValueError(f"dual_clip must be above 1, got {dual_clip}")
        floor = torch.where(advantages < 0, dual_clip * advantages, gain)
        bound = bound | (gain < floor)
        gain = torch.maximum(gain, floor)
    if weights is not None:
        gain = gain * masked(weights.detach(), trainable)
    loss = aggregate(-gain, trainable, aggregation, constant_length=constant_length, denominator=denominator)
    return loss, _ratio_metrics(ratio.detach(), log_ratio.detach(), bound, trainable)


def importance_weights(
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    loss_mask: Tensor,
    *,
    kind: Correction = "tis",
    low: float | None = None,
    high: float = 5.0,
) -> Tensor:
    """Weight tokens ``(B, T)`` by w = exp(old - sampler), for a sampler that differs from the policy; detached. ``tis``
    clamps w to [low, high]; ``icepop`` zeroes w outside it; ``sequence_mask`` keeps a row's w unclamped iff the row's
    geometric mean exp(mean log w) lies inside, else zeroes the row. ``low`` None is ``default_low(kind)``. These are
    OpenRLHF's corrections, save that its ``tis`` raises weights to 0.5. A token that was not sampled (NaN, as for tool
    results) has weight 1 and is excluded from means, but is zeroed with its row."""
    return correction_weights(old_logprobs, sampler_logprobs, loss_mask, kind=kind, low=low, high=high)[0]


def log_weights(old_logprobs: Tensor, sampler_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """Return old - sampler ``(B, T)``, detached, clamped to ±20; 0 outside the mask and for unsampled tokens (NaN)."""
    sampled = _trainable(loss_mask, old_logprobs, sampler_logprobs) & ~sampler_logprobs.isnan()
    gap = masked(old_logprobs.detach(), sampled) - masked(sampler_logprobs.detach(), sampled)
    return gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def correction_weights(
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    loss_mask: Tensor,
    *,
    kind: Correction,
    low: float | None = None,
    high: float,
    ratio_level: RatioLevel = "token",
) -> tuple[Tensor, dict[str, float]]:
    """Weight tokens as ``importance_weights`` does, at the level of the policy's ratio, and return metrics.
    ``ratio_level="sequence"`` (GSPO) gives all tokens of a row the geometric mean of the row's weights, bounded as one.
    Metrics, over sampled tokens: ``correction_mean`` of the weights, ``correction_min`` and ``correction_max`` of those
    before the bounds, ``correction_cut_fraction``, the share that the bounds changed."""
    trainable = loss_mask.bool()
    sampled = trainable & ~sampler_logprobs.isnan()
    gap = log_weights(old_logprobs, sampler_logprobs, loss_mask)
    if ratio_level == "sequence":
        gap, sampled = masked(_row_mean(gap, sampled).expand_as(gap), trainable), trainable
    elif ratio_level != "token":
        raise ValueError(f"unknown ratio_level {ratio_level!r}: token or sequence")
    low, weights = default_low(kind) if low is None else low, gap.exp()
    free = weights[sampled]
    if kind == "tis":
        weights = torch.where(sampled, weights.clamp(low, high), weights)
    elif kind == "icepop":
        weights = masked(weights, ((low <= weights) & (weights <= high)) | ~sampled)
    elif kind == "sequence_mask":
        mean = _row_mean(gap, sampled).exp()
        weights = masked(weights, (low <= mean) & (mean <= high))
    else:
        raise ValueError(f"unknown importance correction {kind!r}: tis, icepop or sequence_mask")
    weights = masked(weights, trainable)
    bounded = weights[sampled]
    if not len(free):
        return weights, {}
    stats = [bounded.mean(), free.min(), free.max(), (free != bounded).to(free.dtype).mean()]
    names = ["correction_mean", "correction_min", "correction_max", "correction_cut_fraction"]
    return weights, dict(zip(names, torch.stack(stats).tolist(), strict=True))


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
    *,
    clip: float | None = None,
    denominator: float | Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Half the critic's squared error, averaged over tokens: ½ max((V - R)², (clip(V, V_old ± clip) - R)²). All ``(B,
    T)``; ``clip`` None omits the second term. PPO's value clipping as in OpenRLHF and verl."""
    trainable = _trainable(loss_mask, values, old_values, returns)
    values, returns = masked(values, trainable), masked(returns.detach(), trainable)
    error = (values - returns).square()
    clipped_share = 0.0
    if clip is not None:
        old_values = masked(old_values.detach(), trainable)
        clipped = (torch.clamp(values, old_values - clip, old_values + clip) - returns).square()
        clipped_share = float((clipped > error).sum() / trainable.sum().clamp(min=1))
        error = torch.maximum(error, clipped)
    loss = aggregate(error / 2, trainable, "token_mean", denominator=denominator)
    return loss, {"value_clip_fraction": clipped_share}


def aggregate(
    per_token: Tensor,
    loss_mask: Tensor,
    aggregation: Aggregation,
    *,
    constant_length: float | None = None,
    denominator: float | Tensor | None = None,
) -> Tensor:
    """Reduce ``(B, T)`` over the mask to a scalar; 0 if nothing is trainable. ``token_mean`` sum / tokens (DAPO);
    ``sequence_mean`` mean over sequences of their token means (GRPO); ``constant`` sum / (sequences *
    ``constant_length``) (Dr. GRPO). ``denominator`` replaces the divisor: tokens, sequences, or sequences *
    constant_length. A row without a trainable token is not a sequence. Raises ValueError if it is not above 0, unless
    nothing is trainable."""
    trainable = loss_mask.bool()
    per_token = masked(per_token, trainable)
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"unknown aggregation {aggregation!r}: {', '.join(AGGREGATIONS)}")
    count = count_for(trainable, aggregation, constant_length) if denominator is None else denominator
    total = (_row_mean(per_token, trainable) if aggregation == "sequence_mean" else per_token).sum()
    if denominator is not None and not denominator > 0 and trainable.any():
        raise ValueError(f"denominator must be above 0 where tokens are trainable, got {float(denominator)}")
    # An empty batch has sum and count 0; dividing by 1 keeps its loss and gradient at 0.
    return total / torch.as_tensor(count, dtype=total.dtype, device=total.device).where(trainable.any(), 1)


def count_for(
    loss_mask: Tensor, aggregation: Aggregation, constant_length: float | None = None, *, share: Tensor | None = None
) -> Tensor:
    """Count what ``aggregation`` divides by in these rows ``(B, T)``; counts of micro-batches add up. A row counts as
    ``share`` ``(B,)`` of a sequence, by default 1."""
    trainable = loss_mask.bool()
    if aggregation == "token_mean":
        return trainable.sum()
    rows = trainable.any(1)
    num_sequences = rows.sum() if share is None else share[rows].sum()
    if aggregation == "sequence_mean":
        return num_sequences
    if constant_length is None or constant_length <= 0:
        raise ValueError("aggregation 'constant' needs a constant_length above 0")
    return num_sequences.double() * constant_length  # the length may be fractional


def _ratio_metrics(ratio: Tensor, log_ratio: Tensor, clipped: Tensor, trainable: Tensor) -> dict[str, float]:
    """Means and extremes over trainable tokens; ``approx_kl`` is k3 between old and new policy."""
    if not trainable.any():
        return {"clip_fraction": 0.0, "ratio_mean": 1.0, "ratio_min": 1.0, "ratio_max": 1.0, "approx_kl": 0.0}
    kept, kept_log = ratio[trainable], log_ratio[trainable]
    stats = [clipped.sum() / trainable.sum(), kept.mean(), kept.min(), kept.max(), (kept - 1 - kept_log).mean()]
    names = ["clip_fraction", "ratio_mean", "ratio_min", "ratio_max", "approx_kl"]
    return dict(zip(names, torch.stack([stat.to(kept.dtype) for stat in stats]).tolist(), strict=True))


def _trainable(loss_mask: Tensor, *tensors: Tensor) -> Tensor:
    for tensor in tensors:
        if tensor.shape != loss_mask.shape:
            raise ValueError(f"shape {tuple(tensor.shape)} does not match the loss_mask's {tuple(loss_mask.shape)}")
    return loss_mask.bool()


def _row_mean(per_token: Tensor, trainable: Tensor) -> Tensor:
    """Mean over each row's trainable tokens, ``(B, 1)``; 0 for a row without any. Expects zeros outside the mask."""
    return per_token.sum(1, keepdim=True) / trainable.sum(1, keepdim=True).clamp(min=1)


def masked(tensor: Tensor, trainable: Tensor) -> Tensor:
    """Return the tensor in float32 (float64 given float64), 0 outside the bool mask ``trainable``."""
    # `where`, not multiplication: NaN * 0 is NaN, in the value and in the gradient.
    tensor = tensor if tensor.dtype == torch.float64 else tensor.float()
    return torch.where(trainable, tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device))
