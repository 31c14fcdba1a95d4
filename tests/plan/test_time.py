"""Seconds and cost, by hand and as measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plan.planned import ALL, H200, settings_with

from emailrl.model.layout import Keep
from emailrl.model.shape import Shape
from emailrl.plan import Known, Plan, make_plan
from emailrl.plan.memory import Layout
from emailrl.plan.time import HANDOVER, MOVED, WAKING, prefix_share, training_flops
from emailrl.plan.tokens import Tokens


def test_training_operations_by_hand() -> None:
    """One layer of one weight each way: 4 operations a weight, attention 3·2·T, head 4 a trained token's product."""
    shape = Shape("llama", 1, 1, 1, 1, 1, 1, 10, True, 100)
    tokens = Tokens(10, 10, 10, 0.5, 2, 1, 1, 1.0, 1, 1, "given")
    layout = Layout("fused", 2, 16, ALL)
    # 7 weights; 20 tokens: 4·7 + 6·10 a token, and 4·10 for each of the 10 trained.
    assert training_flops(shape, layout, Keep.ALL, tokens) == 20 * (28 + 60) + 10 * 40
    # Again: attention, and all products but the last.
    assert training_flops(shape, layout, Keep.INPUT, tokens) == 20 * (28 + 60 + 12 + 20) + 10 * 40


def test_prompts_that_a_group_shares_by_hand(tmp_path: Path) -> None:
    """Four trajectories of 4,096 tokens in a micro-batch read a fifth of them once instead of four times.

    Moving the keys takes 128 / 2,560 of the time.
    """

    def made(**values: Any) -> Plan:
        given = {"per_device_train_batch_size": 8, "num_generations": 6, "model_name": "Qwen/Qwen3-4B"} | values
        return make_plan(settings_with(tmp_path, **given), H200, known=Known(4096, 0.25))

    shared, apart = made(), made(prefix_sharing=False)
    assert prefix_share(shared.job, shared.memory) == pytest.approx(0.2 * 3 / 4)
    assert shared.use.train == pytest.approx(apart.use.train * (1 - (0.15 - 0.05)))
    assert shared.use.score == pytest.approx(apart.use.score * (1 - (0.15 - 0.05)))
    for other in (
        made(max_tokens_per_micro_batch=4096), made(lora_dropout=0.1), made(packing=False), made(backend="unsloth"),
    ):  # fmt: skip
        assert prefix_share(other.job, other.memory) == 0
    simple = made(mode="simple", max_tokens_per_micro_batch=65_536)  # a prompt and a quarter of completion
    assert prefix_share(simple.job, simple.memory) == pytest.approx(0.75 * 5 / 6)


@pytest.mark.parametrize(
    ("model", "tokens", "sampled", "saved"),
    [
        ("Qwen3-0.6B", 3763, 0.25, 0.045),
        ("Qwen3-4B", 3763, 0.25, 0.094),
        ("Qwen3-14B", 3763, 0.25, 0.120),
        ("Qwen3-4B", 974, 0.098, 0.69),
    ],
)
def test_time_that_shared_prefixes_save_as_measured(
    tmp_path: Path, model: str, tokens: int, sampled: float, saved: float
) -> None:
    """Of a forward and backward pass: conversations that share 14.5 % of their tokens, single completions 75 %."""
    values: dict[str, Any] = {"model_name": f"Qwen/{model}", "per_device_train_batch_size": 8, "num_generations": 6}
    if tokens < 1000:
        values |= {"mode": "simple"}

    def train(**more: Any) -> float:
        settings = settings_with(tmp_path, max_tokens_per_micro_batch=16_384, **values, **more)
        return make_plan(settings, H200, known=Known(tokens, sampled)).use.train

    assert 1 - train() / train(prefix_sharing=False) == pytest.approx(saved, abs=0.03)


def test_the_14b_train_step_as_measured(tmp_path: Path) -> None:
    """One H200: reference pass, forward, backward and AdamW of 24 trajectories of 3,838 tokens, 6,755 tokens/s."""
    settings = settings_with(
        tmp_path, engine="vllm", vllm_urls="http://server", model_name="Qwen/Qwen3-14B", per_device_train_batch_size=4,
        num_generations=6,
    )  # fmt: skip
    seconds = make_plan(settings, H200, known=Known(3838)).use
    assert 92_106 / (seconds.score + seconds.train) == pytest.approx(6755, rel=0.15)


def test_time_and_cost(tmp_path: Path) -> None:
    settings = settings_with(tmp_path, max_steps=10, eval_steps=100)
    made = make_plan(settings, H200, price=3.6)
    seconds = made.use
    of_steps = 10 * (seconds.rollout + seconds.score + seconds.train)
    # Before the first step, after the last, and best_model on other questions.
    assert seconds.run == pytest.approx(of_steps + 3 * seconds.evaluation)
    assert made.cost == pytest.approx(seconds.run * 3.6 / 3600)
    halved = make_plan(settings, H200, known=Known(utilization=seconds.utilization / 2)).use
    assert halved.train == pytest.approx(2 * seconds.train) and halved.rollout == pytest.approx(seconds.rollout)
    assert make_plan(settings_with(tmp_path, beta=0), H200).use.score == 0


def test_vllm_in_process_takes_time_for_a_new_adapter(tmp_path: Path) -> None:
    """To save, load and verify it, and to wake and sleep; transformers samples from the trainer's own."""
    values: dict[str, Any] = {"model_name": "Qwen/Qwen3-4B", "engine": "vllm"}
    asleep = make_plan(settings_with(tmp_path, **values, vllm_enable_sleep="on"), H200).use
    assert asleep.handover == pytest.approx(HANDOVER + WAKING + 8_044_936_192 / MOVED)
    assert asleep.step == pytest.approx(asleep.rollout + asleep.handover + asleep.score + asleep.train)
    assert make_plan(settings_with(tmp_path, **values, vllm_enable_sleep="off"), H200).use.handover == HANDOVER
    assert make_plan(settings_with(tmp_path, **(values | {"engine": "transformers"})), H200).use.handover == 0


@pytest.mark.parametrize(
    ("model", "sleep", "seconds"),
    [("Qwen3-4B", "off", 0.54), ("Qwen3-4B", "on", 1.55), ("Qwen3-14B", "on", 2.51), ("Qwen3-14B", "on", 2.57)],
)
def test_the_time_for_a_new_adapter_as_measured(tmp_path: Path, model: str, sleep: str, seconds: float) -> None:
    """One H200, the adapter in process; waking and sleeping are 0.87 s of it on 4B, 1.71 and 1.70 on 14B."""
    settings = settings_with(tmp_path, engine="vllm", model_name=f"Qwen/{model}", vllm_enable_sleep=sleep)
    assert make_plan(settings, H200).use.handover == pytest.approx(seconds, abs=0.17)


def test_a_whole_step_as_measured(tmp_path: Path) -> None:
    """``docs/evidence/performance.md``: 48 trajectories of 3,597 tokens on 14B, one H200, 53.37 s."""
    values = {"per_device_train_batch_size": 8, "num_generations": 6, "max_model_len": 16384, "engine": "vllm"}
    settings = settings_with(tmp_path, model_name="Qwen/Qwen3-14B", **values)
    made = make_plan(settings, H200, known=Known(3597, 1103 / 3597))
    assert made.use.step == pytest.approx(53.37, rel=0.05)
    assert made.tokens_per_second == pytest.approx(48 * 3597 / made.use.step)


def test_a_step_of_single_completions_as_measured(tmp_path: Path) -> None:
    """4B, one H200: 96 completions of 768 tokens at once, 16.28 s, of which the new adapter, waking and sleeping took
    3.2 then."""
    values = {"per_device_train_batch_size": 12, "num_generations": 8, "max_turns": 1, "max_tokens": 768}
    values |= {"max_batch_trajectories": 256}
    settings = settings_with(tmp_path, model_name="Qwen/Qwen3-4B", engine="vllm", vllm_enable_sleep="on", **values)
    made = make_plan(settings, H200, known=Known(1535, 0.498))
    assert made.use.step - made.use.handover + 3.2 == pytest.approx(16.28, rel=0.05)


def test_seconds_of_sampling_by_hand(tmp_path: Path) -> None:
    values = {"engine": "vllm", "model_name": "Qwen/Qwen3-4B", "eval_dataset_size": 12}
    made = make_plan(settings_with(tmp_path, **values), H200, known=Known(4000))
    # 12 trajectories read 3,000 tokens each, 2 · 36 · 100,925,440 operations a token, at 791.2 TFLOP/s; a fifth is the
    # prompt, which the three of a group read once. A thousand times 36 layers of 0.53 ms.
    a_token = 7_266_631_680 / 791.2e12
    assert made.use.rollout == pytest.approx(36_000 * (13 / 15) * a_token + 1000 * 36 * 0.53e-3, rel=1e-5)
    assert made.use.evaluation == pytest.approx(36_000 * a_token + 1000 * 36 * 0.53e-3, rel=1e-5)
    # A card whose memory is slower waits for weights and half-full caches, at 0.7 of its bandwidth.
    slow = replace(H200, bandwidth=0.6e12)
    moving = (8_044_936_192 + 12 * 2000 * 147_456) / (0.7 * 0.6e12)
    waiting = make_plan(settings_with(tmp_path, **values), slow, known=Known(4000)).use
    assert waiting.evaluation == pytest.approx(36_000 * a_token + 1000 * moving, rel=1e-5)


@pytest.mark.parametrize(
    ("model", "values", "tokens", "sampled", "seconds"),
    [
        ("Qwen3-0.6B", {"engine": "vllm"}, 3000, 480, 7.36),
        ("Qwen3-0.6B", {"engine": "vllm", "vllm_enforce_eager": True}, 3000, 480, 21.9),
        ("Qwen3-0.6B", {}, 3000, 480, 30.1),
        ("Qwen3-4B", {"engine": "vllm"}, 3000, 480, 10.5),
        ("Qwen3-14B", {"engine": "vllm"}, 3822, 1101, 26.2),
        ("Qwen3-14B", {"engine": "vllm"}, 3597, 1103, 25.47),
    ],
)
def test_measured_sampling(
    tmp_path: Path, model: str, values: dict[str, Any], tokens: int, sampled: int, seconds: float
) -> None:
    """48 trajectories of five turns on an H200."""
    given = {"per_device_train_batch_size": 8, "num_generations": 6, "model_name": f"Qwen/{model}"} | values
    made = make_plan(settings_with(tmp_path, **given), H200, known=Known(tokens, sampled / tokens))
    assert made.use.rollout == pytest.approx(seconds, rel=0.06)


@pytest.mark.parametrize(("sleep", "sampling", "update", "step"), [("off", 5.87, 2.20, 8.61), ("on", 5.76, 2.34, 9.64)])
def test_single_completions_as_measured(
    tmp_path: Path, sleep: str, sampling: float, update: float, step: float
) -> None:
    """48 completions of 768 tokens to prompts of 763, H200: no prompt joins later, so CUDA graphs always fit."""
    values = {"model_name": "Qwen/Qwen3-4B", "per_device_train_batch_size": 8, "num_generations": 6, "beta": 0}
    values["vllm_enable_sleep"] = sleep
    settings = settings_with(tmp_path, engine="vllm", max_turns=1, max_tokens=768, **values)
    made = make_plan(settings, H200, known=Known(1531, 768 / 1531))
    assert made.use.rollout == pytest.approx(sampling, rel=0.03)
    assert made.use.train == pytest.approx(update, rel=0.15)
    assert made.use.step == pytest.approx(step, rel=0.05)
    simple = make_plan(
        settings_with(tmp_path, engine="vllm", mode="simple", **values), H200, known=Known(1531, 768 / 1531),
    )  # fmt: skip
    assert simple.use.rollout == pytest.approx(made.use.rollout)


def test_evaluations_play_whole_conversations_in_mode_simple_too(tmp_path: Path) -> None:
    servers = {"engine": "vllm", "vllm_urls": "http://server"}
    for gpus, values in ((1, {}), (1, {"engine": "vllm"}), (2, {"engine": "vllm"}), (2, servers)):
        simple, masked = (
            make_plan(settings_with(tmp_path, model_name="Qwen/Qwen3-4B", mode=mode, **values), H200, num_gpus=gpus)
            for mode in ("simple", "masked")
        )
        assert simple.use.evaluation == pytest.approx(masked.use.evaluation)
        assert simple.use.rollout < masked.use.rollout


def test_a_decode_step_as_measured(tmp_path: Path) -> None:
    """38 rows of 2,680 tokens on 14B took 15.0 ms a step, 7 rows 12.0."""
    for rows, milliseconds in ((38, 14.99), (7, 12.0)):
        values = {"max_turns": 1, "per_device_train_batch_size": 1, "num_generations": rows, "eval_dataset_size": 1}
        settings = settings_with(tmp_path, engine="vllm", model_name="Qwen/Qwen3-14B", max_tokens=160, **values)
        made = make_plan(settings, H200, known=Known(2760, 160 / 2760))
        reading = 2600 * 2 * 40 * 330_301_440 / 791.2e12  # one prompt for all
        assert 1e3 * (made.use.rollout - reading) / 160 == pytest.approx(milliseconds, rel=0.03)


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
def test_passes_before_an_update(tmp_path: Path, values: dict[str, Any], passes: int) -> None:
    assert make_plan(settings_with(tmp_path, **values), H200).job.scoring_passes == passes
