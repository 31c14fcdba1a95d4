"""The settings of the servers that sample: chat servers and vLLM."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, SecretStr

from emailrl.base.credentials import secret_argument
from emailrl.base.errors import UsageError
from emailrl.settings.fields import Address, Bool, Code, Env, Flag, NonNegative, Positive, Price, Section


def _without_secrets(text: str) -> str:
    if name := secret_argument(text):
        problem = f"VLLM_ENGINE_ARGS cannot hold a secret ({name}): its value is recorded with a run."
        raise UsageError(problem, "Set VLLM_API_KEY, or HF_TOKEN in the environment for the hub's.")
    return text


class OpenAISettings(Section):
    """The engine `openai`: any OpenAI-compatible chat server, for benchmarks and rollouts."""

    openai_base_url: Annotated[str, Address("conversations with the mail in them", "openai_api_key")] = (
        "https://openrouter.ai/api/v1"
    )
    """Chat server of `--engine openai`; OpenRouter uses OPENROUTER_API_KEY."""
    openai_api_key: SecretStr | None = None
    """API key of any other chat server; kept out of logs, dumps and metadata."""
    openai_retries: NonNegative = 5
    """Retries after a timeout, a lost connection, or status 408, 409, 429 or 5xx."""
    input_price: Price | None = None
    """US dollars per million prompt tokens; default: the cost reported by the server, if any."""
    output_price: Price | None = None
    """US dollars per million completion tokens; default: the cost reported by the server, if any."""


class VllmSettings(Section):
    """The engine `vllm`: in this process, or on the servers in `vllm_urls`."""

    vllm_urls: Annotated[str, Env("VLLM_URLS"), Address("conversations with the mail in them", "vllm_api_key")] = ""
    """Comma-separated vLLM servers to sample from; empty runs vLLM in this process."""
    vllm_api_key: SecretStr | None = None
    """API key of the vLLM servers (`--api-key`); kept out of logs, dumps and metadata."""
    vllm_adapter_path_map: str = ""
    """`HERE=THERE`: the servers see adapters under HERE in the folder THERE; empty if both see the same paths."""
    vllm_timeout: Annotated[float, Field(gt=0)] = 600
    """Seconds to wait for one completion from a vLLM server."""
    vllm_retries: NonNegative = 3
    """Retries of a request, on another server if there is one."""
    vllm_return_timeout: Annotated[float, Field(ge=0)] = 300
    """Seconds to wait for a vLLM server to come back if none is left in mid-run; 0 ends the run at once."""
    max_staleness: NonNegative | None = None
    """Steps by which the sampling policy may lag behind the trained one: 0 alternates rollouts and updates, more
    overlaps them. The default is 1 with VLLM_URLS, else 0."""
    vllm_tensor_parallel_size: Annotated[Positive, Flag("--tensor-parallel")] = 1
    """GPUs that vLLM (in process, or each server of `serve`) splits the model across. In process with several ranks,
    that many neighboring ranks of a host share one engine."""
    vllm_gpu_memory_utilization: Annotated[float, Field(gt=0, le=1), Flag("--gpu-memory-utilization")] = 0.45
    """Share of GPU memory that in-process vLLM uses while sampling; servers of `serve` use 0.9 unless it is set."""
    vllm_enforce_eager: Annotated[bool, Flag("--enforce-eager")] = False
    """Disable CUDA graphs: less memory, slower sampling."""
    vllm_enable_prefix_caching: bool = True
    """Reuse the KV cache of common prompt prefixes."""
    vllm_enable_sleep: Annotated[Literal["auto", "off", "on"], Bool] = "auto"
    """In-process vLLM releases its GPU memory to the trainer between rollouts; auto does so unless the GPU has room for
    both. true and false mean on and off."""
    vllm_engine_args: Annotated[str, Code(), AfterValidator(_without_secrets)] = ""
    """Further vLLM engine arguments as a JSON object, for vLLM in process and `serve`: `{"kv_cache_dtype": "fp8"}`.
    Arguments that other settings determine are refused, and so are secrets."""
    vllm_probe_tolerance: Annotated[float, Field(gt=0)] | None = None
    """Maximum mean difference between vLLM's and the trainer's log-probs of tokens drawn as a probe; default: 0.3, or
    0.003 in fp32."""
    stale_spans: Literal["refuse", "correct"] = "refuse"
    """Trajectories sampled by several policy versions are counted, and either dropped (refuse) or trained with an
    importance correction from the log-probs of each turn (correct)."""

    def staleness(self, *, servers: bool) -> int:
        """``max_staleness``, or its default for an engine with ``servers`` of its own."""
        return int(servers) if self.max_staleness is None else self.max_staleness
