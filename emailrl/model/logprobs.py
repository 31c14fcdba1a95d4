"""Log-probabilities of given tokens, without computing logits of untrained tokens: only hidden states at positions that
predict a trainable token, a quarter of an agent's trajectory, reach the vocabulary projection, in chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from emailrl.base.errors import EmailRLError
from emailrl.model.fused import fused, fused_backbone, log_softmax_at
from emailrl.model.layout import CHUNK_ELEMENTS
from emailrl.model.lora import backbone, causal_lm
from emailrl.model.packing import pack, packed_inputs, takes_packed


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """``logprobs[b, t]`` belongs to ``token_ids[b, t]``; both tensors are ``(B, T)``, 0 outside the mask."""

    logprobs: Tensor  # natural logarithm, after temperature, before top-p / top-k; float32 (float64 for such a model)
    entropy: Tensor | None  # of the distribution each token was drawn from, in nats
    values: Tensor | None = None  # the critic's value estimate just before each token is sampled


def token_logprobs(
    model: Any,
    token_ids: Tensor,
    loss_mask: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    entropy_grad: bool = False,
    value_head: Callable[[Tensor], Tensor] | None = None,
    shared: Tensor | None = None,
) -> TokenLogprobs:
    """Score the tokens of right-padded ``token_ids`` ``(B, T)`` where ``loss_mask`` ``(B, T)`` says so. Padding needs
    no attention mask: it is on the right, and a causal model only attends left. ``temperature`` 0 (greedy sampling)
    scores the untempered distribution. ``entropy`` carries a gradient only with ``entropy_grad``. ``value_head`` maps
    hidden states ``(P, hidden)`` to values ``(P,)``: it reads the state that predicts the token. ``shared`` ``(B,)``:
    how many leading tokens a row shares with the previous row (0 in the first); a model with packed rows computes them
    once. Raises ValueError if the mask has the first token of a row, which nothing predicts."""
    trainable, layers = loss_mask.bool(), fused_backbone(model)
    if trainable[:, :1].any():
        raise ValueError("the first token of a sequence has no log-probability: take it out of the loss_mask")
    rows, columns = trainable.nonzero(as_tuple=True)
    if not trainable.any() or (layers is None and (len(token_ids) == 1 or not takes_packed(model))):
        hidden = hidden_states(model, token_ids)[rows, columns - 1]
    else:
        packed = pack(token_ids, trainable, shared)
        if layers is None:
            hidden = backbone(model)(**packed_inputs(packed)).last_hidden_state[0][packed.gather]
        else:
            hidden = layers.run(packed)
    labels, tau = token_ids[rows, columns], temperature if temperature > 0 else 1.0
    head, config = output_embeddings(model), causal_lm(model).config.get_text_config()
    # Whether logits are the hidden states times a frozen matrix, and nothing else.
    plain = type(head) is torch.nn.Linear and head.bias is None and not head.weight.requires_grad
    bent = any(getattr(config, name, None) for name in ("logit_scale", "logits_scaling", "final_logit_softcapping"))
    if layers is None or entropy_grad or bent or not plain:
        flat, flat_entropy = _projected(model, hidden, labels, tau, entropy, entropy_grad)
    else:
        flat, flat_entropy = FrozenHead.apply(hidden, head.weight, labels, tau)

    def spread(values: Tensor) -> Tensor:
        return values.new_zeros(token_ids.shape).index_put((rows, columns), values)

    values = None if value_head is None else spread(value_head(hidden))
    return TokenLogprobs(spread(flat), spread(flat_entropy) if entropy else None, values)


def _projected(
    model: Any, hidden: Tensor, labels: Tensor, tau: float, entropy: bool, entropy_grad: bool
) -> tuple[Tensor, Tensor]:
    """Score ``labels`` ``(P,)`` in chunks; the entropies are empty unless requested."""
    project = projection(model)

    def score(hidden_chunk: Tensor, label_chunk: Tensor) -> tuple[Tensor, Tensor]:
        logits = project(hidden_chunk)
        logits = logits if tau == 1.0 else logits / tau
        log_norm = logits.logsumexp(-1)
        logprobs = logits.gather(-1, label_chunk[:, None])[:, 0] - log_norm
        if not entropy:
            return logprobs, logprobs.new_empty(0)
        with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
            probabilities = (logits - log_norm[:, None]).exp()
            return logprobs, log_norm - (probabilities * logits).sum(-1)

    chunk = max(CHUNK_ELEMENTS // len(output_embeddings(model).weight), 1)
    if len(labels) <= chunk:
        return score(hidden, labels)
    parts = [slice(start, start + chunk) for start in range(0, len(labels), chunk)]
    scored = [checkpoint(score, hidden[part], labels[part], use_reentrant=False) for part in parts]
    flat, flat_entropy = (torch.cat(each) for each in zip(*scored, strict=True))
    return flat, flat_entropy


def hidden_states(model: Any, token_ids: Tensor) -> Tensor:
    """Run the model without its vocabulary projection: ``(B, T)`` ids to ``(B, T, hidden)`` after the final norm."""
    return backbone(model)(input_ids=token_ids, use_cache=False).last_hidden_state


def projection(model: Any) -> Callable[[Tensor], Tensor]:
    """Return the map from final hidden states to logits: the model's own output embedding, logit scale and soft cap."""
    head = output_embeddings(model)
    config = causal_lm(model).config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)

    def project(hidden: Tensor) -> Tensor:
        logits: Tensor = head(hidden)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if scale != 1.0:
            logits = logits * scale
        return torch.tanh(logits / cap) * cap if cap else logits

    return project


def output_embeddings(model: Any) -> Any:
    """Return the layer that maps hidden states to the vocabulary; raises EmailRLError for a model without one."""
    head = causal_lm(model).get_output_embeddings()
    if head is None:
        raise EmailRLError(f"{type(model).__name__} has no output embedding.", "Choose a causal language model.")
    return head


@torch.no_grad()
def check_projection(model: Any) -> None:
    """Compare ``projection`` of the hidden states with the model's own logits on a few tokens. Raises EmailRLError if
    the model computes its logits differently: training it would be wrong."""
    was_training = model.training
    model.eval()
    head = output_embeddings(model)
    token_ids = torch.arange(1, 5, device=head.weight.device)[None] % head.weight.shape[0]
    own = model(input_ids=token_ids, use_cache=False).logits.float()
    ours = projection(model)(hidden_states(model, token_ids)).float()
    model.train(was_training)
    tolerance = 1e-4 if head.weight.dtype in (torch.float32, torch.float64) else 0.1
    if own.shape != ours.shape or (own - ours).abs().max() > tolerance * own.abs().max().clamp(min=1.0):
        what = f"{type(causal_lm(model)).__name__} computes its logits in a way emailrl does not support."
        raise EmailRLError(what, "Choose another base model (Qwen, Llama, Mistral and Gemma work).")


class FrozenHead(torch.autograd.Function):
    """Log-probabilities of ``labels`` ``(P,)`` and entropies (no gradient) from ``hidden`` ``(P, hidden)`` by the
    frozen output embedding ``weight`` ``(vocabulary, hidden)``, in two matrix products instead of three. The
    log-probability of a token is one number, so its gradient by the hidden state is a vector fixed in the forward pass,
    scaled in the backward. It is computed while a chunk's logits exist; none are kept or computed twice."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        needed = ctx.needs_input_grad[0]
        slopes = torch.empty_like(hidden) if needed else None
        logprobs, entropies = [], []
        chunk = max(CHUNK_ELEMENTS // len(weight), 1)
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            logprob, entropy, by_logits = fused(log_softmax_at, hidden[part] @ weight.T, labels[part], temperature)
            logprobs.append(logprob)
            entropies.append(entropy)
            if slopes is not None:
                torch.mm(by_logits, weight, out=slopes[part])
        if slopes is not None:
            ctx.save_for_backward(slopes)
        entropy = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy)
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (slopes,) = ctx.saved_tensors
        return slopes * grads[0][:, None].to(slopes.dtype), None, None, None
