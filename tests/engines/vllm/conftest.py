"""A tiny policy with adapters, servers of it, and engines on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines.vllm_stub import VllmStub
from tiny import make_model

from emailrl.engines import build_engine
from emailrl.engines.base import Completion, Request, SamplingParams
from emailrl.engines.vllm.servers import VllmServers
from emailrl.model.policy import Policy, load_policy
from emailrl.settings import Settings, load_settings

Connect = Callable[..., VllmServers]
Start = Callable[..., Any]
KEPT_ADAPTERS = 3  # MAX_STALENESS + 2, with its default of 1 for servers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("vllm") / "model")


@pytest.fixture(scope="module")
def policy(model: Path) -> Policy:
    return load_policy(load_settings({"model_name": str(model)}, environ={}, cwd=model))


def random_adapter(model: Path, seed: int, *, rank: int = 4) -> Path:
    """The folder of an adapter that changes every linear layer; each other's opinions differ by some tenths."""
    settings = load_settings({"model_name": str(model), "lora_rank": rank}, environ={}, cwd=model)
    one = load_policy(settings, trainable=True)
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in one.trainable_parameters():
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    one.save_adapter(model.parent / f"v-{seed}")
    return model.parent / f"v-{seed}"


@pytest.fixture(scope="module")
def adapters(model: Path) -> list[Path]:
    return [random_adapter(model, seed) for seed in range(KEPT_ADAPTERS + 2)]


@pytest.fixture
def connect(policy: Policy, model: Path) -> Connect:
    """``connect(stub, …)``: an engine on these servers."""

    def build(*stubs: VllmStub, **overrides: Any) -> VllmServers:
        engine = build_engine(settings_for(model, *stubs, **overrides), policy)
        assert isinstance(engine, VllmServers)
        return engine

    return build


@pytest.fixture
def start(policy: Policy, request: pytest.FixtureRequest) -> Iterator[Start]:
    """``start(2)``: two servers. ``start(2, version="v-1")``: an engine on them with the first adapter under that name
    (``""``: with the base model), and the servers."""
    stubs: list[VllmStub] = []

    def begin(count: int = 1, *, version: str | None = None, delay: float = 0.0, **overrides: Any) -> Any:
        new = [VllmStub(policy, delay=delay) for _ in range(count)]
        stubs.extend(new)
        if version is None:
            return new
        engine = request.getfixturevalue("connect")(*new, **overrides)
        engine.load_adapter(request.getfixturevalue("adapters")[0] if version else None, version)
        return engine, *new

    yield begin
    for stub in stubs:
        stub.close()


def settings_for(model: Path, *stubs: VllmStub, **overrides: Any) -> Settings:
    urls = ",".join(stub.url for stub in stubs)
    given = {"model_name": str(model), "engine": "vllm", "vllm_urls": urls, "temperature": 1.0, "vllm_retries": 2,
             "vllm_return_timeout": 0}  # fmt: skip
    return load_settings(given | overrides, environ={}, cwd=model)


def asked(name: str = "a", max_tokens: int = 2, last: int = 7) -> Request:
    """A request for a few tokens."""
    return Request(name, SamplingParams(max_tokens, 1.0), [5, 6, last])


def ask(engine: VllmServers, count: int = 4, *, max_tokens: int = 6) -> list[Completion]:
    sampling = SamplingParams(max_tokens, 1.0)
    return engine.generate([Request(f"t{n}", sampling, [5, 6, 7 + n], seed=n) for n in range(count)])


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]
