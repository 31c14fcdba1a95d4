"""Stubs of vLLM with a tiny real model behind them: a server with its HTTP interface, and the engine in process."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engines.chat_server import StubServer

from emailrl.base.process import bounded
from emailrl.engines.base import Completion, Request, SamplingParams
from emailrl.engines.local.engine import TransformersEngine
from emailrl.engines.local.passes import sampling_weights
from emailrl.engines.renderer import stop_ids
from emailrl.model.logprobs import token_logprobs
from emailrl.model.policy import Policy
from emailrl.settings import Settings, load_settings

BASE = "the-base"


class Model:
    """What samples behind both stubs; log-probabilities are computed apart from the samples."""

    def __init__(self, policy: Policy, stops: Collection[int]) -> None:
        self.engine = TransformersEngine(policy.model, stops, max_rows=8)
        self.weights = sampling_weights(policy.model)

    def sample(
        self, adapter: Path | None, prompts: Sequence[list[int]], sampling: SamplingParams, seed: int, stated: float
    ) -> list[Completion]:
        """A completion of each prompt, with log-probabilities at temperature ``stated``."""
        self.engine.load_adapter(adapter, "x")
        self.weights.load(adapter)
        asked = [Request(str(number), sampling, prompt, seed=seed) for number, prompt in enumerate(prompts)]
        completions = self.engine.generate(asked)
        for prompt, completion in zip(prompts, completions, strict=True):
            tokens = torch.tensor([[*prompt, *completion.token_ids]])
            mask = torch.zeros_like(tokens)
            mask[:, len(prompt) :] = 1
            with torch.inference_mode(), self.weights.active():
                scored = token_logprobs(self.weights.model, tokens, mask, temperature=stated)
            completion.logprobs = scored.logprobs[0, len(prompt) :].tolist()
        return completions

    def read(self, adapter: Path | None, prompt: list[int]) -> list[dict[str, Any] | None]:
        """A prompt's log-probabilities as vLLM writes them, at temperature 1 whatever is asked for."""
        self.weights.load(adapter)
        with torch.inference_mode(), self.weights.active():
            logits = self.weights.model(input_ids=torch.tensor([prompt[:-1]])).logits[0].log_softmax(-1)
        told = zip(prompt[1:], logits, strict=True)
        rows = [{str(i): {"logprob": float(row[i]), "rank": 1, "decoded_token": "x"}} for i, row in told]
        return [None, *rows]


class VllmStub:
    """Serves ``policy``. The attributes after ``served`` make it misbehave; ``paths`` maps adapters to folders."""

    def __init__(self, policy: Policy, *, delay: float = 0.0) -> None:
        self.adapters: dict[str, Path | None] = {BASE: None}
        self.served: list[str] = []  # the model of each completion, probes apart
        self.ignore_adapters = False
        self.adapter_instead: Path | None = None
        self.list_loaded = True
        self.dies_after: int | None = None  # completions until it drops every connection
        self.failures: list[tuple[Any, ...]] = []  # answers to give before it works on
        self.before_loading: Callable[[str], None] = lambda name: None
        """Called with each adapter's name before it is loaded, while other requests are answered."""
        self.untempered = False
        self.window = 2048
        self.tokenizer = policy.tokenizer
        self.model = Model(policy, stop_ids(policy.tokenizer))
        self._lock = threading.Lock()
        self.http = StubServer(self._reply, delay=delay)
        self.url = self.http.url

    @property
    def calls(self) -> list[str]:
        """Paths asked for, in their order."""
        return list(self.http.paths)

    def close(self) -> None:
        self.http.close()

    def _reply(self, body: dict[str, Any]) -> tuple[Any, ...]:
        if body["path"] == "/v1/load_lora_adapter":
            self.before_loading(body["lora_name"])
        with self._lock:
            if self.dies_after is not None and len(self.served) >= self.dies_after:
                return None, None
            path = body["path"]
            if path == "/health":
                return 200, {}
            if path == "/tokenize":
                return 200, {"tokens": self.tokenizer.encode(body["prompt"], add_special_tokens=False)}
            if path == "/v1/models":
                return 200, {"data": [self._listed(name) for name in self.adapters]}
            if path == "/v1/load_lora_adapter":
                return self._load(body)
            if path == "/v1/unload_lora_adapter":
                known = self.adapters.pop(body["lora_name"], None) is not None
                return (200, {}) if known else (404, {"error": {"message": "The lora adapter cannot be found."}})
            return self._complete(body)

    def _listed(self, name: str) -> dict[str, Any]:
        path, length = self.adapters[name], self.window if name == BASE else None
        return {"id": name, "parent": None if path is None else BASE, "max_model_len": length}

    def _load(self, body: dict[str, Any]) -> tuple[Any, ...]:
        name, path = body["lora_name"], Path(body["lora_path"])
        if name in self.adapters:
            return 400, {"error": {"message": f"The lora adapter '{name}' has already been loaded."}}
        if not path.is_dir():
            return 404, {"error": {"message": f"No adapter found for {path}"}}
        if self.list_loaded:
            self.adapters[name] = path
        return 200, {}

    def _complete(self, body: dict[str, Any]) -> tuple[Any, ...]:
        if self.failures:
            return self.failures.pop(0)
        name = body["model"]
        if name not in self.adapters:
            return 404, {"error": {"message": f"The model `{name}` does not exist."}}
        if not body.get("return_tokens_as_token_ids"):
            return 400, {"error": {"message": "Unable to get tokenizer because `skip_tokenizer_init=True`"}}
        path = None if self.ignore_adapters else self.adapter_instead or self.adapters[name]
        if "prompt_logprobs" in body:
            return 200, {"model": name, "choices": [{"prompt_logprobs": self.model.read(path, body["prompt"])}]}
        is_batch = isinstance(body["prompt"][0], list)
        prompts = body["prompt"] if is_batch else [body["prompt"]]
        sampling = SamplingParams(body["max_tokens"], body["temperature"])
        stated = 1.0 if self.untempered else body["temperature"]
        completions = self.model.sample(path, prompts, sampling, body["seed"], stated)
        choices = []
        for prompt, one in zip(prompts, completions, strict=True):
            ids = {"token_ids": one.token_ids, "prompt_token_ids": prompt, "finish_reason": one.finish_reason}
            choices.append(ids | {"logprobs": {"token_logprobs": one.logprobs}})
        if not is_batch:
            self.served.append(name)
        return 200, {"model": name, "choices": choices}


def settings_for(folder: Path, **overrides: Any) -> Settings:
    given = {"engine": "vllm", "model_name": str(folder), "temperature": 1.0, "lora_rank": 4}
    return load_settings(given | overrides, environ={}, cwd=folder)


class StandIn:
    """An ``LLMEngine`` over a tiny model that ends one request a step. ``log`` keeps what was asked of it; once it
    ``ignores`` adapters it samples from the base model."""

    policy: Policy
    started: list[StandIn] = []  # noqa: RUF012

    def __init__(self, arguments: SimpleNamespace) -> None:
        random.seed(0)  # as vLLM does
        np.random.seed(0)
        torch.manual_seed(0)
        self.arguments = arguments
        window, may_sleep = arguments.max_model_len or 2048, arguments.enable_sleep_mode
        self.model_config = SimpleNamespace(max_model_len=window, enable_sleep_mode=may_sleep)
        self.vllm_config = SimpleNamespace(lora_config=SimpleNamespace(max_lora_rank=arguments.max_lora_rank))
        self.scheduler = SimpleNamespace(update_from_output=lambda scheduled, output: {})
        core = SimpleNamespace(scheduler=self.scheduler)
        self.engine_core = SimpleNamespace(shutdown=lambda: self.log.append("shutdown"), engine_core=core)
        self.log: list[Any] = []
        self.ignores = False
        self.waiting: dict[str, tuple[list[int], Any, Any]] = {}
        self._model = Model(self.policy, [1])
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

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any, lora_request: Any) -> None:
        assert not self._asleep
        self.waiting[name] = prompt["prompt_token_ids"], params, lora_request

    def step(self) -> list[Any]:
        name, (ids, params, lora) = next(iter(self.waiting.items()))
        del self.waiting[name]
        path = None if lora is None or self.ignores else Path(lora.lora_path)
        sampling = SamplingParams(params.max_tokens, params.temperature)
        [said] = self._model.sample(path, [ids], sampling, params.seed, params.temperature)
        scheduled = SimpleNamespace(
            num_scheduled_tokens={name: len(ids)}, total_num_scheduled_tokens=len(ids),
            scheduled_spec_decode_tokens={}, preempted_req_ids=None,
        )  # fmt: skip
        self.scheduler.update_from_output(scheduled, SimpleNamespace(sampled_token_ids=[said.token_ids]))
        entries = [{i: SimpleNamespace(logprob=v)} for i, v in zip(said.token_ids, said.logprobs, strict=True)]
        output = SimpleNamespace(token_ids=said.token_ids, logprobs=entries, finish_reason=said.finish_reason)
        return [SimpleNamespace(request_id=name, finished=True, outputs=[output])]


def install(monkeypatch: pytest.MonkeyPatch, policy: Policy) -> None:
    """Put the stand-in where vLLM is imported from, sampling from the policy's base model."""
    StandIn.policy, StandIn.started = policy, []
    modules: dict[str, dict[str, Any]] = {
        "vllm": {"EngineArgs": SimpleNamespace, "SamplingParams": SimpleNamespace},
        "vllm.usage": {},
        "vllm.usage.usage_lib": {"UsageContext": SimpleNamespace(LLM_CLASS="offline")},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.llm_engine": {"LLMEngine": StandIn},
        "vllm.lora": {},
        "vllm.lora.request": {
            "LoRARequest": lambda _, number, path: SimpleNamespace(lora_int_id=number, lora_path=path)
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
