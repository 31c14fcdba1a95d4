"""A sharded base against a whole one, in two and three forked processes, and the settings that cannot be sharded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks.processes import in_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from emailrl.base.errors import UsageError
from emailrl.model.fused import enable_fused
from emailrl.model.layout import Keep, shards_base
from emailrl.model.logprobs import token_logprobs
from emailrl.model.packing import enable_packing
from emailrl.model.policy import load_policy
from emailrl.model.shard import check_shardable, shard_base
from emailrl.settings import ModelSettings, Settings
from tests.model.test_fused import scored, with_lora
from tests.model.test_packing import TREE, grow, random_model

SERVED = {"agent": {"engine": "vllm"}, "vllm": {"vllm_urls": "http://gpu1:8000"}}
Numbers = dict[str, float]


def policy(mesh: DeviceMesh | None, *, tied: bool = False) -> Any:
    """A random model with a random adapter, its base frozen and, given a mesh, sharded."""
    peft = with_lora(random_model("Qwen3", head_dim=8, tie_word_embeddings=tied))
    for name, parameter in peft.named_parameters():
        parameter.requires_grad_("lora_" in name)
    if mesh is not None:
        shard_base(peft, mesh)
    return peft


def fused(peft: Any, keep: Keep) -> None:
    assert enable_packing(peft) is None and enable_fused(peft, "auto") is None
    peft.get_base_model().emailrl_fused.keep_for = lambda *given: keep


def checkpointed(peft: Any) -> None:
    assert enable_packing(peft) is None
    peft.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    peft.train()


CASES: dict[str, Callable[[Any], object]] = {
    "padded": lambda peft: None,
    "packed": enable_packing,
    "checkpointed": checkpointed,
    **{f"fused, keeping {keep.name}": partial(fused, keep=keep) for keep in Keep},
}


def gap(one: Tensor, other: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return float((one - other).abs().max() / one.abs().max())


def compare(mesh: DeviceMesh, prepare: Callable[[Any], object], *, tied: bool = False) -> Numbers:
    """Largest relative differences of a sharded policy from a whole one, over two updates."""
    ids, mask, shared = grow(TREE, seed=dist.get_rank())  # every rank has a batch of its own
    sides = [policy(None, tied=tied), policy(mesh, tied=tied)]
    found: Numbers = {"logprobs": 0.0, "gradients": 0.0}
    for peft in sides:
        prepare(peft)
    trained = [[one for one in peft.parameters() if one.requires_grad] for peft in sides]
    optimizers = [torch.optim.AdamW(parameters) for parameters in trained]
    for _ in range(2):
        (logprobs, _, gradients), (again, _, other) = (scored(peft, ids, mask, shared) for peft in sides)
        assert gradients.keys() == other.keys() and len(gradients) == 2 * 2 * 7
        found["logprobs"] = max(found["logprobs"], gap(logprobs, again))
        found["gradients"] = max(found["gradients"], *(gap(gradients[name], other[name]) for name in gradients))
        for optimizer in optimizers:
            optimizer.step()
    with torch.no_grad(), sides[0].disable_adapter(), sides[1].disable_adapter():
        found["reference"] = gap(*(token_logprobs(peft, ids, mask).logprobs for peft in sides))
    assert not any(isinstance(one, DTensor) for one in trained[1])
    found["weights"] = max(gap(one.detach(), other.detach()) for one, other in zip(*trained, strict=True))
    return found


def loaded(mesh: DeviceMesh, model: Path, out: Path) -> Numbers:
    """A model from files: its log-probabilities, and its adapter written by every rank."""
    sections = {"model": {"name": str(model), "shard": "host"}, "lora": {"lora_rank": 4}}
    settings = Settings.model_validate(sections | SERVED)
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


def measured(model: Path, out: Path) -> tuple[dict[str, Numbers], float]:
    """The differences of each case on this rank, and its share of the base; its adapter is written under ``out``."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    kinds = CASES if dist.get_world_size() == 2 else {"packed": enable_packing}
    cases = {name: compare(mesh, prepare) for name, prepare in kinds.items()}
    cases["tied embeddings"] = compare(mesh, partial(fused, keep=Keep.INPUT), tied=True)
    cases["loaded"] = loaded(mesh, model, out)
    held = share(policy(mesh))
    dist.destroy_process_group()
    return cases, held


@pytest.mark.parametrize("world", [2, 3])
def test_gradients_and_weights_are_those_of_the_whole_base(world: int, tiny_model: Path, tmp_path: Path) -> None:
    for cases, held in in_ranks(world, partial(measured, tiny_model, tmp_path), tmp_path, seconds=300):
        gaps = {(case, name): gap for case, numbers in cases.items() for name, gap in numbers.items()}
        assert len(cases) == (9 if world == 2 else 3) and max(gaps.values()) <= 1e-5, gaps
        assert held <= 1 / world + 0.05  # all but the final norm is sharded; three divide no row count of this model


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"load_in_4bit": True}}, "SHARD does not work with LOAD_IN_4BIT"),
        ({"model": {"backend": "unsloth"}}, "SHARD does not work with BACKEND=unsloth"),
        ({"agent": {"engine": "transformers"}}, "transformers engine cannot sample"),
        ({"vllm": {"vllm_urls": ""}}, "In-process vLLM needs the whole base"),
    ],
)
def test_what_cannot_be_sharded_is_refused(sections: dict[str, Any], message: str) -> None:
    for given, refusal in ((sections, pytest.raises(UsageError, match=message)), ({}, nullcontext())):
        settings = Settings.model_validate(SERVED | given)
        with refusal:
            check_shardable(settings.model, settings.agent, settings.vllm)


@pytest.mark.parametrize(
    ("model", "gigabytes", "cards", "expected"),
    [
        ({}, 57, 2, True),  # more than 0.7 of 80
        ({}, 55, 2, False),
        ({}, 65, 1, False),  # nothing to share it with
        ({"load_in_4bit": True}, 65, 2, False),
        ({"backend": "unsloth"}, 65, 2, False),
        ({"shard": "off"}, 65, 2, False),
        ({"shard": "host"}, 1, 2, True),
    ],
)
def test_auto_shards_what_is_too_large_for_a_card(
    model: dict[str, Any], gigabytes: int, cards: int, expected: bool
) -> None:
    weight_bytes = gigabytes * 10**9
    assert shards_base(ModelSettings(**model), weight_bytes=weight_bytes, card_bytes=80e9, cards=cards) is expected
