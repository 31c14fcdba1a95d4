"""An updater on a tiny policy, four samples for it, and their log-probabilities from the full logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emailrl.model.policy import Policy, load_policy
from emailrl.ranks import ALONE, Place, Ranks
from emailrl.settings import Settings, load_settings
from emailrl.training import forward
from emailrl.training.algorithms import resolve
from emailrl.training.batch import TrainingSample
from emailrl.training.team import build_updater
from emailrl.training.update import Updater

Make = Callable[..., Updater]
LENGTHS = [9, 14, 6, 11]
PAID = {"t0": 1.0, "t1": -0.5, "t2": 0.25, "t3": -1.5}
"""What the trajectories of ``samples`` earn."""
TEMPERATURE = 0.7


def samples(*, sampler: float = -5.5) -> list[TrainingSample]:
    """One sample a trajectory, two a group; some tokens between the trained ones are not trained."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for i, length in enumerate(LENGTHS):
        ids = torch.randint(1, 257, (length,), generator=generator).tolist()
        mask = [int(t > 2 and t % 4 != 0) for t in range(length - 1)] + [1]
        logprobs = [sampler if trained else None for trained in mask]
        made.append(TrainingSample(f"t{i}", f"g{i // 2}", ids, mask, logprobs))
    return made


def follow(updater: Updater, ranks: Ranks) -> None:
    """On ranks other than 0: train the next share, or join a forward pass."""
    share = ranks.scatter(None)
    if share is None:
        updater.forward.pass_along()
    else:
        updater.take(share)


def loaded(model: Path, **changes: Any) -> Settings:
    """The settings of ``make_updater``."""
    given = {
        "model_name": str(model), "lora_rank": 4, "temperature": TEMPERATURE, "learning_rate": 1e-2, "warmup_steps": 0,
        "max_grad_norm": 0, "beta": 0.0,
    }  # fmt: skip
    return load_settings(given | changes, environ={}, cwd=model)


def load_trained(settings: Settings, **given: Any) -> Policy:
    return load_policy(settings, trainable=True, critic=resolve(settings).has_critic, **given)


def make_updater(model: Path, *, moved: bool = True, ranks: Ranks = ALONE, **changes: Any) -> Updater:
    """Settings by name; the adapter (and a critic) has already moved away from the base unless ``moved`` is false."""
    if changes.get("algorithm") == "opd":
        changes.setdefault("teacher", str(model))  # the base itself
    settings = loaded(model, **changes)
    policy = load_trained(settings, mesh=ranks.host_mesh(), accompanied=ranks.accompanied)
    updater = build_updater(policy, settings, resolve(settings), ranks=ranks)
    generator = torch.Generator().manual_seed(5)
    for parameter in updater.parameters + updater.critic:
        parameter.data += moved * 0.005 * torch.randn(parameter.shape, generator=generator)
    return updater


class Memory:
    """Stands in for ``token_logprobs`` on a device that holds so many (padded) tokens at once: on rank 1 alone where
    ``rank`` says so, and in training or in scoring alone where ``training`` does."""

    def __init__(self, most: int, *, rank: int | None = None, training: bool | None = None) -> None:
        self.most, self.rank, self.training, self.refused = most, rank, training, 0
        self.honest = forward.token_logprobs

    def __call__(self, model: Any, token_ids: Tensor, *arguments: Any, **options: Any) -> Any:
        here = self.rank in (None, Place.here().rank) and self.training in (None, torch.is_grad_enabled())
        if here and token_ids.numel() > self.most:
            self.refused += 1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self.honest(model, token_ids, *arguments, **options)


def trained_positions(sample: TrainingSample) -> Tensor:
    """Where the sample is trained."""
    return torch.tensor(sample.loss_mask).nonzero()[:, 0]


def plain_logprobs(policy: Policy, sample: TrainingSample, *, reference: bool = False) -> Tensor:
    """Log-probabilities of a sample's trained tokens from the full logits of its row alone."""
    ids, trained = torch.tensor([sample.token_ids]), trained_positions(sample)
    if reference:
        with policy.reference() as model, torch.no_grad():
            logits = model(input_ids=ids).logits
    else:
        logits = policy.model(input_ids=ids).logits
    return (logits[0] / TEMPERATURE).log_softmax(-1)[trained - 1, ids[0, trained]]


def plain_values(updater: Updater, sample: TrainingSample) -> Tensor:
    """The critic's values of a sample's trained tokens, from the states before them."""
    hidden = updater.policy.model(input_ids=torch.tensor([sample.token_ids]), output_hidden_states=True).hidden_states
    weight, bias = updater.critic
    return hidden[-1][0, trained_positions(sample) - 1] @ weight + bias


def gradients(updater: Updater) -> list[Tensor]:
    """The gradients that stand in the parameters, critic included."""
    return [parameter.grad.clone() for parameter in updater.parameters + updater.critic if parameter.grad is not None]


def assert_gradients(
    updater: Updater,
    loss: Tensor,
    made: list[TrainingSample] | None = None,
    paid: dict[str, float] = PAID,
    *,
    atol: float = 1e-6,
) -> dict[str, float]:
    """Compare a step's gradient, and move, with those of ``loss``, made before it; returns the step's metrics."""
    parameters = updater.parameters + updater.critic
    expected = torch.autograd.grad(loss, parameters, retain_graph=True)
    before = [parameter.detach().clone() for parameter in updater.parameters]
    metrics = updater.train(made or samples(), paid, step=1).metrics
    assert max(part.abs().max() for part in expected) > 1e-4
    for parameter, gradient in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=atol, rtol=1e-4)
    # AdamW's first move is the learning rate against the gradient's sign.
    for was, now, gradient in zip(before, updater.parameters, expected, strict=False):
        clear = gradient.abs() > 1e-4
        torch.testing.assert_close(now[clear] - was[clear], -0.01 * gradient[clear].sign(), atol=1e-5, rtol=0)
    return metrics


def assert_close(actual: list[Tensor], expected: list[Tensor], *, atol: float = 1e-6, rtol: float = 1e-4) -> None:
    """Compare each tensor with its like."""
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, atol=atol, rtol=rtol)
