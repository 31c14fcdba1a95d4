"""The sections of the tree about engines outside transformers: a chat server to measure, vLLM to sample with."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, SecretStr

from emailrl.settings.fields import Address, Env, NonNegative, Positive, Section

Price = Annotated[float, Field(ge=0)]


class OpenAISettings(Section):
    """The engine `openai`: any OpenAI-compatible chat server, for benchmarks and rollouts."""

    openai_base_url: Annotated[str, Address("conversations with the mail in them", "openai_api_key")] = (
        "https://openrouter.ai/api/v1"
    )
    """The chat server of `--engine openai`; OpenRouter's uses OPENROUTER_API_KEY."""
    openai_api_key: SecretStr | None = None
    """The key of any other chat server; kept out of logs, dumps and metadata."""
    openai_retries: NonNegative = 5
    """Times a request is sent again after a timeout, a lost connection, 408, 409, 429 or 5xx."""
    input_price: Price | None = None
    """US dollars a million prompt tokens; None takes the cost the server itself states, if any."""
    output_price: Price | None = None
    """US dollars a million sampled tokens; None takes the cost the server itself states, if any."""


class VllmSettings(Section):
    """The engine `vllm`: in this process, or on the servers that `vllm_urls` names."""

    vllm_urls: Annotated[str, Env("VLLM_URLS"), Address("conversations with the mail in them", "vllm_api_key")] = ""
    """vLLM servers to sample from, separated by commas; empty runs vLLM in this process."""
    vllm_api_key: SecretStr | None = None
    """The servers' key (`--api-key`); kept out of logs, dumps and metadata."""
    vllm_adapter_path_map: str = ""
    """`HERE=THERE`: the servers see the adapters under HERE in the folder THERE; empty: both see the same paths."""
    vllm_timeout: Annotated[float, Field(gt=0)] = 600
    """Seconds to wait for one completion of a vLLM server."""
    vllm_retries: NonNegative = 3
    """Times a request is sent again, to another server where there is one."""
    vllm_tensor_parallel_size: Positive = 1
    """GPUs that vLLM in this process spreads the model over."""
    vllm_gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.45
    """Share of the GPU's memory that vLLM in this process takes while it samples."""
    vllm_enforce_eager: bool = False
    """No CUDA graphs: a quicker start, slower sampling."""
    vllm_enable_prefix_caching: bool = True
    """Keep keys and values of prompts that begin alike."""
    vllm_enable_sleep: bool = True
    """vLLM in this process gives its GPU memory to the trainer between rollouts."""
    vllm_max_loras: Positive = 1
    """Adapters in one batch."""
    vllm_max_lora_rank: Positive | None = None
    """Largest rank of an adapter to load; None takes that of the first."""
    vllm_probe_tolerance: Annotated[float, Field(gt=0)] | None = None
    """Largest mean gap between vLLM's log-probs of the probe text and the trainer's; None is 0.1, in fp32 0.001."""
    stale_spans: Literal["refuse", "correct"] = "refuse"
    """A trajectory whose turns several versions sampled is counted, and dropped (refuse) or trained with an importance
    correction by the log-probs of each turn (correct)."""
