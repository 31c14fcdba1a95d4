"""vLLM in this process, on the trainer's GPU: it samples while the trainer waits, and sleeps while the trainer works.
With several ranks, each group of VLLM_TENSOR_PARALLEL_SIZE neighbors shares one engine (vLLM's ``external_launcher``):
they start and stop it together, and make the same calls in the same order. Adapters are loaded under a new id for each
version and after each wake, never merged or updated in place, and their log-probabilities are verified before sampling
(``probe``): vLLM has served stale and damaged adapters (#42125, #53888)."""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.process import bounded
from emailrl.checkpoints import read_adapter_config
from emailrl.engines.base import Advance, Completion, Ended, Request, SamplingParams, report
from emailrl.engines.vllm.arguments import Trainer, capture_sizes, engine_arguments, sleeps
from emailrl.engines.vllm.probe import Probe
from emailrl.model.policy import Policy, card_bytes
from emailrl.settings import PolicySettings

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that no other process holds the GPU
    "VLLM_HOST_IP": "127.0.0.1",  # workers have hung at startup without it
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout belongs to --json
}


class VllmEngine:
    """Samples from ``policy``'s base model in vLLM, until ``load_adapter`` sets a version. vLLM starts with the first
    adapter or request, so that it can make room for the adapter's rank. ``check_vllm`` checks the preconditions."""

    def __init__(self, settings: PolicySettings, policy: Policy, probe: Probe, stop_ids: Collection[int]) -> None:
        self._settings, self._probe, self._stop_ids = settings, probe, sorted(stop_ids)
        self._model, self._dtype = str(policy.path), str(policy.dtype).removeprefix("torch.")
        self._lora_rank: int = policy.lora.get("rank") or settings.lora.lora_rank
        self.can_sleep = policy.device.type == "cuda"
        card = card_bytes(policy.device)
        self._graphs = capture_sizes(settings.agent, settings.vllm, card)
        self._may_sleep = sleeps(settings.agent, settings.vllm, Trainer.of(policy, settings.training), card)
        if self._may_sleep and not self.can_sleep:
            report("vLLM cannot sleep without a GPU: it holds its memory during training.")
        self._engine: Any = None
        self._lora: Any = None
        self._loras = self._requests = self.steps = 0
        self._path: Path | None = None
        self._proven = False
        self.version = ""
        self.adapter_sha256: str | None = None

    def load_adapter(self, path: Path | None, version: str) -> None:
        """Sample from the adapter in ``path`` (None: the bare base model) from now on, once it is verified. Raises
        ProbeError if verification fails, UsageError if its rank is too large."""
        self._path = None if path is None else path.absolute()
        self.version, self._proven = version, False
        self._prove()

    def generate(self, requests: Sequence[Request], advance: Advance | None = None) -> list[Completion]:
        """See ``Engine.generate``."""
        if not self._proven:
            self._prove()
        running: dict[str, tuple[int, Request, float]] = {}
        ended = Ended(advance, self.version, self.adapter_sha256)

        def begin(place: int, request: Request | None) -> None:
            while request is not None:
                tokens = len(request.prompt_ids)
                room = int(self._engine.model_config.max_model_len) - tokens
                if room >= 1:
                    params = self._params(request.sampling, request.seed, min(request.sampling.max_tokens, room))
                    running[self._add(request.prompt_ids, params)] = place, request, time.perf_counter()
                    return
                full = Completion(request.trajectory_id, [], [], "length", prompt_tokens=tokens)
                request = ended.add(place, full)

        try:
            for place, request in enumerate(requests):
                begin(place, request)
            while running:
                for output in self._step():
                    place, request, started = running.pop(output.request_id)
                    drawn, seconds = output.outputs[0], time.perf_counter() - started
                    ids, reason, error = list(drawn.token_ids), str(drawn.finish_reason), None
                    if reason not in ("stop", "length"):
                        reason, error = "error", f"vLLM ended a completion by {drawn.finish_reason!r}"
                    parts = request.trajectory_id, ids, logprobs_of(drawn), reason, seconds, len(request.prompt_ids)
                    begin(place, ended.add(place, Completion(*parts, error=error)))
        except BaseException:
            self._engine.abort_request(list(running))
            raise
        return ended.completions()

    def release(self) -> None:
        """Sleep (level 1: weights to host memory, cache dropped) while the trainer works."""
        if self._engine is not None and self._sleeps:
            self._engine.reset_prefix_cache()
            self._engine.sleep(level=1)

    def resume(self) -> None:
        """Wake; the adapter is loaded and verified again before sampling."""
        if self._engine is not None and self._wake():
            self._engine.reset_prefix_cache()
            self._proven = False

    def close(self) -> None:
        """Stop vLLM and free its memory; if it hangs, the process ends (``bounded``). It also destroys the
        torch.distributed process group, so ranks must leave it first."""
        if self._engine is None:
            return
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        with bounded():
            self._wake()  # sleeping memory is unmapped: freeing it is an invalid argument to CUDA
            self._engine.engine_core.shutdown()
            self._engine, self._lora, self._proven = None, None, False
            gc.collect()
            cleanup_dist_env_and_memory()

    @property
    def _sleeps(self) -> bool:
        return bool(self._engine.model_config.enable_sleep_mode)

    def _wake(self) -> bool:
        """Wake vLLM if it sleeps; returns whether it did."""
        if not self._sleeps or not self._engine.is_sleeping():
            return False
        gc.collect()
        torch.cuda.empty_cache()  # vLLM needs the memory cached by the trainer's allocator
        self._engine.wake_up()
        return True

    def _start(self) -> None:
        os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
        from vllm import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        rank = max(self._lora_rank, read_adapter_config(self._path)["r"] if self._path else 0)
        arguments = engine_arguments(
            self._settings,
            model=self._model,
            dtype=self._dtype,
            lora_rank=rank,
            on_gpu=self.can_sleep,
            sleeps=self._may_sleep,
            graphs=self._graphs,
        )
        try:
            engine_args = EngineArgs(**arguments)
        except TypeError as error:
            raise UsageError(f"vLLM does not take an argument of VLLM_ENGINE_ARGS: {error}.") from error
        # vLLM seeds the global generators, and a run's draws must not depend on it.
        python, numpy = random.getstate(), np.random.get_state()
        try:
            with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
                # As for vllm.LLM, prompts are read in steps of 8,192 or 16,384 tokens; without a context in 2,048.
                self._engine = LLMEngine.from_engine_args(engine_args, usage_context=UsageContext.LLM_CLASS)
        except (RuntimeError, ValueError, OSError) as error:
            reason = " ".join(str(error).split())[:300]
            hint = "Try another VLLM_GPU_MEMORY_UTILIZATION or MAX_MODEL_LEN, or VLLM_ENFORCE_EAGER=true."
            raise EmailRLError(f"vLLM failed to start: {reason}", hint) from error
        finally:
            random.setstate(python)
            np.random.set_state(numpy)

    def _prove(self) -> None:
        """Load the current adapter into vLLM under a new id, and compare its log-probabilities with the trainer's."""
        expected = self._probe.load(self._path)  # also checks its files before vLLM reads them
        if self._engine is None:
            self._start()
        from vllm.lora.request import LoRARequest

        if self._lora is not None:
            self._engine.remove_lora(self._lora.lora_int_id)
            self._lora = None
        if self._path is not None:
            rank, room = read_adapter_config(self._path)["r"], self._engine.vllm_config.lora_config.max_lora_rank
            if rank > room:
                what = f"vLLM was started for adapters up to rank {room}, but {self._path} has rank {rank}."
                raise UsageError(what, f"Set LORA_RANK={rank}.")
            self._loras += 1
            request = LoRARequest(f"{self.version}-{self._loras}", self._loras, str(self._path))
            if not self._engine.add_lora(request):
                raise EmailRLError(f"vLLM did not load the adapter {self._path}.")
            self._lora = request
        agent = self._settings.agent
        params = self._params(SamplingParams(1, agent.temperature, agent.top_p, agent.top_k), 0, 1)
        names = [self._add(prefix, params) for prefix in self._probe.prefixes]
        drawn: dict[str, Any] = {}
        while len(drawn) < len(names):
            drawn |= {output.request_id: output.outputs[0] for output in self._step()}
        tokens = [drawn[name].token_ids[0] for name in names]
        self._probe.check("vLLM", tokens, [logprobs_of(drawn[name])[0] for name in names], expected)
        self.adapter_sha256, self._proven = expected.adapter_sha256, True

    def _params(self, sampling: SamplingParams, seed: int, max_tokens: int) -> Any:
        from vllm import SamplingParams as Params
        from vllm.sampling_params import RequestOutputKind

        drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k, "seed": seed}
        told = {"logprobs": 0, "detokenize": False, "output_kind": RequestOutputKind.FINAL_ONLY}
        return Params(max_tokens=max_tokens, stop_token_ids=self._stop_ids, **drawn, **told)

    def _add(self, prompt_ids: list[int], params: Any) -> str:
        self._requests += 1
        name = str(self._requests)
        self._engine.add_request(name, {"prompt_token_ids": prompt_ids}, params, lora_request=self._lora)
        return name

    def _step(self) -> list[Any]:
        self.steps += 1
        return [output for output in self._engine.step() if output.finished]


def logprobs_of(sampled: Any) -> list[float]:
    return [entry[token].logprob for token, entry in zip(sampled.token_ids, sampled.logprobs, strict=True)]
