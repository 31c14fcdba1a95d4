"""A vLLM server for tests: the HTTP interface of one, with a tiny real model behind it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from engines.chat_server import StubServer

from emailrl.engines.base import Completion, Request, SamplingParams
from emailrl.engines.local.engine import TransformersEngine
from emailrl.engines.local.weights import sampling_weights
from emailrl.engines.renderer import stop_ids
from emailrl.model.logprobs import token_logprobs
from emailrl.model.policy import Policy

BASE = "the-base"


class VllmStub:
    """Serves ``policy``. The attributes after ``served`` make it misbehave; ``paths`` maps adapters to folders."""

    def __init__(self, policy: Policy, *, delay: float = 0.0) -> None:
        self.adapters: dict[str, Path | None] = {BASE: None}
        self.served: list[str] = []
        """The model of each completion, probes apart."""
        self.ignore_adapters = False
        self.adapter_instead: Path | None = None
        self.list_loaded = True
        self.dies_after: int | None = None
        """Completions until it drops every connection."""
        self.failures: list[tuple[Any, ...]] = []
        """Answers to give before it works on."""
        self.before_loading: Callable[[str], None] = lambda name: None
        """Called with each adapter's name before it is loaded, while other requests are answered."""
        self.untempered = False
        self.window = 2048
        self._policy = policy
        self.engine = TransformersEngine(policy.model, stop_ids(policy.tokenizer), max_rows=8)
        self._weights = sampling_weights(policy.model)
        self._lock = threading.Lock()
        self.http = StubServer(self._reply, delay=delay)
        self.url = self.http.url

    @property
    def calls(self) -> list[str]:
        """Paths asked for, in their order."""
        return [path for path, _ in self.http.requests]

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
        self.engine.load_adapter(path, name)
        self._weights.load(path)
        batch = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        sampling = SamplingParams(body["max_tokens"], body["temperature"])
        asked = [Request(str(n), sampling, prompt, seed=body["seed"]) for n, prompt in enumerate(batch)]
        completions = self.engine.generate(asked)
        choices = [self._choice(body, *pair) for pair in zip(batch, completions, strict=True)]
        if not isinstance(body["prompt"][0], list):
            self.served.append(name)
        return 200, {"model": name, "choices": choices}

    def _choice(self, body: dict[str, Any], prompt: list[int], completion: Completion) -> dict[str, Any]:
        temperature = 1.0 if self.untempered else body["temperature"]
        sampled = completion.token_ids
        return {
            "finish_reason": completion.finish_reason,
            "token_ids": sampled,
            "prompt_token_ids": prompt,
            "logprobs": {"token_logprobs": self._score([*prompt, *sampled], len(prompt), temperature)},
        }

    def _score(self, ids: list[int], start: int, temperature: float) -> list[float]:
        tokens = torch.tensor([ids])
        mask = torch.zeros_like(tokens)
        mask[:, start:] = 1
        with torch.inference_mode(), self._weights.active():
            scored = token_logprobs(self._weights.model, tokens, mask, temperature=temperature)
        return scored.logprobs[0, start:].tolist()
