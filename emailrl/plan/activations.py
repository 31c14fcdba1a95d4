"""What a forward pass holds for its backward, a token and layer at a time, and what the backward holds beside it.

Each term is a tensor of `policy/fused/layer.py`, or of transformers' and PEFT's modules;
`tests/plan/test_activations.py` counts the tensors that autograd really saves. ``w`` is the bytes of one number in the
base's type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from emailrl.policy.layout import CHUNK_ELEMENTS, Keep
from emailrl.policy.shape import Shape

Layers = Literal["fused", "transformers", "unsloth"]
WORKSPACES: Final = 2**27
"""cuBLAS's, 32 MiB a handle. The number of handles (two in each of autograd's two threads) was fitted to one peak."""
UNSLOTH: Final = 1.2
"""Unsloth's layer at work beside a fused one that keeps its input; fitted to two peaks. Its inputs lie in the host."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How batches run through the model."""

    layers: Layers
    itemsize: int
    rank: int
    targets: tuple[str, ...]
    """The projections with an adapter."""
    dropout: bool = False
    eager: bool = False
    """Attention with its whole matrix of scores."""
    on_gpu: bool = True
    fused_head: bool = True
    shares: bool = False
    """Whether what samples begin with alike is computed once."""


def kept_bytes(shape: Shape, layout: Layout, keep: Keep, longest: int = 0) -> int:
    """Bytes that one layer keeps of one token; ``longest`` is the longest sample, for eager attention alone."""
    own = shape.hidden * layout.itemsize
    if layout.layers == "unsloth":
        return 0
    if layout.layers == "transformers":
        return own if keep < Keep.ALL else _transformers_layer(shape, layout, longest)
    w, ranks = layout.itemsize, layout.rank * layout.itemsize
    count = own
    if keep >= Keep.ATTENTION:
        count += shape.queries * w + 4 * shape.heads  # attention's result and its log-sum-exp
    if keep >= Keep.HIDDEN:
        count += (shape.hidden + shape.queries + 2 * shape.keys) * w
        count += ranks * sum(name in layout.targets for name in ("q_proj", "k_proj", "v_proj"))
    if keep >= Keep.ALL:
        count += 2 * shape.ffn * w + ranks * sum(name in layout.targets for name in ("gate_proj", "up_proj"))
    return count


def work_bytes(shape: Shape, layout: Layout, keep: Keep, longest: int = 0) -> int:
    """Bytes a token that the backward pass of one layer holds beside what all layers keep."""
    if layout.layers == "transformers":
        again = 0 if keep == Keep.ALL else _transformers_layer(shape, layout, longest)
        # Fitted to one peak; by PEFT's way it is a wide gradient, its float32 copy and half a copy more.
        return again + (7 if layout.itemsize == 2 else 12) * shape.ffn
    keep = Keep.INPUT if layout.layers == "unsloth" else keep
    fused = Layout("fused", layout.itemsize, layout.rank, layout.targets)
    again = kept_bytes(shape, fused, Keep.ALL) - kept_bytes(shape, fused, keep)
    work = again + max(_attention_backward(shape, layout), (shape.hidden + shape.ffn) * layout.itemsize)
    return int(UNSLOTH * work) if layout.layers == "unsloth" else work


def _attention_backward(shape: Shape, layout: Layout) -> int:
    """Two gradients of hidden size, that of attention's result, rotated queries and keys, and FlashAttention's own.

    It makes gradients of queries, keys and values, those of the queries in float32 too, and keys' and values' once for
    each query head where heads share them. Gate and up are gone by then.
    """
    w = layout.itemsize
    shared = 2 * shape.queries * w if shape.heads != shape.kv_heads else 0
    return (2 * shape.hidden + 3 * shape.queries + 3 * shape.keys - 2 * shape.ffn) * w + 4 * shape.queries + shared


def _transformers_layer(shape: Shape, layout: Layout, longest: int) -> int:
    """All that autograd saves of one layer under PEFT, whose adapters are float32 and read float32 copies."""
    w = layout.itemsize
    count = 2 * (4 * shape.hidden + 4)  # the norms: float32 input and root
    if shape.head_norms:
        count += 4 * (shape.queries + shape.keys) + 4 * (shape.heads + shape.kv_heads)
    count += (2 * shape.queries + 2 * shape.keys) * w + 4 * shape.heads
    if layout.eager:
        count += longest * shape.heads * (4 + w)  # scores after the softmax, in float32 and as they are multiplied
    count += 3 * shape.ffn * w  # gate, its activation, up
    inputs = [shape.linears[name][0] for name in layout.targets]
    if layout.dropout:
        count += (5 if layout.on_gpu else 8) * sum(inputs)  # the dropped input and its mask, bool on a GPU
    elif w == 4:
        count += 4 * sum(_distinct_inputs(shape, layout.targets))  # nothing to convert: projections share their input
    else:
        count += 4 * sum(inputs)
    return count + 4 * layout.rank * len(layout.targets)


def _distinct_inputs(shape: Shape, targets: tuple[str, ...]) -> list[int]:
    groups = [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)]
    return [shape.linears[group[0]][0] for group in groups if set(group) & set(targets)]


def head_bytes(shape: Shape, layout: Layout, trained: int) -> int:
    """Bytes of the vocabulary's projection at its peak, for ``trained`` hidden states and a chunk of logits.

    The states are gathered, normed through float32 and get a gradient; the fused head makes logits and their
    gradient, the other float32 logits, probabilities and three more of their size.
    """
    chunk = min(CHUNK_ELEMENTS, trained * shape.vocab)
    per_logit = 2 * layout.itemsize if layout.fused_head else layout.itemsize + 20
    return trained * shape.hidden * (3 * layout.itemsize + 4) + chunk * per_logit
