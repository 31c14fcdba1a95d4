"""What the update adds to the surrogate and to the batch: sampler correction, entropy, splits."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from training import formulas, updaters
from training.updaters import PAID, TEMPERATURE, Make, plain_logprobs, samples

from emailrl.base.errors import EmailRLError
from emailrl.engines.base import SamplingParams
from emailrl.engines.local.passes import sample, uniforms
from emailrl.training.batch import TrainingSample
from emailrl.training.update import Updater

assert_gradients = partial(updaters.assert_gradients, atol=3e-6)
"""The largest gradients are above 1e-4; float32 sums in another order differ by some 1e-6."""


@pytest.mark.parametrize("cap", [16384, 1])
@pytest.mark.parametrize("aggregation", ["sequence_mean", "constant"])
def test_a_trajectory_in_several_samples_is_one_sequence(make: Make, aggregation: str, cap: int) -> None:
    """Of three trajectories the first is broken into two samples: each trajectory weighs a third."""
    made = samples()
    made[1] = replace(made[1], trajectory_id="t0")
    updater = make(loss_aggregation=aggregation, constant_length=9 if aggregation == "constant" else None,
                   max_tokens_per_micro_batch=cap)  # fmt: skip
    logprobs = [plain_logprobs(updater.policy, one) for one in made]
    tokens = [torch.cat(logprobs[:2]), logprobs[2], logprobs[3]]
    worth = [PAID["t0"], PAID["t2"], PAID["t3"]]
    sums = [each.sum() / (9 if aggregation == "constant" else len(each)) for each in tokens]
    assert_gradients(updater, -sum(a * total for a, total in zip(worth, sums, strict=True)) / 3, made)


def test_the_kl_of_a_trajectory_in_several_samples_weighs_once(make: Make) -> None:
    made = samples()
    made[1] = replace(made[1], trajectory_id="t0")
    updater = make(loss_aggregation="sequence_mean", beta=2.0, kl_estimator="k2")
    rows = []
    for one in made:
        reference = plain_logprobs(updater.policy, one, reference=True)
        rows.append((plain_logprobs(updater.policy, one) - reference).square() / 2)
    means = [torch.cat(rows[:2]).mean(), rows[2].mean(), rows[3].mean()]
    assert_gradients(updater, 2.0 * sum(means) / 3, made, dict.fromkeys(PAID, 0.0))


def sampled_otherwise(updater: Updater, gaps: list[float]) -> list[TrainingSample]:
    """Samples whose sampler gave their trained tokens, in turn, log-probabilities so much below the trainer's."""
    made = []
    for one in samples():
        old = iter(plain_logprobs(updater.policy, one).tolist())
        turn = iter(gaps * 20)
        made.append(replace(one, sampler_logprobs=[next(old) - next(turn) if on else None for on in one.loss_mask]))
    return made


LOGS = [math.log(10.0), math.log(0.1), math.log(2.0)]
"""Importance weights 10, 0.1, 2, 10, ... of the trained tokens of each row."""


@pytest.mark.parametrize("algorithm", ["grpo", "gspo"])
@pytest.mark.parametrize(
    ("kind", "low", "high"), [("tis", 0.0, 5.0), ("icepop", 0.5, 5.0), ("sequence_mask", 1.4, 1.6)]
)
def test_corrections(make: Make, kind: str, low: float, high: float, algorithm: str) -> None:
    """GSPO corrects whole rows by their geometric mean: the bounds are then between those of the rows."""
    logs = [(LOGS * 20)[: one.num_trainable] for one in samples()]
    means = [sum(row) / len(row) for row in logs]
    if algorithm == "gspo":
        logs = [[mean] * len(row) for mean, row in zip(means, logs, strict=True)]
    if algorithm == "gspo" or kind == "sequence_mask":
        low, high = (math.exp(mean) + by for mean, by in ((sorted(means)[0], 1e-3), (sorted(means)[3], -1e-3)))
    updater = make(algorithm=algorithm, importance_correction=kind, correction_low=low, correction_high=high)
    weights = [formulas.correction(row, [0.0] * len(row), kind, low, high) for row in logs]
    rows = [
        -PAID[one.trajectory_id] * torch.tensor(weight) * plain_logprobs(updater.policy, one)
        for one, weight in zip(samples(), weights, strict=True)
    ]
    # At ratio 1 the sequence ratio's gradient is the mean of its tokens': a mean over rows of their means.
    loss = torch.stack([row.mean() for row in rows]).mean() if algorithm == "gspo" else torch.cat(rows).mean()
    metrics = assert_gradients(updater, loss, sampled_otherwise(updater, LOGS))
    free, bounded = ([number for row in given for number in row] for given in (logs, weights))
    cut = sum(abs(math.exp(log) - weight) > 1e-6 for log, weight in zip(free, bounded, strict=True)) / len(free)
    assert metrics["correction_mean"] == pytest.approx(sum(bounded) / len(bounded), rel=1e-4)
    assert metrics["correction_min"] == pytest.approx(math.exp(min(free)), rel=1e-4)  # before the bounds
    assert metrics["correction_max"] == pytest.approx(math.exp(max(free)), rel=1e-4)
    assert metrics["correction_cut_fraction"] == pytest.approx(cut, abs=1e-6) and 0 < cut < 1


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.5, 0), (1.0, 3), (0.6, 5)])
def test_weights_are_one_under_temperature_top_p_and_top_k(make: Make, top_p: float, top_k: int) -> None:
    """Log-probabilities are recorded before top-p and top-k: what these renormalise by is no mismatch."""
    updater = make(importance_correction="tis")
    params = SamplingParams(max_tokens=1, temperature=TEMPERATURE, top_p=top_p, top_k=top_k)
    made = []
    for n in range(8):
        with torch.no_grad():
            logits = updater.policy.model(input_ids=torch.tensor([[7, n + 1]])).logits[0, -1:]
        (token,), (logprob,) = sample(logits, [params], [uniforms(n)])
        made.append(TrainingSample(f"t{n}", "g", [7, n + 1, token], [0, 0, 1], [None, None, logprob]))
    metrics = updater.train(made, {one.trajectory_id: 1.0 for one in made}, step=1).metrics
    assert metrics["correction_min"] == pytest.approx(1, abs=1e-4)
    assert metrics["correction_max"] == pytest.approx(1, abs=1e-4)


def test_entropy_bonus(make: Make) -> None:
    updater = make(entropy_coef=0.2)
    rows = []
    for one in samples():
        logits = updater.policy.model(input_ids=torch.tensor([one.token_ids])).logits[0] / TEMPERATURE
        trained = torch.tensor(one.loss_mask).nonzero()[:, 0]
        logp = logits.log_softmax(-1)[trained - 1]
        rows.append(-(logp.exp() * logp).sum(-1))
    entropy = torch.cat(rows).mean()
    metrics = assert_gradients(updater, -0.2 * entropy, samples(), dict.fromkeys(PAID, 0.0))
    assert metrics["entropy"] == pytest.approx(entropy.item(), abs=1e-5)
    assert metrics["loss"] == pytest.approx(-0.2 * entropy.item(), abs=1e-5) and metrics["policy_loss"] == 0


SERVED = {"engine": "vllm", "vllm_urls": "http://gpu1:8000,http://gpu2:8000"}


@pytest.mark.parametrize("correction", ["tis", "icepop"])
def test_what_servers_cannot_have_sampled_ends_the_run_before_the_update(make: Make, correction: str) -> None:
    updater = make(importance_correction=correction, max_tokens_per_micro_batch=30, **SERVED)
    before = [parameter.detach().clone() for parameter in updater.parameters]
    with pytest.raises(EmailRLError) as raised:
        updater.train(sampled_otherwise(updater, [-1.25, 1.25]), PAID, step=3)
    assert raised.value.message == (
        "Step 3 is not trained: the log-probabilities from the vLLM servers are off by 1.25 nats on average, above 1."
    )
    assert "resume with MAX_STALENESS=0" in raised.value.hint
    assert all(torch.equal(*pair) for pair in zip(before, updater.parameters, strict=True))


@pytest.mark.parametrize(("changes", "nats"), [(SERVED, 0.9), (SERVED | {"vllm_probe_tolerance": 0.2}, 1.9), ({}, 5.0)])
def test_a_gap_below_the_limit_or_without_servers_is_trained(make: Make, changes: dict[str, Any], nats: float) -> None:
    updater = make(**changes)
    metrics = updater.train(sampled_otherwise(updater, [-nats, nats]), PAID, step=1).metrics
    assert metrics["sampler_gap_mean"] == pytest.approx(nats, abs=1e-4) and metrics["grad_norm"] > 0
