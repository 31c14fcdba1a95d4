"""The published formulas once more, in plain Python over lists of floats: what the tensors are compared with.

Nothing here knows torch or the code under test. A row is a list of numbers, a mask a list of bools beside it; each
function names its source. OpenRLHF is v0.11.0, TRL v1.9.0; "paper" numbers equations of the arXiv version.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Row = list[float]
Rows = list[Row]
Mask = list[list[bool]]


def kept(row: Sequence[float], mask: Sequence[bool]) -> Row:
    """The numbers under the mask."""
    return [number for number, trained in zip(row, mask, strict=True) if trained]


def spread_out(numbers: Row, mask: Sequence[bool], elsewhere: float = 0.0) -> Row:
    """The inverse of ``kept``."""
    left = iter(numbers)
    return [next(left) if trained else elsewhere for trained in mask]


def gae(rewards: Row, values: Row, gamma: float, lam: float) -> Row:
    """1506.02438 equation 16: A_t = sum over l of (gamma lam)^l delta_(t+l), delta = r + gamma V' - V; V ends at 0."""
    ahead = [*values, 0.0][1:]
    delta = [r + gamma * after - v for r, after, v in zip(rewards, ahead, values, strict=True)]
    return [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, len(delta))) for t in range(len(delta))]


def whiten(numbers: Row) -> Row:
    """OpenRLHF's normalization of advantages: (A - mean) / sqrt(max(var, 1e-8)), var biased."""
    mean = sum(numbers) / len(numbers)
    variance = sum((number - mean) ** 2 for number in numbers) / len(numbers)
    return [(number - mean) / math.sqrt(max(variance, 1e-8)) for number in numbers]


def clip(number: float, low: float, high: float) -> float:
    """The number, or the bound it lies beyond."""
    return low if number < low else high if number > high else number


def ratios(logprobs: Row, old: Row, level: str) -> Row:
    """PPO's r_t, or GSPO's s(theta) for every token (2507.18071 equation 7): exp of the mean log-ratio of the row."""
    logs = [now - before for now, before in zip(logprobs, old, strict=True)]
    if level == "sequence":
        logs = [sum(logs) / len(logs)] * len(logs)
    return [math.exp(clip(log, -20, 20)) for log in logs]  # OpenRLHF's PolicyLoss clamps so


def token_loss(ratio: float, advantage: float, low: float, high: float, dual: float | None) -> float:
    """1707.06347 equation 7; a clip for each side, 2503.14476 equation 8; dual clip, 1912.09729 equation 5."""
    surrogate = min(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)
    if dual is not None and advantage < 0:
        surrogate = max(surrogate, dual * advantage)
    return -surrogate


def cispo_loss(weight: float, advantage: float, logprob: float) -> float:
    """2506.13585 equation 4: REINFORCE with the clipped ratio, a constant, as its weight."""
    return -weight * advantage * logprob


def is_idle(ratio: float, advantage: float, low: float, high: float, dual: float | None) -> bool:
    """Whether the ratio moves nothing: the token counts as clipped."""
    nudged = [token_loss(ratio * (1 + step), advantage, low, high, dual) for step in (-1e-9, 1e-9)]
    return advantage != 0 and nudged[0] == nudged[1]


def combined(rows: Rows, aggregation: str, length: float | None) -> float:
    """TRL's loss types over the rows' trained tokens: dapo (token_mean), grpo (sequence_mean), dr_grpo (constant).

    A row with nothing trained is no sequence.
    """
    rows = [row for row in rows if row]
    if not rows:
        return 0.0
    if aggregation == "token_mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if aggregation == "sequence_mean":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    assert length is not None
    return sum(map(sum, rows)) / (len(rows) * length)


def correction(old: Row, sampler: Row, kind: str, low: float, high: float) -> Row:
    """OpenRLHF's vLLM importance sampling: tis clamps, icepop zeroes a token, seq-mask-tis zeroes a sequence."""
    weights = [math.exp(before - drawn) for before, drawn in zip(old, sampler, strict=True)]
    if kind == "tis":
        return [clip(weight, low, high) for weight in weights]
    if kind == "icepop":
        return [weight if low <= weight <= high else 0.0 for weight in weights]
    mean = math.exp(sum(map(math.log, weights)) / len(weights)) if weights else 1.0
    return weights if low <= mean <= high else [0.0] * len(weights)
