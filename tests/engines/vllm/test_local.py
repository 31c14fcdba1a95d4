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
from engines.vllm.conftest import random_adapter
from engines.vllm_stub import StandIn, install, settings_for

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.engines import build_engine, check_engine
from emailrl.engines.base import Completion, Request, SamplingParams
from emailrl.engines.local.engine import TransformersEngine
from emailrl.engines.vllm.local import VllmEngine
from emailrl.engines.vllm.probe import ProbeError
from emailrl.model.policy import Policy
from emailrl.settings import load_settings


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch, policy: Policy) -> list[StandIn]:
    """Put the stand-in where vLLM is imported from; the engines that were started."""
    install(monkeypatch, policy)
    return StandIn.started


@pytest.fixture
def build(vllm: list[StandIn], policy: Policy) -> Callable[..., VllmEngine]:
    def make(*, sleeps: bool = True, **overrides: Any) -> VllmEngine:
        engine = build_engine(settings_for(Path(policy.path), **overrides), policy)
        assert isinstance(engine, VllmEngine)
        engine.can_sleep = sleeps  # as on a GPU
        return engine

    return make


def ask(engine: VllmEngine, count: int = 3) -> list[Completion]:
    return engine.generate([Request(f"t{n}", SamplingParams(6, 1.0), [5, 6, 7 + n], seed=n) for n in range(count)])


def test_it_samples_as_the_other_in_process_engine_and_stamps(
    build: Callable[..., VllmEngine], policy: Policy, adapters: list[Path], vllm: list[StandIn]
) -> None:
    engine, own = build(), TransformersEngine(policy.model, [1], max_rows=4)
    for path, version in ((adapters[0], "v-0"), (adapters[1], "v-1")):
        engine.load_adapter(path, version)
        own.load_adapter(path, version)
        for one, other in zip(ask(engine), ask(own), strict=True):  # type: ignore[arg-type]
            assert one.token_ids == other.token_ids and one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
            stamps = one.policy_version, one.adapter_sha256, one.prompt_tokens
            assert stamps == (other.policy_version, other.adapter_sha256, 3)
    [started] = vllm
    assert [entry for entry in started.log if entry[0] in ("add_lora", "remove_lora")] == [
        ("add_lora", 1, "v-0"), ("remove_lora", 1), ("add_lora", 2, "v-1"),
    ]  # fmt: skip


def test_it_sleeps_wakes_and_lets_the_adapter_prove_itself_again(
    build: Callable[..., VllmEngine], adapters: list[Path], vllm: list[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build()
    engine.load_adapter(adapters[0], "v-0")
    before = ask(engine)
    [started] = vllm
    started.log.clear()
    engine.release()
    engine.resume()
    after = ask(engine)
    assert [c.token_ids for c in after] == [c.token_ids for c in before]
    assert started.log == [
        "reset_prefix_cache", ("sleep", 1), "wake_up", "reset_prefix_cache", ("remove_lora", 1), ("add_lora", 2, "v-0"),
    ]  # fmt: skip
    engine.release()
    engine.resume()
    engine.load_adapter(adapters[1], "v-1")  # the next version replaces the old one at once
    assert started.log[-2:] == [("remove_lora", 2), ("add_lora", 3, "v-1")]
    engine.release()
    engine.resume()
    started.ignores = True  # as if the wake had damaged it
    with pytest.raises(ProbeError, match="vLLM is not sampling from the adapter it was given"):
        ask(engine)
    engine.release()
    engine.close()
    assert started.log[-2:] == ["wake_up", "shutdown"]  # what sleeps cannot be freed


def test_without_a_gpu_it_says_that_it_cannot_sleep(
    build: Callable[..., VllmEngine], adapters: list[Path], vllm: list[StandIn], capsys: pytest.CaptureFixture[str]
) -> None:
    engine = build(sleeps=False)
    assert "vLLM cannot sleep without a GPU" in capsys.readouterr().err
    engine.load_adapter(adapters[0], "v-0")
    engine.release()
    engine.resume()
    ask(engine)
    assert not any("sleep" in entry for entry in vllm[0].log)
    build(sleeps=False, vllm_enable_sleep=False)
    assert capsys.readouterr().err == ""


def test_starting_leaves_the_global_generators_alone(
    build: Callable[..., VllmEngine], adapters: list[Path], vllm: list[StandIn]
) -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    undisturbed = draw()
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    build().load_adapter(adapters[0], "v-0")
    assert len(vllm) == 1 and draw() == undisturbed


def test_there_must_be_room_for_an_adapter(
    build: Callable[..., VllmEngine], adapters: list[Path], vllm: list[StandIn]
) -> None:
    engine, wide = build(), random_adapter(adapters[0].parent / "model", 20, rank=20)
    engine.load_adapter(adapters[0], "v-0")
    assert vllm[0].arguments.max_lora_rank == 8
    with pytest.raises(UsageError, match=r"up to rank 8, but .* has rank 20\. Set LORA_RANK=20"):
        engine.load_adapter(wide, "v-2")
    build().load_adapter(wide, "v-2")  # the first one makes room for itself
    roomy = build(lora_rank=20)
    roomy.load_adapter(adapters[0], "v-0")
    roomy.load_adapter(wide, "v-2")
    assert vllm[1].arguments.max_lora_rank == vllm[2].arguments.max_lora_rank == 32


def test_follow_ups_join_at_once_and_an_interrupt_leaves_nothing_behind(
    build: Callable[..., VllmEngine], vllm: list[StandIn]
) -> None:
    engine = build(max_model_len=40)
    order: list[str] = []

    def advance(completion: Completion) -> Request | None:
        order.append(f"{completion.trajectory_id} {completion.finish_reason}")
        if completion.trajectory_id == "b":
            assert len(vllm[0].waiting) == 1  # the next turn of a is under way already
            raise KeyboardInterrupt
        return Request("a", SamplingParams(2, 1.0), [5, 6]) if completion.trajectory_id == "a" else None

    full = Request("full", SamplingParams(2, 1.0), [5] * 40)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([full, *(Request(name, SamplingParams(2, 1.0), [5, 6]) for name in "ab")], advance)
    assert order == ["full length", "a length", "b length"]
    assert vllm[0].waiting == {} and ask(engine, 1)[0].error is None


def test_a_missing_vllm_and_ranks_that_do_not_divide_are_told(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("emailrl.engines.vllm.arguments.find_spec", lambda name: None)
    with pytest.raises(EmailRLError, match=r"not installed\. Run in the clone: pip install -e '\.\[vllm\]'"):
        build_engine(settings_for(Path(policy.path)), policy)
    monkeypatch.setattr("emailrl.engines.vllm.arguments.find_spec", lambda name: name)
    given = {"engine": "vllm", "backend": "unsloth"}
    unsloth = load_settings(given, environ={}, cwd=tmp_path)
    with pytest.raises(UsageError, match="unsloth backend does not work with vLLM in the same process"):
        check_engine(unsloth, trainable=True)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(UsageError, match=r"3 ranks on a host .* VLLM_TENSOR_PARALLEL_SIZE=2\. Start a multiple of 2"):
        build_engine(settings_for(Path(policy.path), vllm_tensor_parallel_size=2), policy)
    build_engine(settings_for(Path(policy.path), vllm_tensor_parallel_size=3), policy)
