"""A stand-in for vLLM in this process, with a tiny real model."""

from __future__ import annotations

import random
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from emailrl.base.process import bounded
from emailrl.engines.base import Request, SamplingParams
from emailrl.engines.local.engine import TransformersEngine
from emailrl.engines.local.weights import sampling_weights
from emailrl.model.logprobs import token_logprobs
from emailrl.model.policy import Policy
from emailrl.settings import Settings, load_settings


def settings_for(folder: Path, **overrides: Any) -> Settings:
    given = {"engine": "vllm", "model_name": str(folder), "temperature": 1.0, "lora_rank": 4}
    return load_settings(given | overrides, environ={}, cwd=folder)


class Params(SimpleNamespace):
    """``vllm.SamplingParams``."""


class StandIn:
    """An ``LLMEngine`` over a tiny model that ends one request a step.

    ``log`` keeps what was asked of it; once it ``ignores`` adapters it samples from the base model.
    """

    policy: Policy
    started: list[StandIn] = []  # noqa: RUF012

    def __init__(self, arguments: SimpleNamespace) -> None:
        random.seed(0)  # as vLLM does
        np.random.seed(0)
        torch.manual_seed(0)
        self.arguments = arguments
        self.model_config = SimpleNamespace(
            max_model_len=arguments.max_model_len or 2048, enable_sleep_mode=arguments.enable_sleep_mode
        )
        self.vllm_config = SimpleNamespace(lora_config=SimpleNamespace(max_lora_rank=arguments.max_lora_rank))
        self.scheduler = SimpleNamespace(update_from_output=lambda scheduled, output: {})
        core = SimpleNamespace(scheduler=self.scheduler)
        self.engine_core = SimpleNamespace(shutdown=lambda: self.log.append("shutdown"), engine_core=core)
        self.log: list[Any] = []
        self.ignores = False
        self.waiting: dict[str, tuple[list[int], Params, Any]] = {}
        self._weights = sampling_weights(self.policy.model)
        self._sampler = TransformersEngine(self.policy.model, [1], max_rows=8)
        self._asleep = False
        StandIn.started.append(self)

    @classmethod
    def from_engine_args(cls, arguments: Any, *, usage_context: str) -> StandIn:
        assert usage_context == "offline"  # what gives vLLM's own defaults of vllm.LLM
        return cls(arguments)

    def add_lora(self, request: Any) -> bool:
        self.log.append(("add_lora", request.lora_int_id, Path(request.lora_path).name))
        return True

    def remove_lora(self, number: int) -> None:
        self.log.append(("remove_lora", number))

    def reset_prefix_cache(self) -> None:
        self.log.append("reset_prefix_cache")

    def sleep(self, level: int) -> None:
        self._asleep = True
        self.log.append(("sleep", level))

    def wake_up(self) -> None:
        self._asleep = False
        self.log.append("wake_up")

    def is_sleeping(self) -> bool:
        return self._asleep

    def abort_request(self, names: list[str]) -> None:
        self.log.append(("abort", names))
        for name in names:
            self.waiting.pop(name, None)

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Params, lora_request: Any) -> None:
        assert not self._asleep
        self.waiting[name] = prompt["prompt_token_ids"], params, lora_request

    def step(self) -> list[Any]:
        name, (ids, params, lora) = next(iter(self.waiting.items()))
        del self.waiting[name]
        path = None if lora is None or self.ignores else Path(lora.lora_path)
        self._sampler.load_adapter(path, "x")
        self._weights.load(path)
        sampling = SamplingParams(params.max_tokens, params.temperature)
        [said] = self._sampler.generate([Request("x", sampling, ids, seed=params.seed)])
        scheduled = SimpleNamespace(
            num_scheduled_tokens={name: len(ids)}, total_num_scheduled_tokens=len(ids),
            scheduled_spec_decode_tokens={}, preempted_req_ids=None,
        )  # fmt: skip
        self.scheduler.update_from_output(scheduled, SimpleNamespace(sampled_token_ids=[said.token_ids]))
        logprobs = self._entries([*ids, *said.token_ids], len(ids), params.temperature)
        output = SimpleNamespace(token_ids=said.token_ids, logprobs=logprobs, finish_reason=said.finish_reason)
        return [SimpleNamespace(request_id=name, finished=True, outputs=[output])]

    def _entries(self, ids: list[int], start: int, temperature: float) -> list[dict[int, Any]]:
        tokens = torch.tensor([ids])
        mask = torch.zeros_like(tokens)
        mask[:, start:] = 1
        with torch.inference_mode(), self._weights.active():
            scored = token_logprobs(self._weights.model, tokens, mask, temperature=temperature).logprobs[0, start:]
        return [{i: SimpleNamespace(logprob=v)} for i, v in zip(ids[start:], scored.tolist(), strict=True)]


def install(monkeypatch: pytest.MonkeyPatch, policy: Policy) -> None:
    """Put the stand-in where vLLM is imported from, sampling from the policy's base model."""
    StandIn.policy, StandIn.started = policy, []
    modules: dict[str, dict[str, Any]] = {
        "vllm": {"EngineArgs": SimpleNamespace, "SamplingParams": Params},
        "vllm.usage": {},
        "vllm.usage.usage_lib": {"UsageContext": SimpleNamespace(LLM_CLASS="offline")},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.llm_engine": {"LLMEngine": StandIn},
        "vllm.lora": {},
        "vllm.lora.request": {
            "LoRARequest": lambda name, number, path: SimpleNamespace(
                lora_name=name, lora_int_id=number, lora_path=path
            )
        },
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(FINAL_ONLY="final")},
        "vllm.distributed": {},
        "vllm.distributed.parallel_state": {"cleanup_dist_env_and_memory": lambda: None},
    }
    for name, attributes in modules.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__dict__.update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    # Past its limit it ends the process, and the garbage of many tests takes long to collect on a busy machine.
    monkeypatch.setattr("emailrl.engines.vllm.local.bounded", partial(bounded, 120))
