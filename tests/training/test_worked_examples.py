"""A step of grpo and one of ppo worked out by hand, and the page's table of algorithms."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import tensor

from emailrl.training.advantages import gae, group_norm, whiten
from emailrl.training.algorithms import ALGORITHMS
from emailrl.training.kl import estimate
from emailrl.training.losses import aggregate, policy_loss, value_loss

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "reference/algorithms.md").read_text(encoding="utf-8")


def test_grpo() -> None:
    advantages = group_norm(tensor([[1.3, 0.0, 0.1, -1.0]]))[0]
    assert advantages.tolist() == pytest.approx([1.27425, -0.10619, 0.0, -1.16806], abs=1e-5)
    logprobs, mask = tensor([[1.5, 0.9], [0.5, 1.0]]).log(), tensor([[1, 1], [1, 0]])
    loss, metrics = policy_loss(logprobs, torch.zeros(2, 2), advantages[[0, 3]], mask)
    assert loss.item() == pytest.approx(-0.58049, abs=1e-5)
    assert metrics["clip_fraction"] == pytest.approx(2 / 3)
    kl = estimate(tensor([[0.1, 0.0], [-0.2, 0.0]]), torch.zeros(2, 2), "k3")
    assert kl[mask.bool()].tolist() == pytest.approx([0.004837, 0, 0.021403], abs=1e-6)
    whole = loss + 0.01 * aggregate(kl, mask, ALGORITHMS["grpo"].aggregation)
    assert whole.item() == pytest.approx(-0.58041, abs=1e-5)


def test_ppo() -> None:
    mask = tensor([[0, 1, 0, 0, 1, 0, 1]])
    rewards = tensor([[9.0, -0.1 * 0.2, 9, 9, -0.1 * -0.1, 9, -0.1 * 0.3 + 1]])
    values = tensor([[9.0, 0.4, 9, 9, 0.5, 9, 0.2]])
    advantages, returns = gae(rewards, values, mask, gamma=1.0, lam=0.5)
    assert advantages[mask.bool()].tolist() == pytest.approx([0.1275, 0.095, 0.77], abs=1e-6)
    assert returns[mask.bool()].tolist() == pytest.approx([0.5275, 0.595, 0.97], abs=1e-6)
    whitened = whiten(advantages, mask)
    assert whitened[mask.bool()].tolist() == pytest.approx([-0.65418, -0.75874, 1.41293], abs=1e-5)
    loss, _ = policy_loss(values, values, whitened, mask)
    error, _ = value_loss(values, values, returns, mask, clip=ALGORITHMS["ppo"].value_clip)
    assert (loss.item(), error.item()) == pytest.approx((0, 0.10303), abs=1e-5)


def test_the_page_has_a_row_for_every_algorithm_as_it_is() -> None:
    table = PAGE[PAGE.index("## The named algorithms") : PAGE.index("### Custom mixes")]
    rows = {found[1]: found[0] for found in re.finditer(r"^\| `(\w+)`.*\|$", table, re.M)}
    assert list(rows) == list(ALGORITHMS)
    for name, algorithm in ALGORITHMS.items():
        cells = [cell.strip() for cell in rows[name].strip("|").split("|")]
        whitened = ", whitened" if algorithm.whiten else ""
        assert cells[1] == f"`{algorithm.advantage}`{whitened}"
        assert cells[2] == algorithm.ratio_level
        assert [float(bound) for bound in cells[3].split("/")] == [algorithm.clip_low, algorithm.clip_high]
        assert cells[4] == algorithm.aggregation.replace("_", " ")
        assert cells[5] == f"{algorithm.kl_estimator} in the {algorithm.kl_in}"
