"""Activation memory per token and layer: what the forward pass saves, and what the backward pass adds.

Each term is a tensor of `policy/fused/layer.py`, or of transformers' and PEFT's modules;
`tests/plan/test_activations.py` counts the tensors that autograd actually saves. ``w`` is the number of bytes per
number in the base's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from emailrl.policy.layout import CHUNK_ELEMENTS, Keep
from emailrl.policy.shape import Shape

Layers = Literal["fused", "transformers", "unsloth"]
WORKSPACES: Final = 2**27
"""cuBLAS workspaces, 32 MiB per handle; two handles in each of autograd's two threads, fitted to one peak."""
UNSLOTH: Final = 1.2
"""Active Unsloth layer relative to a fused one that keeps its input; fitted to two peaks. Inputs are in host memory."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the model processes batches."""

    layers: Layers
    itemsize: int
    rank: int
    targets: tuple[str, ...]
    """The projections with an adapter."""
    dropout: bool = False
    eager: bool = False
    """Attention that materializes the full score matrix."""
    on_gpu: bool = True
    fused_head: bool = True
    shares: bool = False
    """Whether common prefixes are computed once."""


def kept_bytes(shape: Shape, layout: Layout, keep: Keep, longest: int = 0) -> int:
    """Bytes that one layer keeps per token; ``longest`` is the longest sample, used only for eager attention."""
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
    """Bytes per token that the backward pass of one layer holds in addition to what all layers keep."""
    if layout.layers == "transformers":
        again = 0 if keep == Keep.ALL else _transformers_layer(shape, layout, longest)
        # Fitted to one peak; with PEFT it is a wide gradient, its float32 copy and another half copy.
        return again + (7 if layout.itemsize == 2 else 12) * shape.ffn
    keep = Keep.INPUT if layout.layers == "unsloth" else keep
    fused = Layout("fused", layout.itemsize, layout.rank, layout.targets)
    again = kept_bytes(shape, fused, Keep.ALL) - kept_bytes(shape, fused, keep)
    work = again + max(_attention_backward(shape, layout), (shape.hidden + shape.ffn) * layout.itemsize)
    return int(UNSLOTH * work) if layout.layers == "unsloth" else work


def _attention_backward(shape: Shape, layout: Layout) -> int:
    """Two gradients of hidden size, one of attention's output, rotated queries and keys, and FlashAttention's buffers.

    These are gradients of queries (also in float32), keys and values; with grouped heads, those of keys and values are
    expanded to one per query head. Gate and up are freed by then.
    """
    w = layout.itemsize
    shared = 2 * shape.queries * w if shape.heads != shape.kv_heads else 0
    return (2 * shape.hidden + 3 * shape.queries + 3 * shape.keys - 2 * shape.ffn) * w + 4 * shape.queries + shared


def _transformers_layer(shape: Shape, layout: Layout, longest: int) -> int:
    """Everything autograd saves of one layer under PEFT, whose float32 adapters read float32 copies of their inputs."""
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
    """Peak bytes of the vocabulary projection, for ``trained`` hidden states and a chunk of logits.

    The states are gathered, normalized in float32 and get a gradient; the fused head allocates logits and their
    gradient, the unfused one float32 logits, probabilities and three more tensors of that size.
    """
    chunk = min(CHUNK_ELEMENTS, trained * shape.vocab)
    per_logit = 2 * layout.itemsize if layout.fused_head else layout.itemsize + 20
    return trained * shape.hidden * (3 * layout.itemsize + 4) + chunk * per_logit
