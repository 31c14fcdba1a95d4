"""The weights the in-process engine samples from, and forward passes over conversations: prefill new prompt tokens into
the cache, then sample one token for each; logits exist at sampled positions only. A token is the first whose cumulative
probability exceeds the request's next uniform number (inverse CDF), so the i-th token depends only on the request's
seed and logits, not on the rest of the batch. Small models get a separate copy with merged weights, which decodes
faster than base plus adapter: every version is W₀ + scale · B·A recomputed from the frozen W₀, so errors do not
accumulate. Large models are used directly, with the version's adapter active while sampling.

A model that only samples, on a CPU, is bound by reading its weights. There layers multiply by packed copies of them,
float32 ones by float16 ones, which hold bf16 exactly down to 2⁻¹⁷ and whose products are summed in float32; and
conversations guess their next tokens by prompt lookup (Saxena 2023,
https://github.com/apoorvumang/prompt-lookup-decoding), also among what was said before. A pass checks all guesses of a
conversation at once, and each token is still the one that its logits and uniform number choose."""

from __future__ import annotations

import copy
import time
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from emailrl.engines.base import Completion, Request, SamplingParams
from emailrl.engines.budget import BLOCK, PREFILL_TOKENS, blocks_of, merges
from emailrl.engines.local.cache import BlockCache, Filled, Table, causal_mask
from emailrl.model.fused import disable_fused
from emailrl.model.layout import LARGE_FROM
from emailrl.model.lora import PlainLora, causal_lm, read_plain_lora
from emailrl.model.policy import computes_bf16
from emailrl.model.shard import is_sharded

SAMPLER = "sampler"  # the adapter besides the trainer's
UNIFORMS_PER_DRAW = 64  # numbers drawn from a generator at a time; changing it changes the samples of every seed
AT_ONCE = {torch.float32: 6, torch.bfloat16: 12}  # tokens after which one more costs as much as it saves
ALIKE = 3  # most tokens that a guess's beginning has in common with the end of the conversation
SAID = 1024  # tokens of the latest completions that are kept for guesses
PASS_TOKENS = {"cpu": 48, "cuda": 4096}  # padding allowed per pass: this many tokens cost as much as one more pass


class MergedWeights:
    """A model that shares the frozen base's tensors, except those an adapter changes. If it reads several tokens
    ``at_once`` in about the time of one, its linear layers multiply by ``packed`` copies of them."""

    def __init__(self, base: nn.Module, *, at_once: int = 1) -> None:
        frozen = {id(tensor): tensor for tensor in (*base.parameters(), *base.buffers())}
        self.model: PreTrainedModel = copy.deepcopy(base, frozen)  # type: ignore[assignment]
        disable_fused(self.model)
        for name, module in list(self.model.named_modules()):
            module._forward_hooks.clear()  # gradient checkpointing hooks would require gradients here
            if isinstance(module, BaseTunerLayer):
                self.model.set_submodule(name, module.get_base_layer())
        self.model.eval()
        self._frozen: dict[str, Tensor] = {}
        self.at_once, self._packed = at_once, False

    def load(self, path: Path | None) -> None:
        """Compute the version's weights from the frozen ones in float32, rounded once."""
        frozen, merged = dict(self._frozen), {}
        if path is not None:
            lora = read_plain_lora(path, self.model)
            for name, (lora_a, lora_b) in lora.pairs.items():
                weight = frozen.setdefault(name, self.model.get_submodule(name).get_parameter("weight").detach())
                delta = lora.scale * (lora_b.to(weight.device).float() @ lora_a.to(weight.device).float())
                merged[name] = (weight.float() + delta).to(weight.dtype)
        self._frozen = frozen
        for name, weight in (frozen | merged).items():
            self.model.get_submodule(name).register_parameter("weight", nn.Parameter(weight, requires_grad=False))
        self._packed = False

    def active(self) -> AbstractContextManager[None]:
        if self.at_once > 1 and not self._packed:  # here, so that no version is packed that samples nothing
            for layer in (module for module in self.model.modules() if isinstance(module, nn.Linear)):
                vars(layer)["forward"] = packed(layer)  # instead of its class's
            self._packed = True
        return nullcontext()  # the engine owns the model


class SharedWeights:
    """The trainer's own model, with the version's adapter next to the one in training."""

    at_once = 1

    def __init__(self, model: nn.Module) -> None:
        self.model: PreTrainedModel = model  # type: ignore[assignment]
        self._bare = True

    def load(self, path: Path | None) -> None:
        """Load the version's adapter under a separate name; the trainer's is untouched."""
        if path is not None and not self._overwrite(read_plain_lora(path, self.model)):
            if isinstance(self.model, PeftModel):
                training = self.model.training  # PEFT switches to evaluation when it loads
                if SAMPLER in self.model.peft_config:
                    self.model.delete_adapter(SAMPLER)
                # On the CPU: else it loads on GPU 0, as in policy.load.
                self.model.load_adapter(str(path), adapter_name=SAMPLER, torch_device="cpu")
                self.model.train(training)
            else:
                wrapped = PeftModel.from_pretrained(self.model, str(path), adapter_name=SAMPLER, torch_device="cpu")
                self.model = wrapped  # type: ignore[assignment]
        self._bare = path is None

    def _overwrite(self, lora: PlainLora) -> bool:
        """Copy ``lora`` into the sampler's adapter, if the model has one of the same rank on the same layers. PEFT
        takes a second to build a new one, whatever its size: it makes and deletes hundreds of modules."""
        modules = ((name.removeprefix("base_model.model."), module) for name, module in self.model.named_modules())
        layers = {name: one for name, one in modules if isinstance(one, LoraLayer) and SAMPLER in one.lora_A}
        if layers.keys() != lora.pairs.keys() or any(one.r[SAMPLER] != lora.rank for one in layers.values()):
            return False
        with torch.no_grad():
            for name, (lora_a, lora_b) in lora.pairs.items():
                layers[name].lora_A[SAMPLER].get_parameter("weight").copy_(lora_a)
                layers[name].lora_B[SAMPLER].get_parameter("weight").copy_(lora_b)
                layers[name].scaling[SAMPLER] = lora.scale
        return True

    @contextmanager
    def active(self) -> Iterator[None]:
        """Switch to evaluation mode and the version's adapter; restore both afterwards."""
        model, training, own = self.model, self.model.training, None
        if training:  # thousands of modules, most often in evaluation mode already
            model.eval()
        try:
            if isinstance(model, PeftModel) and not self._bare:
                own = model.active_adapter
                model.set_adapter(SAMPLER, inference_mode=True)
            with model.disable_adapter() if isinstance(model, PeftModel) and self._bare else nullcontext():
                yield
        finally:
            if own is not None:
                model.set_adapter(own)
            if training:
                model.train()


Weights = MergedWeights | SharedWeights
"""A model with one version's weights, unchanged if ``load`` fails; in evaluation mode in the context ``active``."""


def sampling_weights(model: nn.Module, *, trains: bool = True) -> Weights:
    """Separate merged weights for a small model, packed if it never ``trains`` and its weights are read from memory;
    the model itself for a large, quantized or sharded one."""
    base = causal_lm(model)
    quantized = getattr(base, "quantization_method", None) is not None
    size = sum(parameter.numel() for parameter in base.parameters())
    if not merges(size, quantized=quantized) or is_sharded(base):
        return SharedWeights(model)
    if trains or size < LARGE_FROM or device_of(base).type != "cpu":
        return MergedWeights(base)
    kernels = {torch.float32: "fbgemm" in torch.backends.quantized.supported_engines, torch.bfloat16: computes_bf16()}
    return MergedWeights(base, at_once=AT_ONCE[base.dtype] if kernels.get(base.dtype) else 1)


def packed(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    """What ``layer`` computes, from a copy of its weights in the layout that a CPU multiplies."""
    if layer.weight.dtype == torch.float32:
        half = torch.ops.quantized.linear_prepack_fp16(layer.weight, layer.bias)
        return partial(torch.ops.quantized.linear_dynamic_fp16, W_prepack=half)
    weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight)
    return lambda states: torch.ops.mkldnn._linear_pointwise(states, weight, layer.bias, "none", [], "")


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def uniforms(seed: int) -> Iterator[float]:
    """An endless stream of uniform numbers in [0, 1 − 2⁻²⁴], determined by the seed."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.rand(UNIFORMS_PER_DRAW, generator=generator).tolist()


@dataclass(slots=True, eq=False)
class Conversation:
    """One trajectory in the engine: its tokens and how many of them are cached."""

    request: Request
    place: int = 0  # index of its first request in the call to ``generate``
    tokens: list[int] = field(init=False)  # prompt and sampled tokens; the model has not read the last one yet
    blocks: Table = field(default_factory=partial(array, "q"))  # its cache blocks, in order
    held: int = 0  # the first ``held`` tokens are cached in the blocks, once ``source`` has read that many
    source: Conversation | None = None  # the conversation that fills its shared prefix blocks
    logprobs: list[float] = field(default_factory=list)
    uniforms: Iterator[float] = field(init=False)
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_ids)
        self.uniforms = uniforms(self.request.seed)
        self.started = time.perf_counter()

    @property
    def unread(self) -> int:
        """Unread tokens before the last one, which the sampling step reads."""
        return len(self.tokens) - 1 - self.held

    def rewind(self) -> None:
        """Rewind the random stream after a failed step to the number of the next token."""
        drawn = len(self.logprobs) if self.request.sampling.temperature else 0
        self.uniforms = islice(uniforms(self.request.seed), drawn, None)

    def completion(self, finish_reason: str) -> Completion:
        known, seconds = len(self.request.prompt_ids), time.perf_counter() - self.started
        sampled = self.tokens[known:]
        return Completion(self.request.trajectory_id, sampled, self.logprobs, finish_reason, seconds, known)


class Schedule:
    """Every conversation that has blocks, or lost them and resumes when enough are free. One that ``keeps`` leaves the
    last conversation's blocks until the next begins, which may share them."""

    def __init__(self, cache: BlockCache, limit: int, *, keeps: bool) -> None:
        self.cache, self.limit, self.keeps = cache, limit, keeps  # at most ``limit`` concurrent conversations
        self.last: list[Conversation] = []
        self.running: list[Conversation] = []  # in arrival order
        self.paused: deque[Conversation] = deque()  # without blocks; they resume in order before new ones start

    def admit(self, conversation: Conversation) -> bool:
        """Run a conversation if its tokens fit with one spare block per running one; else pause it. It starts with the
        blocks of the conversation with the longest common prefix; of several, the first."""
        source = max(self.running + self.last, key=partial(blocks_alike, conversation), default=None)
        if source is not None and (same := blocks_alike(conversation, source)):
            self.cache.share(source.blocks[:same], conversation.blocks)
            conversation.held, conversation.source = same * BLOCK, source if self.running else None
        while self.last:
            self._forget(self.last.pop())
        if not self.running:  # alone, it ignores a limit lowered after an out-of-memory error
            self.cache.most = max(self.cache.most, blocks_of(len(conversation.tokens)))
        if not self.cache.extend(conversation.blocks, len(conversation.tokens), spare=len(self.running)):
            self._forget(conversation)
            self.paused.appendleft(conversation)
            return False
        self.running.append(conversation)
        return True

    def make_room(self) -> int:
        """Give every running conversation blocks for all its tokens; if too few are left, pause the latest ones.
        Returns how many were paused. The first always continues."""
        place = pauses = 0
        if self.running:
            self.cache.most = max(self.cache.most, blocks_of(len(self.running[0].tokens)))
        while place < len(self.running):
            if self.cache.extend(self.running[place].blocks, len(self.running[place].tokens)):
                place += 1
            else:
                self.pause()
                pauses += 1
        return pauses

    def pause(self) -> None:
        """Release the blocks of the latest running conversation; it resumes before all that wait."""
        conversation = self.running.pop()
        self._forget(conversation)
        self.paused.appendleft(conversation)

    def go_on(self, conversation: Conversation, next_turn: Conversation) -> None:
        """Replace a conversation by its next turn, in its blocks; if history changed, from the first that differs.
        Blocks are reused whole or not at all, because others may share them."""
        next_turn.held = conversation.held
        if next_turn.tokens[:-1][: conversation.held] != conversation.tokens[: conversation.held]:
            same = blocks_alike(next_turn, conversation)
            self.cache.release(conversation.blocks, keep=same)
            next_turn.held = same * BLOCK
        next_turn.blocks, conversation.blocks = conversation.blocks, array("q")
        self.running[self.running.index(conversation)] = next_turn

    def leave(self, conversation: Conversation) -> None:
        """Remove a conversation from the running ones, and free its blocks, or keep them for the next."""
        self.running.remove(conversation)
        if self.keeps and not self.running:
            self.last.append(conversation)
        else:
            self._forget(conversation)

    def clear(self) -> None:
        """Forget every conversation and free the cache, even after an interrupted step."""
        for conversations in (self.running, self.paused, self.last):
            conversations.clear()
        self.cache.free()

    def _forget(self, conversation: Conversation) -> None:
        self.cache.release(conversation.blocks)
        conversation.held, conversation.source = 0, None


def blocks_alike(new: Conversation, other: Conversation) -> int:
    """The number of another's blocks that a new conversation can share. Only whole blocks, which their owner no longer
    writes to once it has read its tokens."""
    most = min((len(new.tokens) - 1) // BLOCK, (len(other.tokens) - 1) // BLOCK, len(other.blocks))
    parts = (slice(start, start + BLOCK) for start in range(0, most * BLOCK, BLOCK))
    return next((number for number, part in enumerate(parts) if new.tokens[part] != other.tokens[part]), most)


class Passes:
    """Runs the model of ``weights`` over conversations whose tables in ``cache`` cover their tokens. ``max_model_len``
    bounds positions, ``max_pass_tokens`` (None: ``PREFILL_TOKENS``) the prompt tokens per pass."""

    def __init__(
        self,
        weights: Weights,
        cache: BlockCache,
        stop_ids: Collection[int],
        max_model_len: int,
        max_pass_tokens: int | None,
    ) -> None:
        self._weights, self._cache, self._stop_ids = weights, cache, stop_ids
        device = "cpu" if device_of(weights.model).type == "cpu" else "cuda"
        self._prefill_tokens = max_pass_tokens or PREFILL_TOKENS[device]
        self._pass_tokens = PASS_TOKENS[device]
        self._last_position = max_model_len - 1
        self._said = ""  # the latest completions, as of ``text_of``

    def remember(self, row: Conversation) -> None:
        """Let conversations guess from a completion that has ended: tool calls are alike."""
        self._said = (self._said + text_of(row.tokens[-len(row.logprobs) - ALIKE :]))[-SAID:]

    def read(self, running: Sequence[Conversation]) -> None:
        """Fill the cache with all tokens but the last, shared prefixes first."""
        unread = [each for each in running if each.unread]
        while unread:
            # Sources are running, and precede the conversations that share their blocks.
            ready = [each for each in unread if each.source is None or each.source.held >= each.held]
            unread = [each for each in unread if each not in ready]
            while ready:
                self.read_shortest(ready)
                ready = [each for each in ready if each.unread]
        for each in running:
            each.source = None  # it may end before the next read

    def read_shortest(self, unread: Sequence[Conversation]) -> None:
        rows, total = list[Conversation](), 0
        for row in sorted(unread, key=lambda row: row.unread):
            total += row.unread
            padded = (len(rows) + 1) * row.unread
            if rows and (padded > self._prefill_tokens or padded - total > self._pass_tokens):
                break
            rows.append(row)
        new = min(rows[-1].unread, self._prefill_tokens)
        rows.sort(key=lambda row: row.held)
        ids = [row.tokens[row.held :][: min(row.unread, new)] for row in rows]
        with suppress(Filled):
            inputs = self._inputs(rows, [piece + [0] * (new - len(piece)) for piece in ids], fills=True)
            self._weights.model.get_decoder()(**inputs)
        for row, piece in zip(rows, ids, strict=True):
            row.held += len(piece)

    def sample_next(self, running: Sequence[Conversation]) -> list[Conversation]:
        """Sample one token for every conversation, and those after it that were guessed right; returns them, the
        shortest first."""
        rows = sorted(running, key=lambda row: row.held)
        if not rows:  # no prompt fitted
            return []
        guesses = [self._guess(row, len(rows)) for row in rows]
        new = 1 + max(map(len, guesses))
        read = [row.tokens[-1:] + guess for row, guess in zip(rows, guesses, strict=True)]
        ids = [tokens + [0] * (new - len(tokens)) for tokens in read]
        inputs = self._inputs(rows, ids, fills=False)
        logits: Tensor = self._weights.model(**inputs, logits_to_keep=new).logits
        right = list(range(len(rows)))  # the rows whose guesses were right so far
        for place in range(new):
            at = logits[:, place] if len(right) == len(rows) else logits[right, place]
            chosen = [rows[row] for row in right]
            tokens, logprobs = sample(at, [row.request.sampling for row in chosen], [row.uniforms for row in chosen])
            for row, token, logprob in zip(chosen, tokens, logprobs, strict=True):
                row.held += 1
                row.tokens.append(token)
                row.logprobs.append(logprob)
            right = [row for row, one in zip(right, tokens, strict=True) if read[row][place + 1 : place + 2] == [one]]
            if not right:
                break
        return rows

    def _guess(self, row: Conversation, rows: int) -> list[int]:
        """What followed where the conversation or an earlier completion last had its latest tokens, up to a stop token;
        nothing if the model would take longer over more tokens, or no block is free for them."""
        most = min(self._weights.at_once // rows, row.request.sampling.max_tokens - len(row.logprobs)) - 1
        most = min(most, self._last_position - len(row.tokens))
        if most < 1:
            return []
        guess = looked_up(self._said + text_of(row.tokens), most)
        stop = next((place for place, token in enumerate(guess) if token in self._stop_ids), len(guess))
        fits = self._cache.extend(row.blocks, len(row.tokens) + stop, spare=rows)
        return guess[:stop] if fits else []

    def _inputs(self, rows: Sequence[Conversation], ids: list[list[int]], *, fills: bool) -> dict[str, Any]:
        """Place a pass over new tokens, shortest conversation first, in the cache; returns the model's arguments."""
        device = device_of(self._weights.model)
        starts = [row.held for row in rows]
        positions = self._cache.place([row.blocks for row in rows], starts, len(ids[0]), device, fills=fills)
        return {
            "input_ids": torch.tensor(ids, device=device),
            "attention_mask": causal_mask(positions, self._cache.window, self._weights.model.dtype),
            "position_ids": positions.clamp(max=self._last_position),  # padding may exceed it
            "past_key_values": self._cache,
            "use_cache": True,
        }


def text_of(tokens: Sequence[int]) -> str:
    """A character for each token, for fast search."""
    return "".join(map(chr, tokens))


def looked_up(text: str, most: int) -> list[int]:
    """At most ``most`` tokens that followed the latest earlier occurrence of the last ``ALIKE`` ones, else of fewer."""
    for alike in range(ALIKE, 0, -1):
        if (start := text.rfind(text[-alike:], 0, -1)) >= 0:
            return [ord(token) for token in text[start + alike :][:most]]
    return []


def sample(
    logits: Tensor, sampling: Sequence[SamplingParams], uniforms: Sequence[Iterator[float]]
) -> tuple[list[int], list[float]]:
    """One token per row of ``logits`` (rows, vocabulary), and its log-probability. Log-probabilities are natural,
    float32, after temperature and before top-p / top-k; at temperature 0 the token is the first of the most likely ones
    and its log-probability that of the untempered distribution."""
    logits = logits.float()
    greedy = [params.temperature == 0 for params in sampling]
    temperatures = [params.temperature or 1.0 for params in sampling]
    if any(temperature != 1 for temperature in temperatures):
        logits = logits / logits.new_tensor(temperatures)[:, None]
    logprobs = logits.log_softmax(-1)
    best = logprobs.argmax(-1)
    if all(greedy):
        tokens = best
    else:
        draws = [0.0 if chosen else next(row) for chosen, row in zip(greedy, uniforms, strict=True)]
        # Float64: a float32 sum over 150,000 words loses the rare ones, and u · total must stay below the total.
        cdf = _filtered(logprobs.exp(), sampling).double().cumsum(-1)
        targets = cdf.new_tensor(draws)[:, None] * cdf[:, -1:]
        drawn = torch.searchsorted(cdf, targets, right=True)[:, 0]
        tokens = torch.where(torch.tensor(greedy, device=best.device), best, drawn)
    return tokens.tolist(), logprobs.gather(1, tokens[:, None])[:, 0].tolist()


def _filtered(probs: Tensor, sampling: Sequence[SamplingParams]) -> Tensor:
    """Zero the probabilities outside each row's top-k, then outside the nucleus of the rest."""
    rows = [row for row, params in enumerate(sampling) if params.temperature and (params.top_k or params.top_p < 1)]
    if not rows:
        return probs
    vocabulary = probs.shape[-1]
    ordered, order = probs[rows].sort(dim=-1, descending=True, stable=True)
    top_k = torch.tensor([sampling[row].top_k or vocabulary for row in rows], device=probs.device)
    # In float32, 1e-50 would be 0 and no token the first.
    top_p = torch.tensor([sampling[row].top_p for row in rows], dtype=torch.float64, device=probs.device)
    kept = ordered * (torch.arange(vocabulary, device=probs.device) < top_k[:, None])
    # A token stays while the mass before it is below top_p: the one that crosses the line is the last kept.
    before = kept.double().cumsum(-1) - kept
    kept = kept * (before < top_p[:, None] * kept.sum(-1, keepdim=True, dtype=torch.float64))
    probs = probs.clone()
    probs[rows] = torch.zeros_like(ordered).scatter(1, order, kept)
    return probs
