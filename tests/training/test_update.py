"""The update on a real (tiny) model, against gradients computed from the full logits."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from training.updaters import (
    LENGTHS,
    PAID,
    Make,
    assert_close,
    assert_gradients,
    gradients,
    load_trained,
    loaded,
    samples,
)
from training.updaters import plain_logprobs as plain

from emailrl.base.errors import EmailRLError
from emailrl.model.policy import Policy, load_policy
from emailrl.settings import Settings
from emailrl.training.algorithms import learning_rate, resolve
from emailrl.training.batch import save_batches
from emailrl.training.team import build_updater


@pytest.mark.parametrize("cap", [1, 30, 16384])
def test_grpo_gradient_whatever_the_micro_batches(make: Make, cap: int) -> None:
    updater = make(beta=0.1, max_tokens_per_micro_batch=cap)
    rows = []
    for sample in samples():
        logprobs = plain(updater.policy, sample)
        d = logprobs.detach() - plain(updater.policy, sample, reference=True)
        # At ratio 1 the surrogate's gradient is -A grad(logprob); that of k3 is (1 - e^-d) grad(logprob).
        rows.append((-PAID[sample.trajectory_id] + 0.1 * (1 - torch.exp(-d))) * logprobs)
    assert_gradients(updater, torch.cat(rows).mean())


def test_reinforce_pp_gradient_kl_in_the_reward_and_whitened(make: Make) -> None:
    updater = make(beta=0.1, algorithm="reinforce_pp", max_tokens_per_micro_batch=30)
    logprobs = [plain(updater.policy, sample) for sample in samples()]
    returns = []
    for sample, row in zip(samples(), logprobs, strict=True):
        kl = (row.detach() - plain(updater.policy, sample, reference=True)).tolist()
        returns += [PAID[sample.trajectory_id] - 0.1 * sum(kl[t:]) for t in range(len(kl))]
    mean = sum(returns) / len(returns)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in returns) / len(returns))
    whitened = torch.tensor([(value - mean) / deviation for value in returns])
    assert_gradients(updater, -(whitened * torch.cat(logprobs)).mean())


@pytest.mark.parametrize("first_scale", [2.0**16, 2.0**40])
def test_fp16_gradients_do_not_vanish_under_many_tokens(make: Make, first_scale: float) -> None:
    """Divided by four million, gradients are below fp16's smallest number; a scale that overflows is halved."""
    options: dict[str, Any] = {"algorithm": "dr_grpo", "constant_length": 1_000_000, "lora_alpha": 4}
    wide, narrow = make(**options), make(**options, dtype="fp16")
    narrow.loss_scale = torch.amp.GradScaler("cpu", init_scale=first_scale)
    assert narrow.policy.model.get_input_embeddings().weight.dtype == torch.float16
    metrics = [updater.train(samples(), PAID, step=1).metrics for updater in (wide, narrow)]
    assert metrics[1]["updates_skipped"] == 0
    assert metrics[1]["grad_norm"] == pytest.approx(metrics[0]["grad_norm"], rel=0.02)
    for right, close in zip(wide.parameters, narrow.parameters, strict=True):
        assert right.grad is not None and close.grad is not None
        assert (close.grad - right.grad).norm() < 0.02 * right.grad.norm()
    assert (narrow.loss_scale.get_scale() < first_scale) == (first_scale > 2.0**36)
    assert narrow.state_dict()["loss_scale"]["scale"] == narrow.loss_scale.get_scale()
    assert not wide.loss_scale.is_enabled()
    assert narrow.train(samples(), PAID | {"t0": math.nan}, step=2).metrics["updates_skipped"] == 1
    assert narrow.train(samples(), PAID, step=3).metrics["updates_skipped"] == 0


def test_dr_grpo_divides_by_sequences_times_constant(make: Make) -> None:
    updater = make(algorithm="dr_grpo")  # MAX_TOKENS is 4096
    total = sum((-PAID[sample.trajectory_id] * plain(updater.policy, sample)).sum() for sample in samples())
    expected = torch.autograd.grad(total / (4 * 4096), updater.parameters)
    updater.train(samples(), PAID, step=1)
    assert_close(gradients(updater), list(expected), atol=1e-9, rtol=1e-3)


def test_first_update_has_ratio_one_and_its_metrics_add_up(make: Make) -> None:
    updater = make(beta=0.1, max_tokens_per_micro_batch=30)
    old = [plain(updater.policy, sample).detach() for sample in samples()]
    reference = [plain(updater.policy, sample, reference=True) for sample in samples()]
    metrics = updater.train(samples(), PAID, step=1).metrics
    assert (metrics["ratio_min"], metrics["ratio_mean"], metrics["ratio_max"]) == (1.0, 1.0, 1.0)
    assert (metrics["clip_fraction"], metrics["approx_kl"]) == (0.0, 0.0)
    d = torch.cat(old) - torch.cat(reference)
    kl = (torch.exp(-d) - 1 + d).mean().item()
    per_token = [PAID[s.trajectory_id] for s in samples() for _ in range(s.num_trainable)]
    assert metrics["kl"] == pytest.approx(kl, abs=1e-6)
    assert metrics["policy_loss"] == pytest.approx(-sum(per_token) / len(per_token), abs=1e-6)
    assert metrics["loss"] == pytest.approx(metrics["policy_loss"] + 0.1 * kl, abs=1e-6)
    gap = (torch.cat(old) + 5.5).abs()
    assert metrics["sampler_gap_mean"] == pytest.approx(gap.mean().item(), abs=1e-5)
    assert metrics["sampler_gap_max"] == pytest.approx(gap.max().item(), abs=1e-5)
    assert metrics["trainable_tokens"] == len(per_token) and metrics["total_tokens"] == sum(LENGTHS)
    assert metrics["learning_rate"] == 1e-2 and metrics["kl_coef"] == 0.1 and 0 < metrics["entropy"] < math.log(257)


def test_only_the_adapter_moves(make: Make) -> None:
    updater = make(beta=0.1)
    before = {name: value.clone() for name, value in updater.policy.model.state_dict().items()}
    updater.train(samples(), PAID, step=1)
    moved = {name for name, value in updater.policy.model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved and all("lora_" in name for name in moved) and len(moved) == len(updater.parameters)


def test_zero_advantages_move_nothing_and_no_beta_asks_no_reference(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    updater = make()
    monkeypatch.setattr(Policy, "reference", lambda self: pytest.fail("reference asked for without a beta"))
    before = [parameter.clone() for parameter in updater.parameters]
    metrics = updater.train(samples(), dict.fromkeys(PAID, 0.0), step=1).metrics
    assert all(map(torch.equal, before, updater.parameters))
    assert metrics["grad_norm"] == 0 and "kl" not in metrics


def test_several_updates_keep_the_old_logprobs_and_clip(make: Make) -> None:
    updater = make(num_mini_batches=2, update_epochs=3, learning_rate=0.05)
    old = [plain(updater.policy, sample).detach() for sample in samples()]
    result = updater.train(samples(), PAID, step=1)
    for sample, numbers, before in zip(samples(), result.tokens, old, strict=True):
        trained = torch.tensor(sample.loss_mask, dtype=torch.bool)
        assert len(numbers.old_logprobs) == len(numbers.logprobs) == len(sample.token_ids)
        assert numbers.advantages == [PAID[sample.trajectory_id] * on for on in sample.loss_mask]
        torch.testing.assert_close(torch.tensor(numbers.old_logprobs)[trained], before, atol=1e-5, rtol=0)
        # The last pass found the policy moved by the five updates before it, or four.
        assert (torch.tensor(numbers.logprobs)[trained] - before).abs().max() > 0.05
    assert result.metrics["ratio_max"] > 1.2 and result.metrics["clip_fraction"] > 0
    assert updater.optimizer.state[updater.parameters[0]]["step"] == 6


PPO = {"algorithm": "ppo", "critic_warmup_steps": 1, "critic_learning_rate": 0.01}


@pytest.mark.parametrize(
    "more",
    [{}, {"lora_dropout": 0.3}, PPO, PPO | {"lora_dropout": 0.3}, {"reference": "start"}, {"dtype": "fp16"}],
)
def test_a_resumed_updater_equals_the_uninterrupted_one(
    make: Make, more: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"beta": 0.1, "kl_target": 1e-3, "kl_horizon": 10, "num_mini_batches": 2}
    options |= {"update_epochs": 2, "lr_scheduler": "cosine"} | more
    torch.manual_seed(1)
    first = make(**options)
    if first.loss_scale.is_enabled():
        first.loss_scale = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in (1, 2):
        first.train(samples(), PAID, step=step)
    stream = io.BytesIO()
    torch.save(first.state_dict(), stream)
    first.policy.save_adapter(tmp_path)
    uninterrupted = [first.train(samples(), PAID, step=step).metrics for step in (3, 4)]
    torch.manual_seed(99)  # whatever the process did in between must not matter
    settings = loaded(tiny_model, **options)
    second = build_updater(load_trained(settings, adapter=tmp_path), settings, resolve(settings))
    stream.seek(0)
    second.load_state_dict(torch.load(stream, weights_only=True))
    assert [second.train(samples(), PAID, step=step).metrics for step in (3, 4)] == uninterrupted
    assert all(map(torch.equal, first.parameters + first.critic, second.parameters + second.critic))
    assert first.kl.coef == second.kl.coef != 0.1 and first.loss_scale.state_dict() == second.loss_scale.state_dict()


def test_state_of_another_adapter_is_refused(make: Make) -> None:
    state = make().state_dict()
    with pytest.raises(EmailRLError, match="belongs to another adapter"):
        make(target_modules="q_proj").load_state_dict(state)
    with pytest.raises(EmailRLError, match="started with REFERENCE=base"):  # whose start is not known
        make(beta=0.1, reference="start").load_state_dict(state)


def test_a_loaded_state_is_a_copy(make: Make) -> None:
    first, second = make(), make()
    first.train(samples(), PAID, step=1)
    state = first.state_dict()
    before = state["optimizer"]["state"][0]["exp_avg"].clone()
    second.load_state_dict(state)
    second.train(samples(), PAID, step=2)
    assert torch.equal(state["optimizer"]["state"][0]["exp_avg"], before)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_updates_that_are_not_finite_are_skipped_counted_and_can_be_kept(
    make: Make, bad: float, tmp_path: Path
) -> None:
    updater = make(max_grad_norm=1.0, beta=0.1, kl_target=1e-3)
    before = [parameter.clone() for parameter in updater.parameters]
    broken, paid = samples(), PAID | {"t1": bad, "t2": 1.0}
    for step in (3, 4):
        result = updater.train(broken, paid, step=step)
        assert result.metrics["updates_skipped"] == 1 and "loss" not in result.metrics and updater.kl.coef == 0.1
        assert all(map(torch.equal, before, updater.parameters))
    resumed = make(max_grad_norm=1.0, beta=0.1, kl_target=1e-3)
    resumed.load_state_dict(updater.state_dict())
    resumed.train(broken, paid, step=5)
    assert resumed.skipped_in_a_row == 3
    assert updater.train(samples(), PAID, step=5).metrics["updates_skipped"] == 0 and updater.skipped_in_a_row == 0
    assert not all(map(torch.equal, before, updater.parameters))
    ((values, batches),) = result.skipped
    save_batches(tmp_path, "step-000004-1", batches, 4, values)
    files = sorted(path.name for path in tmp_path.iterdir() if path.is_file())
    assert files == [f"step-000004-1.{end}" for end in ("json", "safetensors")]
    said = json.loads((tmp_path / "step-000004-1.json").read_text())
    assert said["step"] == 4 and said["not_finite"]["loss"] in ("nan", "inf", "-inf")
    assert sorted(row["trajectory_id"] for row in said["rows"]) == list(PAID)
    kept = load_file(tmp_path / "step-000004-1.safetensors")
    (row,) = [row for row in said["rows"] if row["trajectory_id"] == "t2"]
    n, length = row["micro_batch"], LENGTHS[2]
    assert kept[f"{n}.token_ids"][row["row"], :length].tolist() == broken[2].token_ids
    assert kept[f"{n}.advantages"][row["row"], :length].tolist() == [1.0 * on for on in broken[2].loss_mask]


def test_gradient_clipping(make: Make) -> None:
    free, clipped = make(), make(max_grad_norm=1e-3)
    norm = free.train(samples(), PAID, step=1).metrics["grad_norm"]
    assert clipped.train(samples(), PAID, step=1).metrics["grad_norm"] == pytest.approx(norm) and norm > 1e-3
    total = math.sqrt(sum(float(p.grad.square().sum()) for p in clipped.parameters if p.grad is not None))
    assert total == pytest.approx(1e-3, rel=1e-3)


def test_nothing_to_train_and_every_seed(make: Make, tiny_model: Path) -> None:
    updater = make(seed=2**63 - 1)
    with pytest.raises(ValueError, match="without samples"):
        updater.train([], {}, step=1)
    assert updater.train(samples(), PAID, step=1).metrics["updates_skipped"] == 0
    settings = Settings.model_validate({"model": {"name": str(tiny_model)}})
    with pytest.raises(EmailRLError, match="no trainable parameters"):
        build_updater(load_policy(settings), settings, resolve(settings))


@pytest.mark.parametrize(
    ("scheduler", "rates"),
    [
        # Warm-up over 4 steps, 8 in all; the decay runs from step 4 to step 9, where it would be 0.
        ("constant", [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]),
        ("linear", [0.25, 0.5, 0.75, 1, 0.8, 0.6, 0.4, 0.2]),
        ("cosine", [0.25, 0.5, 0.75, 1, 0.9045085, 0.6545085, 0.3454915, 0.0954915]),
    ],
)
def test_learning_rate(scheduler: str, rates: list[float]) -> None:
    given = {"learning_rate": 0.5, "warmup_steps": 4, "lr_scheduler": scheduler}
    training = Settings.model_validate({"training": given}).training
    assert [learning_rate(step, training, 8) / 0.5 for step in range(1, 9)] == pytest.approx(rates, abs=1e-6)
    no_warmup = training.model_copy(update={"warmup_steps": 0})
    assert learning_rate(1, no_warmup, 8) == 0.5
