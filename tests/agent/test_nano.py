"""The packaged policy with an adapter, on a demo mailbox: what the engine samples is what the trainer computes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tiny import collector_of, settings_of

from emailrl.agent.play import audit
from emailrl.engines import build_engine
from emailrl.mail.build import build_database
from emailrl.mail.demo import ask, make_world
from emailrl.model.load import load_policy

NANO = Path(__file__).resolve().parents[2] / "emailrl" / "model" / "nano"


@pytest.mark.skipif(not NANO.is_dir(), reason="the packaged policy is not there")
def test_sampled_logprobs_are_the_trainers(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    world = make_world(3, "train", 0)
    rng = random.Random(3)
    build_database(world.emails, tmp_path / "mail.db")
    settings = settings_of(
        tmp_path, model_name="nano", emailrl_db=tmp_path / "mail.db", max_tokens=96, max_turns=5, temperature=0.8
    )
    policy = load_policy(settings, trainable=True)
    torch.manual_seed(0)
    with torch.no_grad():
        for _, parameter in policy.trainable_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    policy.save_adapter(tmp_path / "adapter")
    engine = build_engine(settings, policy)
    engine.load_adapter(tmp_path / "adapter", "v1")
    scenarios = [ask(world, fact, rng) for fact in world.facts[:3]]
    groups = collector_of(settings, policy, engine).collect(scenarios, 2, step=1, seed=1)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    assert max(len(trajectory.turns) for trajectory in trajectories) > 1
    policy.model.eval()
    for trajectory in trajectories:
        assert trajectory.exception is None
        (sample,) = trajectory.samples  # the packaged template never breaks a prefix
        assert audit(trajectory) == sum(sample.loss_mask)
        ids = torch.tensor([sample.token_ids])
        with torch.no_grad():
            logits = policy.model(ids).logits[0, :-1].float() / 0.8
        logprobs = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist()
        for computed, sampled in zip(logprobs, sample.sampler_logprobs[1:], strict=True):
            assert sampled is None or sampled == pytest.approx(computed, abs=1e-4)
