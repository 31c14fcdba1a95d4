"""On-policy distillation: advantages by hand, gradients from the full logits, every kind of teacher, and refusals."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines.vllm_stub import VllmStub
from tiny import make_model
from torch import tensor
from training.updaters import PAID, Make, assert_gradients, gradients, loaded, make_updater, plain_logprobs, samples
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.model.policy import Policy, load_policy
from emailrl.settings import AlgorithmSettings
from emailrl.training.advantages import teacher_gap
from emailrl.training.algorithms import ALGORITHMS
from emailrl.training.batch import Layout, TrainingSample, micro_batches, shape_advantages
from emailrl.training.update import Updater

OPD = ALGORITHMS["opd"]


def test_the_advantage_is_the_teachers_logprob_less_the_policys() -> None:
    own, teachers = tensor([[-1.0, -2.0, math.nan, -0.5, -30.0]]), tensor([[-0.5, -2.75, -1.0, math.inf, -1.0]])
    gaps = teacher_gap(own, teachers, tensor([[1, 1, 0, 0, 1]]))
    assert gaps.tolist() == [[0.5, -0.75, 0.0, 0.0, 10.0]]  # clamped
    assert teacher_gap(own, own, tensor([[1, 1, 0, 1, 1]])).tolist() == [[0.0] * 5]


def test_a_step_by_hand() -> None:
    """In rollout mode the tool's tokens are trained, but the policy did not draw them: they have no advantage."""
    made = [
        TrainingSample("a", "g", [7] * 5, [0, 1, 1, 0, 1], [None, -1.0, None, None, -1.0]),
        TrainingSample("b", "g", [7] * 2, [0, 1], [None, -2.0]),
    ]
    (batch,) = micro_batches(made, Layout(99))
    old = tensor([[9.0, -1.0, -3.0, 9.0, -2.0], [9.0, -1.5, 9.0, 9.0, 9.0]])
    theirs = tensor([[9.0, -0.25, -1.0, 9.0, -3.0], [9.0, -1.5, 9.0, 9.0, 9.0]])
    rows = [*batch.indices]
    batch = replace(batch, old_logprobs=old[rows], teacher_logprobs=theirs[rows])
    (shaped,), metrics = shape_advantages([batch], {"a": 5.0, "b": -5.0}, OPD, AlgorithmSettings(), kl_coef=0.0)
    assert shaped.advantages is not None and rows == [0, 1]
    assert shaped.advantages.tolist() == [[0.0, 0.75, 0.0, 0.0, -1.0], [0.0] * 5]
    assert metrics == {"teacher_kl": pytest.approx((-0.75 + 1.0 + 0.0) / 3)}


def save_adapter(model: Path, folder: Path, *, seed: int = 11, **changes: Any) -> Policy:
    """A teacher's adapter with a rank, a scale and targets of its own; the policy that it makes."""
    settings = loaded(model, **changes)
    policy = load_policy(settings, trainable=True)
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in policy.trainable_parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    policy.save_adapter(folder)
    return load_policy(settings, adapter=folder)


def expected_loss(updater: Updater, teacher: Policy) -> torch.Tensor:
    """-(log p_teacher - log p) log p, the mean over trained tokens, from the full logits of each row alone."""
    rows = []
    for sample in samples():
        logprobs = plain_logprobs(updater.policy, sample)
        rows.append(-(plain_logprobs(teacher, sample).detach() - logprobs.detach()) * logprobs)
    return torch.cat(rows).mean()


@pytest.mark.parametrize("kind", ["adapter", "model", "model and adapter"])
def test_the_gradient_with_each_kind_of_teacher(kind: str, make: Make, tiny_model: Path, tmp_path: Path) -> None:
    folder, base = tmp_path / "teacher", tiny_model
    if kind != "adapter":
        base = tmp_path / "other"
        AutoTokenizer.from_pretrained(tiny_model).save_pretrained(base)
        torch.manual_seed(2)
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_model, hidden_size=16)).save_pretrained(base)
    if kind == "model":
        teacher, named = load_policy(loaded(base)), base
    else:
        teacher, named = save_adapter(base, folder, lora_rank=3, lora_alpha=9, target_modules="q_proj,up_proj"), folder
    updater = make(algorithm="opd", teacher=str(named), max_tokens_per_micro_batch=30)
    gaps = [(plain_logprobs(updater.policy, one) - plain_logprobs(teacher, one)).detach() for one in samples()]
    own = [value.clone() for value in updater.parameters]
    metrics = assert_gradients(updater, expected_loss(updater, teacher))
    assert metrics["teacher_kl"] == pytest.approx(float(torch.cat(gaps).mean()), abs=1e-5)
    assert [value.shape for value in updater.parameters] == [value.shape for value in own]
    for step in range(2, 12):  # the policy comes nearer
        rows = updater.train(samples(), PAID, step=step).tokens
    assert sum(abs(gap) for row in rows for gap in row.advantages) < 0.7 * float(torch.cat(gaps).abs().sum())


def test_a_teacher_like_the_policy_moves_nothing(make: Make, tmp_path: Path) -> None:
    make().policy.save_adapter(tmp_path)
    updater = make(algorithm="opd", teacher=str(tmp_path))
    before = [parameter.detach().clone() for parameter in updater.parameters]
    result = updater.train(samples(), PAID, step=1)
    assert result.metrics["teacher_kl"] == 0 and all(not any(row.advantages) for row in result.tokens)
    assert all(float(part.abs().max()) == 0 for part in gradients(updater))
    assert all(map(torch.equal, before, updater.parameters))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


@pytest.fixture
def stub(model: Path) -> Iterator[VllmStub]:
    server = VllmStub(load_policy(loaded(model)))
    yield server
    server.close()


SERVED: dict[str, Any] = {"algorithm": "opd", "temperature": 1.0, "vllm_retries": 0, "max_tokens_per_micro_batch": 30}


def test_a_servers_prompt_logprobs_are_those_of_the_same_model_here(stub: VllmStub, model: Path) -> None:
    served, here = make_updater(model, teacher=stub.url, **SERVED), make_updater(model, **SERVED)
    results = [updater.train(samples(), PAID, step=1) for updater in (served, here)]
    assert results[0].metrics == pytest.approx(results[1].metrics, abs=1e-5)
    for mine, other in zip(results[0].tokens, results[1].tokens, strict=True):
        assert mine.advantages == pytest.approx(other.advantages, abs=1e-5) and any(mine.advantages)
    assert {"/tokenize", "/v1/completions"} <= {*stub.calls}


def test_a_server_that_is_no_teacher(stub: VllmStub, model: Path, tmp_path: Path) -> None:
    updater = make_updater(model, teacher=stub.url, **SERVED)
    made = samples()[:1]
    whole, last = stub.model.read(None, made[0].token_ids), str(made[0].token_ids[-1])
    for rows in (None, whole[:-1], [None, *whole[2:], whole[1]], [*whole[:-1], {last: {"logprob": 0.5}}]):
        stub.failures = [(200, {"choices": [{"prompt_logprobs": rows}]})]
        with pytest.raises(EmailRLError, match="The vLLM server http"):
            updater.train(made, PAID, step=1)
    stub.failures = [(500, {})]
    with pytest.raises(EmailRLError, match="The teacher at http"):
        updater.train(made, PAID, step=1)
    stub.tokenizer = load_policy(loaded(make_model(tmp_path / "other", texts=["quite other words"] * 9))).tokenizer
    with pytest.raises(UsageError, match="has another tokenizer than the policy"):
        make_updater(model, teacher=stub.url, **SERVED)


def test_a_teacher_that_does_not_fit_is_refused(make: Make, tiny_model: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", texts=["quite other words, and more of them"] * 9)
    with pytest.raises(UsageError, match="has another tokenizer than the policy"):
        make(algorithm="opd", teacher=str(other))
    save_adapter(tiny_model, tmp_path / "wide")
    with pytest.raises(UsageError, match="adapts down_proj, gate_proj, k_proj, o_proj, up_proj, v_proj, which"):
        make(algorithm="opd", teacher=str(tmp_path / "wide"), target_modules="q_proj")
    with pytest.raises(UsageError, match="neither a folder nor a hub name"):
        make(algorithm="opd", teacher=str(tmp_path / "nowhere"))
