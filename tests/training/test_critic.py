"""PPO on a real (tiny) model: the critic beside the adapter, against gradients computed from the full logits."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from training import formulas
from training.updaters import PAID, Make, assert_gradients, load_trained, loaded, plain_logprobs, plain_values, samples

from emailrl.base.errors import EmailRLError
from emailrl.model.policy import VALUE_HEAD_FILE, ValueHead, load_policy


@pytest.fixture
def make(make: Make) -> Make:
    """Make an updater with a critic; settings by name."""
    return partial(make, algorithm="ppo")


@pytest.mark.parametrize("cap", [1, 30, 16384])
def test_gradients_of_adapter_and_critic_whatever_the_micro_batches(make: Make, cap: int) -> None:
    updater = make(beta=0.1, gamma=0.9, gae_lambda=0.8, value_coef=0.3, max_tokens_per_micro_batch=cap)
    logprobs = [plain_logprobs(updater.policy, sample) for sample in samples()]
    values = [plain_values(updater, sample) for sample in samples()]
    advantages, returns = [], []
    for sample, row, foreseen in zip(samples(), logprobs, values, strict=True):
        reference = plain_logprobs(updater.policy, sample, reference=True)
        rewards = (-0.1 * (row.detach() - reference)).tolist()
        rewards[-1] += PAID[sample.trajectory_id]
        advantages.append(formulas.gae(rewards, foreseen.tolist(), 0.9, 0.8))
        returns.append(torch.tensor(advantages[-1]) + foreseen.detach())
    whitened = torch.tensor(formulas.whiten([value for row in advantages for value in row]))
    error = (torch.cat(values) - torch.cat(returns)).square() / 2
    loss = (0.3 * error - whitened * torch.cat(logprobs)).mean()
    weight, bias = torch.autograd.grad(loss, updater.critic, retain_graph=True)
    metrics = assert_gradients(updater, loss)
    assert weight.abs().max() > 1e-3
    assert metrics["value_loss"] == pytest.approx(error.mean().item(), abs=1e-6)
    assert metrics["return_mean"] == pytest.approx(torch.cat(returns).mean().item(), abs=1e-6)
    assert metrics["critic_grad_norm"] == pytest.approx(torch.cat([weight, bias[None]]).norm().item(), rel=1e-4)
    assert metrics["value_clip_fraction"] == 0 and metrics["ratio_max"] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("aggregation", ["sequence_mean", "constant"])
def test_the_critics_loss_is_a_token_mean_whatever_the_policys(make: Make, aggregation: str) -> None:
    updater = make(loss_aggregation=aggregation)
    values = torch.cat([plain_values(updater, sample) for sample in samples()])
    returns = torch.tensor([PAID[sample.trajectory_id] for sample in samples() for _ in range(sample.num_trainable)])
    metrics = updater.train(samples(), PAID, step=1).metrics
    assert metrics["value_loss"] == pytest.approx(((values - returns).square() / 2).mean().item(), abs=1e-6)


def test_a_fresh_critic_foresees_nothing_and_draws_no_random_number(make: Make, tiny_model: Path) -> None:
    torch.manual_seed(4)
    drawn = torch.rand(1)
    torch.manual_seed(4)
    updater = make(moved=False)
    assert torch.rand(1) == drawn
    assert all((parameter == 0).all() and parameter.dtype == torch.float32 for parameter in updater.critic)
    metrics = updater.train(samples(), PAID, step=1).metrics
    assert metrics["value_mean"] == 0 and metrics["explained_variance"] == pytest.approx(0, abs=1e-6)


def test_the_critic_learns_at_its_own_rate_and_alone_in_its_warm_up(make: Make) -> None:
    updater = make(critic_learning_rate=0.05, critic_warmup_steps=2, warmup_steps=4, beta=0.1, kl_target=1e-3)
    adapter = [parameter.clone() for parameter in updater.parameters]
    for step, rate in ((1, 0.0125), (2, 0.025)):
        critic = [parameter.clone() for parameter in updater.critic]
        metrics = updater.train(samples(), PAID, step=step).metrics
        assert all(map(torch.equal, adapter, updater.parameters)) and metrics["grad_norm"] == 0
        assert metrics["loss"] == pytest.approx(0.1 * metrics["value_loss"], abs=1e-6)
        if step == 1:  # AdamW's first move is the learning rate against the gradient's sign
            for was, now in zip(critic, updater.critic, strict=True):
                assert float((now - was).abs().max().detach()) == pytest.approx(rate, rel=1e-3)
        assert updater.kl.coef == 0.1  # a policy that stands still says nothing of the weight
    updater.train(samples(), PAID, step=3)
    assert not any(map(torch.equal, adapter, updater.parameters)) and updater.kl.coef != 0.1
    assert [group["lr"] for group in updater.optimizer.param_groups] == pytest.approx([0.0075, 0.0375])


def test_several_updates_keep_old_values_and_returns_and_clip(make: Make) -> None:
    updater = make(update_epochs=3, critic_learning_rate=0.5, value_clip=0.05)
    old = torch.cat([plain_values(updater, sample).detach() for sample in samples()])
    metrics = updater.train(samples(), PAID, step=1).metrics
    assert metrics["value_clip_fraction"] > 0.01 and metrics["ratio_max"] > 1.01
    # gamma = lambda = 1 and no KL: the return of a token is its trajectory's reward, in each pass.
    rewards = [PAID[sample.trajectory_id] for sample in samples() for _ in range(sample.num_trainable)]
    assert metrics["return_mean"] == pytest.approx(sum(rewards) / len(rewards), abs=1e-6)
    assert metrics["value_mean"] == pytest.approx(old.mean().item(), abs=1e-6)


def test_saved_beside_the_adapter_and_loaded_with_it(make: Make, tiny_model: Path, tmp_path: Path) -> None:
    updater = make()
    updater.policy.save_adapter(tmp_path)
    assert {name: value.tolist() for name, value in load_file(tmp_path / VALUE_HEAD_FILE).items()} == {
        "weight": updater.critic[0].tolist(), "bias": updater.critic[1].item(),
    }  # fmt: skip
    settings = loaded(tiny_model, algorithm="ppo")
    again = load_trained(settings, adapter=tmp_path)
    assert again.value_head is not None
    assert all(map(torch.equal, again.value_head.parameters(), updater.critic))
    assert load_policy(settings, adapter=tmp_path).value_head is None  # nothing learns: no critic
    save_file({"weight": torch.zeros(3), "bias": torch.zeros(())}, tmp_path / VALUE_HEAD_FILE)
    with pytest.raises(EmailRLError, match="does not fit this policy's critic") as caught:
        load_trained(settings, adapter=tmp_path)
    assert "--algorithm ppo" in caught.value.hint
    make(algorithm="grpo").policy.save_adapter(tmp_path / "plain")
    assert not (tmp_path / "plain" / VALUE_HEAD_FILE).exists()


def test_state_with_and_without_a_critic_is_told_apart(make: Make) -> None:
    with_critic, without = make(), make(algorithm="grpo")
    with pytest.raises(EmailRLError, match="from a run with a critic") as caught:
        without.load_state_dict(with_critic.state_dict())
    assert "--algorithm" in caught.value.hint
    with pytest.raises(EmailRLError, match="from a run without a critic"):
        with_critic.load_state_dict(without.state_dict())


def test_a_half_precision_policy_has_a_float32_critic(make: Make) -> None:
    updater = make(dtype="bf16")
    hidden = torch.ones(2, 32, dtype=torch.bfloat16)
    head = ValueHead(updater.policy.model)
    head.weight.data += 1 / 1024
    assert head(hidden).dtype == torch.float32 and head(hidden).tolist() == [32 / 1024] * 2
    assert math.isfinite(updater.train(samples(), PAID, step=1).metrics["value_loss"])
