"""vLLM in process without vLLM: its arguments, and sleep, wake and proof over a stand-in with a tiny real model.

What only vLLM itself can show is in ``test_vllm_real``."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines.vllm.conftest import ask, asked, random_adapter, tokens
from engines.vllm_stub import StandIn, install, settings_for

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.engines import build_engine, check_engine
from emailrl.engines.base import Completion, Request, SamplingParams
from emailrl.engines.local.engine import TransformersEngine
from emailrl.engines.vllm.local import VllmEngine
from emailrl.engines.vllm.probe import ProbeError
from emailrl.model.policy import Policy


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch, policy: Policy) -> list[StandIn]:
    """Put the stand-in where vLLM is imported from; the engines that were started."""
    install(monkeypatch, policy)
    return StandIn.started


Build = Callable[..., VllmEngine]


@pytest.fixture
def build(vllm: list[StandIn], policy: Policy) -> Build:
    def make(*, sleeps: bool = True, **overrides: Any) -> VllmEngine:
        engine = build_engine(settings_for(Path(policy.path), **overrides), policy)
        assert isinstance(engine, VllmEngine)
        engine.can_sleep = sleeps  # as on a GPU
        return engine

    return make


def test_it_samples_as_the_other_in_process_engine_and_stamps(
    build: Build, policy: Policy, adapters: list[Path], vllm: list[StandIn]
) -> None:
    engine, own = build(), TransformersEngine(policy.model, [1], max_rows=4)
    for number in (0, 1):
        for each in (engine, own):
            each.load_adapter(adapters[number], f"v-{number}")
        for one, other in zip(ask(engine, 3), ask(own, 3), strict=True):
            assert one.token_ids == other.token_ids and one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
            stamps = one.policy_version, one.adapter_sha256, one.prompt_tokens
            assert stamps == (other.policy_version, other.adapter_sha256, 3)
    assert [entry for entry in vllm[0].log if entry[0] in ("add_lora", "remove_lora")] == [
        ("add_lora", 1, "v-0"), ("remove_lora", 1), ("add_lora", 2, "v-1"),
    ]  # fmt: skip


def test_it_sleeps_wakes_and_lets_the_adapter_prove_itself_again(
    build: Build, adapters: list[Path], vllm: list[StandIn]
) -> None:
    def nap() -> None:
        engine.release()
        engine.resume()

    engine = build()
    engine.load_adapter(adapters[0], "v-0")
    before = ask(engine, 3)
    [started] = vllm
    started.log.clear()
    nap()
    assert tokens(ask(engine, 3)) == tokens(before)
    assert started.log == [
        "reset_prefix_cache", ("sleep", 1), "wake_up", "reset_prefix_cache", ("remove_lora", 1), ("add_lora", 2, "v-0"),
    ]  # fmt: skip
    nap()
    engine.load_adapter(adapters[1], "v-1")  # the next version replaces the old one at once
    assert started.log[-2:] == [("remove_lora", 2), ("add_lora", 3, "v-1")]
    nap()
    started.ignores = True  # as if the wake had damaged it
    with pytest.raises(ProbeError, match="vLLM is not sampling from the adapter it was given"):
        ask(engine, 3)
    engine.release()
    engine.close()
    assert started.log[-2:] == ["wake_up", "shutdown"]  # what sleeps cannot be freed


def test_without_a_gpu_it_says_that_it_cannot_sleep_and_starting_leaves_the_global_generators_alone(
    build: Build, adapters: list[Path], vllm: list[StandIn], capsys: pytest.CaptureFixture[str]
) -> None:
    def seed_and_draw(meanwhile: Callable[[], object]) -> tuple[float, float, float]:
        random.seed(5), np.random.seed(5), torch.manual_seed(5)
        meanwhile()
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    engine = build(sleeps=False)
    assert "vLLM cannot sleep without a GPU" in capsys.readouterr().err
    undisturbed = seed_and_draw(lambda: None)
    assert seed_and_draw(lambda: engine.load_adapter(adapters[0], "v-0")) == undisturbed and len(vllm) == 1
    engine.release()
    engine.resume()
    ask(engine, 1)
    assert not any("sleep" in entry for entry in vllm[0].log)
    build(sleeps=False, vllm_enable_sleep=False)
    assert capsys.readouterr().err == ""


def test_there_must_be_room_for_an_adapter(build: Build, adapters: list[Path], vllm: list[StandIn]) -> None:
    engine, wide = build(), random_adapter(adapters[0].parent / "model", 20, rank=20)
    engine.load_adapter(adapters[0], "v-0")
    assert vllm[0].arguments.max_lora_rank == 8
    with pytest.raises(UsageError, match=r"up to rank 8, but .* has rank 20\. Set LORA_RANK=20"):
        engine.load_adapter(wide, "v-2")
    build().load_adapter(wide, "v-2")  # the first one makes room for itself
    roomy = build(lora_rank=20)
    for path in (adapters[0], wide):
        roomy.load_adapter(path, "v")
    assert vllm[1].arguments.max_lora_rank == vllm[2].arguments.max_lora_rank == 32


def test_follow_ups_join_at_once_and_an_interrupt_leaves_nothing_behind(build: Build, vllm: list[StandIn]) -> None:
    engine = build(max_model_len=40)
    order: list[str] = []

    def advance(completion: Completion) -> Request | None:
        order.append(f"{completion.trajectory_id} {completion.finish_reason}")
        if completion.trajectory_id == "b":
            assert len(vllm[0].waiting) == 1  # the next turn of a is under way already
            raise KeyboardInterrupt
        return asked() if completion.trajectory_id == "a" else None

    full = Request("full", SamplingParams(2, 1.0), [5] * 40)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([full, asked("a"), asked("b")], advance)
    assert order == ["full length", "a length", "b length"]
    assert vllm[0].waiting == {} and ask(engine, 1)[0].error is None


def test_a_missing_vllm_and_ranks_that_do_not_divide_are_told(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(**overrides: Any) -> None:
        check_engine(settings_for(Path(policy.path), **overrides), trainable=True)

    monkeypatch.setattr("emailrl.base.install.find_spec", lambda name: None if name == "vllm" else name)
    with pytest.raises(EmailRLError, match=r"not installed\. Run: .*pip install 'vllm"):
        check()
    monkeypatch.setattr("emailrl.base.install.find_spec", lambda name: name)
    with pytest.raises(UsageError, match="unsloth backend does not work with vLLM in the same process"):
        check(backend="unsloth")
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=r"3 ranks on a host .* VLLM_TENSOR_PARALLEL_SIZE=2\. Start a multiple of 2"):
        check(vllm_tensor_parallel_size=2)
    check(vllm_tensor_parallel_size=3)
