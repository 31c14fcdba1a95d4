"""Seconds and cost, by hand and as measured."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from plan.planned import ALL, ASLEEP, H200, SERVED, plan_for

from emailrl.model.layout import Keep
from emailrl.model.shape import Shape
from emailrl.plan.memory import Layout
from emailrl.plan.time import HANDOVER, MOVED, WAKING, prefix_share, training_flops
from emailrl.plan.tokens import Tokens

VLLM = {"engine": "vllm"}
OF_48 = {"per_device_train_batch_size": 8, "num_generations": 6}
WITHOUT_SHARING = OF_48 | {"prefix_sharing": False}


def completions(number: int, tokens: int = 768) -> dict[str, Any]:
    return {"per_device_train_batch_size": number // 8, "num_generations": 8, "max_turns": 1, "max_tokens": tokens}


def single(sleep: str) -> dict[str, Any]:
    """48 completions of 768 tokens to prompts of 763: no prompt joins later, so CUDA graphs always fit."""
    return OF_48 | ASLEEP | {"max_turns": 1, "max_tokens": 768, "beta": 0, "vllm_enable_sleep": sleep}


def served(number: int, tokens: int = 768, **more: Any) -> dict[str, Any]:
    """One trainer and one server."""
    return completions(number, tokens) | SERVED | {"gpus": 2} | more


@pytest.mark.parametrize(
    ("model", "tokens", "sampled", "values", "phase", "seconds", "within"),
    [
        # One H200. Reference pass, forward, backward and AdamW of 24 trajectories: 6,755 tokens/s.
        ("14B", 3838, None, SERVED | {"per_device_train_batch_size": 4, "num_generations": 6}, "passes", 13.64, 0.15),
        # docs/evidence/performance.md: a whole step of 48 trajectories.
        ("14B", 3597, 1103, OF_48 | VLLM | {"max_model_len": 16384}, "step", 53.37, 0.05),
        # Sampling 48 trajectories of five turns.
        ("0.6B", 3000, 480, OF_48 | VLLM, "rollout", 7.36, 0.06),
        ("0.6B", 3000, 480, OF_48 | VLLM | {"vllm_enforce_eager": True}, "rollout", 21.9, 0.06),
        ("0.6B", 3000, 480, OF_48, "rollout", 30.1, 0.06),
        ("4B", 3000, 480, OF_48 | VLLM, "rollout", 10.5, 0.06),
        ("14B", 3822, 1101, OF_48 | VLLM, "rollout", 26.2, 0.06),
        ("14B", 3597, 1103, OF_48 | VLLM, "rollout", 25.47, 0.06),
        *(
            ("4B", 1531, 768, single(sleep), phase, seconds, within)
            for sleep, *found in (("off", 5.87, 2.20, 8.61), ("on", 5.76, 2.34, 9.64))
            for (phase, within), seconds in zip(
                (("rollout", 0.03), ("train", 0.15), ("step", 0.05)), found, strict=True
            )
        ),
        # 96 completions at once: 16.28 s, of which the new adapter, waking and sleeping took 3.2 then.
        ("4B", 1535, 764, completions(96) | ASLEEP | {"max_batch_trajectories": 256}, "work", 16.28 - 3.2, 0.06),
        # Two and four H200s that train and sample in turn: 13.30 and 13.88 s, 3.2 of them for the new adapter.
        ("4B", 1535, 764, completions(48) | ASLEEP | {"gpus": 2}, "work", 13.30 - 3.2, 0.19),
        ("4B", 1535, 764, completions(48) | ASLEEP | {"gpus": 4}, "work", 13.88 - 3.2, 0.19),
        # A trainer and a server, two machines: rollouts with loading the adapter 9.8 and 12.2 s, updates 5.2 and 5.3 s,
        # steps in turns 15.2 and 17.7 s, overlapping 9.2 and 11.6 s. A new adapter took 1.7 s then.
        ("4B", 1535, 764, served(96, max_staleness=0), "rollout", 11.0 - 1.7, 0.17),
        ("4B", 1535, 764, served(96, max_staleness=0), "passes", 5.25, 0.15),
        ("4B", 1535, 764, served(96, max_staleness=0), "work", 16.45 - 1.7, 0.16),
        ("4B", 1535, 764, served(96, max_staleness=1), "step", 10.4, 0.15),
        ("4B", 1535, 764, served(192), "sampling", 16.5, 0.15),
        # A server, prompts and completions of 256 tokens: 6,681, 10,335, 12,277 and 15,496 tokens per second.
        *(
            ("4B", 512, 256, served(number, 256, max_batch_trajectories=384), "sampling", seconds, 0.1)
            for number, seconds in ((48, 1.84), (96, 2.38), (192, 4.00), (384, 6.34))
        ),
        # The adapter in process; waking and sleeping are 0.87 s of it on 4B, 1.71 and 1.70 on 14B.
        ("4B", None, None, ASLEEP | {"vllm_enable_sleep": "off"}, "handover", 0.54, 0.3),
        ("4B", None, None, ASLEEP, "handover", 1.55, 0.11),
        ("14B", None, None, ASLEEP, "handover", 2.54, 0.08),
    ],
)
def test_seconds_as_measured(
    model: str, tokens: int, sampled: int | None, values: dict[str, Any], phase: str, seconds: float, within: float
) -> None:
    use = plan_for(model=model, tokens=tokens, share=sampled and sampled / tokens, **values).use
    sums = {"passes": use.score + use.train, "work": use.step - use.handover}
    found = sums[phase] if phase in sums else getattr(use, phase)
    assert found == pytest.approx(seconds, rel=within)


@pytest.mark.parametrize(
    ("model", "values", "peak", "seconds"),
    [
        ("0.6B", {"gradient_checkpointing": "auto", "max_tokens_per_micro_batch": 16384}, 13.24, 2.33),
        ("0.6B", {"gradient_checkpointing": "on", "max_tokens_per_micro_batch": 4096}, 1.833, 5.56),
        ("0.6B", {"gradient_checkpointing": "on", "packing": False}, 3.856, 9.52),
        ("0.6B", {"backend": "unsloth"}, 2.210, 3.69),
        ("4B", {"gradient_checkpointing": "auto", "max_tokens_per_micro_batch": 16384}, 44.38, 8.42),
        ("4B", {"gradient_checkpointing": "selective", "max_tokens_per_micro_batch": 8192}, 12.32, 10.42),
        ("4B", {"gradient_checkpointing": "on", "max_tokens_per_micro_batch": 4096}, 9.334, 11.88),
        ("4B", {"gradient_checkpointing": "on", "fused_layers": False}, 14.73, 23.77),
        ("4B", {"gradient_checkpointing": "on", "packing": False}, 15.00, 24.16),
        ("4B", {"backend": "unsloth"}, 9.827, 12.69),
        ("14B", {"gradient_checkpointing": "auto", "max_tokens_per_micro_batch": 16384}, 94.63, 20.70),
        ("14B", {"gradient_checkpointing": "selective", "max_tokens_per_micro_batch": 8192}, 35.6, 27.00),
        ("14B", {"gradient_checkpointing": "on", "max_tokens_per_micro_batch": 4096}, 30.96, 28.56),
        ("14B", {"gradient_checkpointing": "on", "packing": False}, 41.85, 50.49),
        ("14B", {"backend": "unsloth"}, 31.53, 31.82),
        ("4B", {"gradient_checkpointing": "auto", "prefix_sharing": True}, 46.5, 7.71),
    ],
)
def test_training_as_measured(model: str, values: dict[str, Any], peak: float, seconds: float) -> None:
    """48 trajectories of 3,763 tokens on average, 23.6 % trained; the benchmark has neither optimizer nor sampler."""
    made = plan_for(model=model, tokens=3763, share=0.236, **(WITHOUT_SHARING | values))
    resident = made.memory.resident
    planned = made.memory.training_peak - resident["optimizer"] - resident["sampler's copy"]
    assert planned / 2**30 == pytest.approx(peak, rel=0.08)
    assert made.use.train == pytest.approx(seconds, rel=0.08)


@pytest.mark.parametrize(
    ("model", "tokens", "sampled", "mode", "saved"),
    [
        ("0.6B", 3763, 0.25, "masked", 0.045),
        ("4B", 3763, 0.25, "masked", 0.094),
        ("14B", 3763, 0.25, "masked", 0.120),
        ("4B", 974, 0.098, "simple", 0.69),
    ],
)
def test_time_that_shared_prefixes_save_as_measured(
    model: str, tokens: int, sampled: float, mode: str, saved: float
) -> None:
    """Of a forward and backward pass: conversations that share 14.5 % of their tokens, single completions 75 %."""
    planned = partial(plan_for, model=model, tokens=tokens, share=sampled, mode=mode, max_tokens_per_micro_batch=16_384)
    with_it, without = (planned(prefix_sharing=shares, **OF_48).use.train for shares in (True, False))
    assert 1 - with_it / without == pytest.approx(saved, abs=0.03)


def test_a_decode_step_as_measured() -> None:
    """38 rows of 2,680 tokens on 14B took 15.0 ms a step, 7 rows 12.0."""
    for rows, milliseconds in ((38, 14.99), (7, 12.0)):
        values = {"max_turns": 1, "per_device_train_batch_size": 1, "num_generations": rows, "eval_dataset_size": 1}
        made = plan_for(model="14B", tokens=2760, share=160 / 2760, max_tokens=160, **VLLM, **values)
        reading = 2600 * 2 * 40 * 330_301_440 / 791.2e12  # one prompt for all
        assert 1e3 * (made.use.rollout - reading) / 160 == pytest.approx(milliseconds, rel=0.03)


def test_training_operations_by_hand() -> None:
    """One layer of one weight each way: 4 operations a weight, attention 3·2·T, head 4 a trained token's product."""
    shape = Shape("llama", 1, 1, 1, 1, 1, 1, 10, True, 100)
    tokens = Tokens(10, 10, 10, 0.5, 2, 1, 1, 1.0, 1, 1, "given")
    layout = Layout("fused", 2, 16, ALL)
    # 7 weights; 20 tokens: 4·7 + 6·10 a token, and 4·10 for each of the 10 trained.
    assert training_flops(shape, layout, Keep.ALL, tokens) == 20 * (28 + 60) + 10 * 40
    # Again: attention, and all products but the last.
    assert training_flops(shape, layout, Keep.INPUT, tokens) == 20 * (28 + 60 + 12 + 20) + 10 * 40


def test_prompts_that_a_group_shares_by_hand() -> None:
    """Four trajectories of 4,096 tokens in a micro-batch read a fifth of them once instead of four times.

    Moving the keys takes 128 / 2,560 of the time.
    """
    made = partial(plan_for, model="4B", tokens=4096, share=0.25, **OF_48)
    shared, apart = made(), made(prefix_sharing=False)
    assert prefix_share(shared.job, shared.memory) == pytest.approx(0.2 * 3 / 4)
    assert shared.use.train == pytest.approx(apart.use.train * (1 - (0.15 - 0.05)))
    assert shared.use.score == pytest.approx(apart.use.score * (1 - (0.15 - 0.05)))
    none = ({"max_tokens_per_micro_batch": 4096}, {"lora_dropout": 0.1}, {"packing": False}, {"backend": "unsloth"})
    assert [prefix_share(other.job, other.memory) for other in (made(**values) for values in none)] == [0, 0, 0, 0]
    simple = made(mode="simple", max_tokens_per_micro_batch=65_536)  # a prompt and a quarter of completion
    assert prefix_share(simple.job, simple.memory) == pytest.approx(0.75 * 5 / 6)


def test_time_and_cost() -> None:
    made = plan_for(max_steps=10, eval_steps=100, price=3.6)
    use = made.use
    # Before the first step, after the last, and best_model on other questions.
    assert use.run == pytest.approx(10 * (use.rollout + use.score + use.train) + 3 * use.evaluation)
    assert made.cost == pytest.approx(use.run * 3.6 / 3600)


def test_vllm_in_process_takes_time_for_a_new_adapter() -> None:
    """To save, load and verify it, and to wake and sleep; transformers samples from the trainer's own."""
    asleep = plan_for(model="4B", **ASLEEP).use
    assert asleep.handover == pytest.approx(HANDOVER + WAKING + 8_044_936_192 / MOVED)
    assert asleep.step == pytest.approx(asleep.rollout + asleep.handover + asleep.score + asleep.train)
    assert plan_for(model="4B", engine="vllm", vllm_enable_sleep="off").use.handover == HANDOVER
    assert plan_for(model="4B", engine="transformers").use.handover == 0


def test_seconds_of_sampling_by_hand() -> None:
    values = VLLM | {"model": "4B", "eval_dataset_size": 12, "tokens": 4000}
    made = plan_for(**values)
    # 12 trajectories read 3,000 tokens each, 2 · 36 · 100,925,440 operations a token, at 791.2 TFLOP/s; a fifth is the
    # prompt, which the three of a group read once. A thousand times 36 layers of 0.53 ms.
    a_token = 7_266_631_680 / 791.2e12
    assert made.use.rollout == pytest.approx(36_000 * (13 / 15) * a_token + 1000 * 36 * 0.53e-3, rel=1e-5)
    assert made.use.evaluation == pytest.approx(36_000 * a_token + 1000 * 36 * 0.53e-3, rel=1e-5)
    # A card whose memory is slower waits for weights and half-full caches, at 0.7 of its bandwidth.
    moving = (8_044_936_192 + 12 * 2000 * 147_456) / (0.7 * 0.6e12)
    waiting = plan_for(replace(H200, bandwidth=0.6e12), **values).use
    assert waiting.evaluation == pytest.approx(36_000 * a_token + 1000 * moving, rel=1e-5)


def test_mode_simple_samples_one_turn_and_evaluates_whole_conversations() -> None:
    for values in ({}, VLLM, VLLM | {"gpus": 2}, SERVED | {"gpus": 2}):
        simple, masked = (plan_for(model="4B", mode=mode, **values).use for mode in ("simple", "masked"))
        assert simple.evaluation == pytest.approx(masked.evaluation) and simple.rollout < masked.rollout
    one, other = ({"tokens": 1531, "share": 768 / 1531, "model": "4B", **OF_48, **VLLM, **how} for how in
                  ({"mode": "simple"}, {"max_turns": 1, "max_tokens": 768}))  # fmt: skip
    assert plan_for(**one).use.rollout == pytest.approx(plan_for(**other).use.rollout)


@pytest.mark.parametrize(
    ("values", "passes"),
    [
        ({}, 1),
        ({"beta": 0}, 0),
        ({"update_epochs": 2}, 2),
        ({"num_mini_batches": 2, "beta": 0}, 1),
        ({"algorithm": "rloo"}, 2),  # the KL in the reward needs the old log-probabilities
        ({"algorithm": "ppo", "beta": 0}, 1),
    ],
)
def test_passes_before_an_update(values: dict[str, Any], passes: int) -> None:
    made = plan_for(**values)
    assert made.job.scoring_passes == passes and (made.use.score > 0) is (passes > 0)
