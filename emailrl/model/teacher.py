"""The teacher of on-policy distillation in this process: the policy's base with another adapter or none, which costs no
second model, or another model with the same tokenizer, frozen beside it. (A server: ``engines.vllm.teacher``.)"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emailrl.base.errors import UsageError
from emailrl.checkpoints import CONFIG, WEIGHTS, sha256_of
from emailrl.model.logprobs import token_logprobs
from emailrl.model.lora import read_plain_lora
from emailrl.model.packing import enable_packing
from emailrl.model.policy import Policy, load_policy
from emailrl.model.resolve import find_adapter, resolve_model, same_base
from emailrl.settings import PolicySettings
from emailrl.settings.names import changed

Teacher = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From token ids and loss mask ``(B, T)``, and the number of tokens ``(B,)`` that a row shares with the one before, to
the log-probabilities ``(B, T)`` of the trained tokens at the temperature of training."""


def find_teacher(settings: PolicySettings) -> tuple[str, Path | None]:
    """The base model that TEACHER names, and its adapter if it is one; UsageError for neither."""
    folder = Path(os.path.expanduser(settings.training.teacher or ""))
    if folder.exists() and ((folder / CONFIG).is_file() or not (folder / "config.json").is_file()):
        found = find_adapter(folder, folder)
        return found.base_model, found.path
    return str(settings.training.teacher), None


def fingerprint(settings: PolicySettings) -> str:
    """What identifies the teacher's weights: a hash of their files, or the name of a model on the hub."""
    base, adapter = find_teacher(settings)
    place = adapter or resolve_model(base, settings.model.smol_base)
    if isinstance(place, str):
        return place
    hashes = [sha256_of(file) for file in sorted(place.glob(WEIGHTS if adapter else "*.safetensors"))]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def load_teacher(settings: PolicySettings, policy: Policy) -> Teacher:
    """The teacher that TEACHER names. Raises UsageError for another tokenizer than the policy's, or an adapter of its
    base on layers that the policy's own leaves out; EmailRLError for one that cannot be loaded."""
    base, adapter = find_teacher(settings)
    score = partial(_score, settings.agent.temperature)
    if same_base(base, policy.base_model):
        worn = policy.bare if adapter is None else partial(policy.adapted, fitted(policy, adapter))
        return partial(score, policy.model, worn)
    alone = changed(settings, model_name=base, backend="transformers", chat_template=None, shard="off")
    other = load_policy(alone, adapter=adapter)
    if differ := policy.tokenizer.get_vocab().items() ^ other.tokenizer.get_vocab().items():
        token, number = min(differ, key=lambda entry: entry[1])
        raise other_tokenizer(f"The teacher {settings.training.teacher}", f": only one has {token!a} as token {number}")
    if settings.training.packing:
        enable_packing(other.model)
    return partial(score, other.model, nullcontext)


def _score(
    temperature: float, model: Any, worn: Callable[[], Any], ids: Tensor, mask: Tensor, shared: Tensor
) -> Tensor:
    with torch.no_grad(), worn():
        return token_logprobs(model, ids, mask, temperature=temperature, shared=shared).logprobs


def fitted(policy: Policy, folder: Path) -> list[Tensor]:
    """The adapter in ``folder`` as weights for ``Policy.adapted``: of its rank, its scale in B, 0 where it has none."""
    theirs = read_plain_lora(folder, policy.model)
    weights, layers = list[Tensor](), set[str]()
    for name, own in policy.trainable_parameters():
        place, _, kind = name.partition(".lora_")
        layers.add(layer := place.removeprefix("base_model.model."))
        down, up = theirs.pairs.get(layer, (torch.zeros_like(own), torch.zeros_like(own)))
        scale = theirs.scale / policy.model.get_submodule(place).scaling["default"]
        weights.append((down if kind.startswith("A") else up.float() * scale).to(own))
    if left_out := sorted({layer.rpartition(".")[2] for layer in theirs.pairs.keys() - layers}):
        problem = f"The teacher {folder} adapts {', '.join(left_out)}, which the policy's adapter leaves out."
        raise UsageError(problem, "Set TARGET_MODULES=all-linear, or name its merged model (emailrl export).")
    return weights


def other_tokenizer(who: object, why: str = "") -> UsageError:
    """The error for a teacher that does not read the policy's tokens."""
    hint = "Distillation compares token by token: choose a teacher of the policy's own family."
    return UsageError(f"{who} has another tokenizer than the policy{why}.", hint)
