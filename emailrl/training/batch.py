"""From kept trajectories to tensors: samples, shares of the ranks, micro-batches under a token cap, their advantages.
Samples are dealt so that each rank computes about as many tokens in every mini-batch, as all wait for the slowest; a
prefix that several of a rank's samples share counts once. They are padded here and packed only in the forward pass."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from emailrl.base.disk import replace_bytes
from emailrl.base.errors import EmailRLError
from emailrl.model.lora import write_tensors
from emailrl.records.trajectory import StopReason, Trajectory, TrajectoryGroup
from emailrl.settings import AlgorithmSettings
from emailrl.training.advantages import ESTIMATORS, gae, rewards_to_go, teacher_gap, whiten
from emailrl.training.algorithms import Algorithm, LossMask
from emailrl.training.kl import estimate


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One sequence to train on. The three lists have equal lengths and end at the last trained token."""

    trajectory_id: str
    group_id: str
    token_ids: list[int]
    loss_mask: list[int]
    sampler_logprobs: list[float | None]  # None for unsampled tokens, such as tool results

    @property
    def num_trainable(self) -> int:
        """Tokens in the loss."""
        return sum(self.loss_mask)


def make_samples(
    groups: Sequence[TrajectoryGroup], loss_mask: LossMask, *, mask_truncated: bool = False
) -> tuple[list[TrainingSample], dict[str, int]]:
    """Turn kept groups into samples; a trajectory whose chat template rewrote earlier turns gives several. Each sample
    ends at its last trained token: under causal attention later tokens change nothing. With ``mask_truncated``, a
    trajectory cut off at the token limit gives none (DAPO's overlong filtering): it counts in its group's statistics,
    but in no denominator. Returns the samples and the numbers left out: ``trajectories_truncated`` and
    ``samples_nothing_trainable``. Raises EmailRLError for a trajectory without sampled ids or log-probabilities: it
    cannot be trained."""
    samples: list[TrainingSample] = []
    counts = Counter(trajectories_truncated=0, samples_nothing_trainable=0)
    for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
        if problem := _problem(trajectory):
            hint = "Train with an engine that returns sampled ids and log-probabilities (transformers or vllm)."
            raise EmailRLError(f"Trajectory {trajectory.id} cannot be trained: {problem}.", hint)
        if mask_truncated and is_truncated(trajectory):
            counts["trajectories_truncated"] += 1
            continue
        for tokens in trajectory.samples:
            trained = list(tokens.loss_mask)
            if not any(trained):
                counts["samples_nothing_trainable"] += 1
                continue
            if loss_mask == "after_prompt":
                start = trained.index(1)
                trained[start:] = [1] * (len(trained) - start)
            end = len(trained) - trained[::-1].index(1)
            columns = tokens.token_ids[:end], trained[:end], tokens.sampler_logprobs[:end]
            samples.append(TrainingSample(trajectory.id, trajectory.group_id, *columns))
    return samples, dict(counts)


def is_truncated(trajectory: Trajectory) -> bool:
    """Whether the token limit, not the policy, ended it; the policy knows its turn limit, so that does not count."""
    return trajectory.stop_reason is StopReason.TRUNCATED


def _problem(trajectory: Trajectory) -> str | None:
    """Why a trajectory cannot give a correct gradient."""
    samples = trajectory.samples
    if not samples or (trajectory.turns and not any(any(tokens.loss_mask) for tokens in samples)):
        return "it has no sampled token ids"
    for tokens in samples:
        if not len(tokens.token_ids) == len(tokens.loss_mask) == len(tokens.sampler_logprobs):
            return "its token ids, loss mask and log-probabilities differ in length"
        if tokens.loss_mask and tokens.loss_mask[0]:
            return "its first token is marked as sampled, with no prompt before it"
        for is_sampled, logprob in zip(tokens.loss_mask, tokens.sampler_logprobs, strict=True):
            if is_sampled and (logprob is None or not math.isfinite(logprob)):
                return f"a sampled token has log-probability {logprob}"
    return None


def mini_batches(samples: Sequence[TrainingSample], num: int, *, seed: str) -> Iterator[list[int]]:
    """Split a step's samples into ``num`` lists of indices of nearly equal size, by trajectory, shuffled with ``seed``.
    Fewer trajectories than ``num`` give fewer lists, never an empty one."""
    ids = sorted({sample.trajectory_id for sample in samples})
    random.Random(seed).shuffle(ids)
    num = min(num, len(ids))
    place = {trajectory_id: i % num for i, trajectory_id in enumerate(ids)}
    for which in range(num):
        yield [i for i, sample in enumerate(samples) if place[sample.trajectory_id] == which]


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a step."""

    step: int
    samples: list[TrainingSample]
    paid: dict[str, float]  # The reward of each of its trajectories, by id
    places: list[int]  # Index of each of its samples in the step's list
    mini_batches: list[list[int]]  # Indices of its samples by mini-batch; a list may be empty
    num_trajectories: int  # Of all ranks


def make_shares(
    samples: Sequence[TrainingSample],
    paid: Mapping[str, float],
    mini_batches: Sequence[Sequence[int]],
    num_ranks: int,
    *,
    step: int,
    share_prefixes: bool,
) -> list[Share]:
    """Distribute whole trajectories over the ranks, one share each; a single rank gets the samples unchanged."""
    num_trajectories = len({sample.trajectory_id for sample in samples})
    if num_ranks == 1:
        minis = [list(mini) for mini in mini_batches]
        return [Share(step, list(samples), dict(paid), list(range(len(samples))), minis, num_trajectories)]
    shares = [Share(step, [], {}, [], [], num_trajectories) for _ in range(num_ranks)]
    for mini in mini_batches:
        for share, indices in zip(shares, deal(samples, mini, num_ranks, share_prefixes=share_prefixes), strict=True):
            begin = len(share.samples)
            share.samples.extend(samples[i] for i in indices)
            share.places.extend(indices)
            share.mini_batches.append(list(range(begin, len(share.samples))))
            share.paid.update({samples[i].trajectory_id: paid[samples[i].trajectory_id] for i in indices})
    return shares


def deal(
    samples: Sequence[TrainingSample], chosen: Sequence[int], num_ranks: int, *, share_prefixes: bool
) -> list[list[int]]:
    """Split the samples at ``chosen`` into one index list per rank; trajectories stay whole, groups if it pays off.
    Longest first, each piece goes to the rank with the fewest tokens including it (Graham's LPT rule), once by
    trajectory and once by group. The split with the smaller maximum wins; ties go to the smaller total."""

    def cost(rows: Sequence[int]) -> int:
        """Tokens of these samples, those of a common prefix once."""
        ids = [samples[i].token_ids for i in rows]
        return sum(map(len, ids)) - (sum(shared_with_last(sorted(ids))) if share_prefixes else 0)

    ways = []
    for key in ("trajectory_id", "group_id"):
        pieces: dict[str, list[int]] = {}
        for i in chosen:
            pieces.setdefault(getattr(samples[i], key), []).append(i)
        parts: list[dict[str, list[int]]] = [{} for _ in range(num_ranks)]
        """Of each rank, by group: members share their prompt."""
        loads = [0] * num_ranks
        for piece in sorted(pieces.values(), key=cost, reverse=True):
            group, alone = samples[piece[0]].group_id, cost(piece)
            owned = [part.get(group, []) for part in parts]
            more = (cost(rows + piece) - cost(rows) if rows else alone for rows in owned)
            grown = [load + each for load, each in zip(loads, more, strict=True)]
            fewest = grown.index(min(grown))
            loads[fewest], parts[fewest][group] = grown[fewest], owned[fewest] + piece
        dealt = [sorted(i for rows in part.values() for i in rows) for part in parts]
        whole = [cost(rows) for rows in dealt]
        ways.append((max(whole), sum(whole), dealt))
    return min(ways, key=lambda way: way[:2])[2]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples padded on the right to one length, and what is fixed before a step's first update. Tensors are ``(B,
    T)``, but ``share`` and ``shared`` ``(B,)``."""

    token_ids: Tensor
    loss_mask: Tensor  # bool
    sampler_logprobs: Tensor  # NaN for unsampled tokens
    share: Tensor  # Share of its trajectory's trainable tokens in a row: 1 unless the trajectory has several samples
    shared: Tensor  # Number of leading tokens a row shares with the previous row; 0 if prefixes are not shared
    indices: tuple[int, ...]  # Each row's index in the step's list of samples
    trajectory_ids: tuple[str, ...]  # Each row's trajectory
    num_tokens: int  # Tokens to compute: without padding, shared ones once
    old_logprobs: Tensor | None = None  # None with one update per step, whose own pass provides them
    ref_logprobs: Tensor | None = None  # None without a KL penalty
    teacher_logprobs: Tensor | None = None  # None without a teacher
    old_values: Tensor | None = None  # None without a critic
    advantages: Tensor | None = None  # None until the whole step is scored
    returns: Tensor | None = None  # The critic's targets; None without a critic

    @property
    def num_trainable(self) -> int:
        """Tokens in the loss."""
        return int(self.loss_mask.sum())

    def halves(self) -> list[MicroBatch]:
        """Two micro-batches of half the rows, each as wide as its longest row."""
        middle, made = (len(self.indices) + 1) // 2, []
        # A row ends at its last trained token, so the mask gives its length.
        steps = torch.arange(1, self.loss_mask.shape[1] + 1, device=self.loss_mask.device)
        lengths = (self.loss_mask * steps).amax(dim=1)
        for rows in (slice(0, middle), slice(middle, None)):
            width = int(lengths[rows].max())
            cut = {name: each[rows, :width] if each.ndim == 2 else each[rows] for name, each in self.tensors().items()}
            cut["shared"] = cut["shared"].clone()
            cut["shared"][:1] = 0  # the row before the first is not in this batch
            num_tokens = int(lengths[rows].sum() - cut["shared"].sum())
            ids, names = self.indices[rows], self.trajectory_ids[rows]
            made.append(replace(self, **cut, indices=ids, trajectory_ids=names, num_tokens=num_tokens))
        return made

    def tensors(self) -> dict[str, Any]:
        """Those of its fields that are tensors, by name."""
        return {field.name: value for field in fields(self) if isinstance(value := getattr(self, field.name), Tensor)}

    def on_cpu(self) -> MicroBatch:
        """A copy in host memory."""
        return replace(self, **{name: value.cpu() for name, value in self.tensors().items()})


@dataclass(frozen=True, slots=True)
class Layout:
    """How samples are laid out in micro-batches."""

    max_tokens: int  # Of a micro-batch; a longer sample gets its own. Padded, a batch counts as rows x longest.
    max_rows: int | None = None
    pad_id: int = 0
    device: torch.device | str = "cpu"
    packing: bool = False  # Padding is free
    share_prefixes: bool = False  # Also packed, common prefixes within a batch count once


def micro_batches(
    samples: Sequence[TrainingSample], layout: Layout, chosen: Sequence[int] | None = None
) -> list[MicroBatch]:
    """Split ``samples``, trajectories whole, or those ``chosen`` of them into micro-batches; always the same ones."""
    chosen = range(len(samples)) if chosen is None else chosen
    parts = split([samples[i].token_ids for i in chosen], layout)
    trainable = Counter[str]()
    for sample in samples:
        trainable[sample.trajectory_id] += sample.num_trainable

    def padded(indices: list[int]) -> MicroBatch:
        batch = [samples[i] for i in indices]
        all_ids = [sample.token_ids for sample in batch]
        shared = shared_with_last(all_ids) if layout.share_prefixes else [0] * len(batch)
        masks = [sample.loss_mask for sample in batch]
        known = [[torch.nan if value is None else value for value in sample.sampler_logprobs] for sample in batch]
        columns = (all_ids, torch.long, layout.pad_id), (masks, torch.bool, 0), (known, torch.float32, torch.nan)
        tensors = [
            pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True, padding_value=fill)
            for rows, dtype, fill in columns
        ]
        tensors.append(torch.tensor([one.num_trainable / trainable[one.trajectory_id] for one in batch]))
        ids, mask, logprobs, share, same = (each.to(layout.device) for each in (*tensors, torch.tensor(shared)))
        names, num_tokens = tuple(sample.trajectory_id for sample in batch), sum(map(len, all_ids)) - sum(shared)
        return MicroBatch(ids, mask, logprobs, share, same, tuple(indices), names, num_tokens)

    return [padded([chosen[place] for place in part]) for part in parts]


Row = Sequence[int]  # Token ids
Way = tuple[tuple[int, int, int], int]
"""A way to split the first n rows: its batches, tokens and sum of squares, and where its last batch starts."""


def shared_with_last(rows: Sequence[Row]) -> list[int]:
    """Number of leading tokens each row shares with the previous one; 0 for the first."""

    def common(first: Row, second: Row) -> int:
        differ = (n for n, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
        return next(differ, min(len(first), len(second)))

    return [common(last, row) for last, row in zip(([], *rows), rows, strict=False)]


def split(rows: Sequence[Row], layout: Layout) -> list[list[int]]:
    """Split ``rows`` into the fewest batches under the layout's caps, then the fewest tokens, then even ones; by index.
    A batch holds neighbors. Longest first, little is padded. Sorted by tokens, rows are in the order of a walk through
    their prefix tree (a trie): whatever a row shares with any earlier one, it shares with the previous one. A row over
    the cap gets its own batch."""
    sharing = layout.share_prefixes
    order = sorted(range(len(rows)), key=lambda i: (rows[i] if sharing else (), -len(rows[i])))
    lengths = [len(rows[i]) for i in order]
    shared = shared_with_last([rows[i] for i in order]) if sharing else [0] * len(rows)
    before = list(accumulate((length - same for length, same in zip(lengths, shared, strict=True)), initial=0))
    best: list[Way] = [((0, 0, 0), 0)]
    for end in range(1, len(rows) + 1):
        ways: list[Way] = []
        for start in reversed(range(max(end - (layout.max_rows or end), 0), end)):
            packed = lengths[start] + before[end] - before[start + 1]
            tokens = packed if layout.packing else lengths[start] * (end - start)
            if tokens > layout.max_tokens and ways:
                break
            batches, total, squares = best[start][0]
            ways.append(((batches + 1, total + tokens, squares + tokens**2), start))
        best.append(min(ways))
    cuts = [len(rows)]
    while cuts[-1]:
        cuts.append(best[cuts[-1]][1])
    return [order[start:end] for start, end in pairwise(cuts[::-1])]


def save_batches(
    folder: Path, name: str, batches: Sequence[MicroBatch], step: int, broken: Mapping[str, float]
) -> None:
    """Write an update that was skipped to ``NAME.safetensors``, then ``NAME.json``, in ``folder``. Tensors are named
    ``<micro-batch>.<field>``, as in ``MicroBatch``; the JSON says what is not finite and whose rows."""
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / f".{name}.safetensors"
    parts = [(f"{n}.{name}", value) for n, batch in enumerate(batches) for name, value in batch.tensors().items()]
    write_tensors(beside, {key: value.contiguous() for key, value in parts})
    beside.rename(folder / f"{name}.safetensors")
    places = ((n, row, one) for n, batch in enumerate(batches) for row, one in enumerate(batch.trajectory_ids))
    rows = [{"micro_batch": n, "row": row, "trajectory_id": one} for n, row, one in places]
    record = {"step": step, "not_finite": {key: str(value) for key, value in broken.items()}, "rows": rows}
    replace_bytes(folder / f"{name}.json", (json.dumps(record, indent=2) + "\n").encode())


def terminal_rewards(groups: Sequence[TrajectoryGroup], algorithm: Algorithm) -> dict[str, float]:
    """The reward of each trajectory at its last trainable token, by id; groups may differ in size. This is the output
    of the algorithm's group estimator: relative to the group, or unchanged; 0 with a teacher, which pays each token.
    Raises EmailRLError if a reward is not finite, ValueError for a group too small to compare."""
    if algorithm.has_teacher:
        return {trajectory.id: 0.0 for group in groups for trajectory in group.trajectories}
    estimator = ESTIMATORS["reinforce" if algorithm.has_critic else algorithm.advantage]
    paid: dict[str, float] = {}
    for group in groups:
        rewards = {trajectory.id: trajectory.reward for trajectory in group.trajectories}
        for name, reward in rewards.items():
            if not math.isfinite(reward):
                raise EmailRLError(f"Trajectory {name} has reward {reward}.", "Check the reward.")
        shaped = estimator(torch.tensor([list(rewards.values())], dtype=torch.float64))
        paid.update(zip(rewards, shaped.flatten().tolist(), strict=True))
    return paid


def shape_advantages(
    batches: Sequence[MicroBatch],
    paid: Mapping[str, float],
    algorithm: Algorithm,
    wanted: AlgorithmSettings,
    *,
    kl_coef: float,
    gather: Callable[[Tensor], list[Tensor]] = lambda value: [value],
) -> tuple[list[MicroBatch], dict[str, float]]:
    """A step's micro-batches with ``advantages``, and with a critic ``returns``; and the metrics of both. A trajectory
    that its chat template split into several samples is one row here, its trained tokens in sampling order: reward and
    value flow back from the last sample to the first (docs/decisions/0003). ``batches`` hold each of the rank's samples
    once; ``gather`` returns a tensor of each rank, for whitening and metrics. ``paid``, the reward of each trajectory
    by id, is clipped to [REWARD_CLIP_LOW, REWARD_CLIP_HIGH]."""
    rows = _Trajectories(batches)
    low = -math.inf if wanted.reward_clip_low is None else wanted.reward_clip_low
    high = math.inf if wanted.reward_clip_high is None else wanted.reward_clip_high
    # The reward is paid at a trajectory's last token.
    rewards, last = torch.zeros(rows.mask.shape), rows.mask.sum(dim=1) - 1
    rewards[torch.arange(len(rewards)), last] = torch.tensor([max(min(paid[name], high), low) for name in rows.ids])
    known = [batch.tensors() for batch in batches]
    if algorithm.kl_in == "reward" and kl_coef:
        kls = [estimate(each["old_logprobs"], each["ref_logprobs"], algorithm.kl_estimator) for each in known]
        rewards = rewards - kl_coef * rows.gather(kls)
    values, returns, metrics = rewards, rewards, dict[str, float]()
    if algorithm.has_critic:
        values = rows.gather([each["old_values"] for each in known])
        advantages, returns = gae(rewards, values, rows.mask, gamma=wanted.gamma, lam=wanted.gae_lambda)
    elif algorithm.has_teacher:
        drawn = [batch.loss_mask & ~batch.sampler_logprobs.isnan() for batch in batches]
        gaps = zip(known, drawn, strict=True)
        taught = [teacher_gap(each["old_logprobs"], each["teacher_logprobs"], mask) for each, mask in gaps]
        advantages, sampled = rows.gather(taught), rows.gather([mask.float() for mask in drawn]).bool()
        metrics["teacher_kl"] = -float(torch.cat(gather(advantages[sampled])).mean())
    else:
        advantages = rewards_to_go(rewards, rows.mask, gamma=wanted.gamma)
    if algorithm.whiten:
        advantages = whiten(advantages, rows.mask, over=torch.cat(gather(advantages[rows.mask])))
    parts = rows.scatter(advantages)
    if not algorithm.has_critic:
        return [replace(batch, advantages=part) for batch, part in zip(batches, parts, strict=True)], metrics
    targets = zip(batches, parts, rows.scatter(returns), strict=True)
    shaped = [replace(batch, advantages=part, returns=target) for batch, part, target in targets]
    values, returns = (torch.cat(gather(each[rows.mask])) for each in (values, returns))
    # How well the critic predicted the returns: 1 is perfect, 0 no better than a constant.
    variance = float(returns.var(correction=0))
    explained = 1 - float((returns - values).var(correction=0)) / variance if variance > 0 else 0.0
    means = {"value_mean": float(values.mean()), "return_mean": float(returns.mean())}
    return shaped, means | {"explained_variance": explained}


class _Trajectories:
    """A step's trained tokens, one row per trajectory ``(N, L)``, and the mapping back to its micro-batches."""

    def __init__(self, batches: Sequence[MicroBatch]) -> None:
        self._device = batches[0].loss_mask.device if batches else torch.device("cpu")
        self._masks = [batch.loss_mask.cpu() for batch in batches]
        self._pieces: dict[str, list[tuple[int, int]]] = {}
        places = {i: (n, row) for n, batch in enumerate(batches) for row, i in enumerate(batch.indices)}
        for _, (n, row) in sorted(places.items()):
            self._pieces.setdefault(batches[n].trajectory_ids[row], []).append((n, row))
        self.ids = list(self._pieces)
        self.mask = self.gather([mask.float() for mask in self._masks]).bool()

    def gather(self, tensors: Sequence[Tensor]) -> Tensor:
        """Micro-batches' ``(B, T)`` to ``(N, L)``, 0 after a row's end."""
        host = [tensor.cpu() for tensor in tensors]
        rows = [torch.cat([host[n][row][self._masks[n][row]] for n, row in pieces]) for pieces in self._pieces.values()]
        return pad_sequence(rows, batch_first=True) if rows else torch.zeros(0, 0)

    def scatter(self, trajectories: Tensor) -> list[Tensor]:
        """The inverse of ``gather``, on the micro-batches' device; 0 outside the loss mask."""
        parts = [trajectories.new_zeros(mask.shape) for mask in self._masks]
        places = [place for pieces in self._pieces.values() for place in pieces]
        lengths = [int(self._masks[n][row].sum()) for n, row in places]
        for (n, row), values in zip(places, trajectories[self.mask].split(lengths), strict=True):
            parts[n][row, self._masks[n][row]] = values
        return [part.to(self._device) for part in parts]
