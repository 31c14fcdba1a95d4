"""What each rank of ``test_shard.py`` runs: sharded policies against whole ones, on this rank's own batches."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from model.test_fused import scored, with_lora
from model.test_packing import TREE, grow, random_model
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from emailrl.model.fused import enable_fused
from emailrl.model.layout import Keep
from emailrl.model.load import load_policy
from emailrl.model.logprobs import token_logprobs
from emailrl.model.packing import enable_packing
from emailrl.model.shard import shard_base
from emailrl.settings import Settings

Numbers = dict[str, float]


def policy(mesh: DeviceMesh | None, *, tied: bool = False) -> Any:
    """A random model with a random adapter, its base frozen and, given a mesh, sharded."""
    peft = with_lora(random_model("Qwen3", head_dim=8, tie_word_embeddings=tied))
    for name, parameter in peft.named_parameters():
        parameter.requires_grad_("lora_" in name)
    if mesh is not None:
        shard_base(peft, mesh)
    return peft


def fused(keep: Keep) -> Callable[[Any], None]:
    def prepare(peft: Any) -> None:
        assert enable_packing(peft) is None and enable_fused(peft, "auto") is None
        peft.get_base_model().emailrl_fused.keep_for = lambda *given: keep

    return prepare


def checkpointed(peft: Any) -> None:
    assert enable_packing(peft) is None
    peft.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    peft.train()


CASES: dict[str, Callable[[Any], object]] = {
    "padded": lambda peft: None,
    "packed": enable_packing,
    "checkpointed": checkpointed,
    **{f"fused, keeping {keep.name}": fused(keep) for keep in Keep},
}


def compare(mesh: DeviceMesh, prepare: Callable[[Any], object], *, tied: bool = False) -> Numbers:
    """Largest relative differences of a sharded policy from a whole one, over two updates."""
    ids, mask, shared = grow(TREE, seed=dist.get_rank())  # every rank has a batch of its own
    sides = [policy(None, tied=tied), policy(mesh, tied=tied)]
    found: Numbers = {"logprobs": 0.0, "gradients": 0.0, "reference": 0.0, "weights": 0.0}
    for peft in sides:
        prepare(peft)
    optimizers = [torch.optim.AdamW([one for one in peft.parameters() if one.requires_grad]) for peft in sides]
    for _ in range(2):
        (logprobs, _, gradients), (again, _, other) = (scored(peft, ids, mask, shared) for peft in sides)
        assert gradients.keys() == other.keys() and len(gradients) == 2 * 2 * 7
        found["logprobs"] = max(found["logprobs"], gap(logprobs, again))
        found["gradients"] = max(found["gradients"], *(gap(gradients[name], other[name]) for name in gradients))
        for optimizer in optimizers:
            optimizer.step()
    with torch.no_grad(), sides[0].disable_adapter(), sides[1].disable_adapter():
        found["reference"] = gap(*(token_logprobs(peft, ids, mask).logprobs for peft in sides))
    weights, others = ([one.detach() for one in peft.parameters() if one.requires_grad] for peft in sides)
    assert not any(isinstance(one, DTensor) for one in others)
    found["weights"] = max(gap(one, other) for one, other in zip(weights, others, strict=True))
    return found


def gap(one: Tensor, other: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return float((one - other).abs().max() / one.abs().max())


def loaded(mesh: DeviceMesh, model: Path, out: Path) -> Numbers:
    """A model from files: its log-probabilities, and its adapter written by every rank."""
    sections = {"model": {"name": str(model), "shard": "host"}, "lora": {"lora_rank": 4}}
    served = {"agent": {"engine": "vllm"}, "vllm": {"vllm_urls": "http://localhost:1"}}
    settings = Settings.model_validate(sections | served)
    whole, sharded = (load_policy(settings, trainable=True, mesh=one) for one in (None, mesh))
    assert sharded.sharded and not whole.sharded
    ids, mask, _ = grow(TREE)
    expected, logprobs = (token_logprobs(one.model, ids, mask).logprobs.detach() for one in (whole, sharded))
    sharded.save_adapter(out / f"adapter-{dist.get_rank()}")
    return {"logprobs": gap(expected, logprobs)}


def share(peft: Any) -> float:
    """What this rank holds of the base without its head, which every rank has."""
    base = [one for name, one in peft.named_parameters() if not one.requires_grad and "lm_head" not in name]
    held = sum(one.to_local().numel() if isinstance(one, DTensor) else one.numel() for one in base)
    return held / sum(one.numel() for one in base)


def found(model: Path, out: Path) -> dict[str, Numbers]:
    """The differences of each case on this rank, and its share of the base; its adapter is written under ``out``."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    cases = {name: compare(mesh, prepare) for name, prepare in CASES.items()}
    cases["tied embeddings"] = compare(mesh, fused(Keep.INPUT), tied=True)
    cases["loaded"] = loaded(mesh, model, out)
    cases["held"] = {"share": share(policy(mesh))}
    dist.destroy_process_group()
    return cases
