"""What vLLM is started with, in this process and in servers, from the settings; does not import vLLM. Whether
in-process vLLM sleeps while the trainer works, and for how many tokens it captures CUDA graphs on large GPUs, is
decided here too, for the engine and for ``emailrl plan``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import httpx

from emailrl.base.credentials import check_key, without_credentials
from emailrl.base.errors import UsageError
from emailrl.base.install import need
from emailrl.engines.budget import GIB
from emailrl.model.layout import Keep, choose_keep, micro_batch_cap, numbers_for
from emailrl.ranks.alone import Place
from emailrl.settings import AgentSettings, ModelSettings, PolicySettings, TrainingSettings, VllmSettings

if TYPE_CHECKING:
    from emailrl.model.policy import Policy

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values vLLM takes for ``max_lora_rank``
EXAMPLE = """Example: VLLM_ENGINE_ARGS='{"max_num_batched_tokens": 4096}'."""
SET_BY = {
    "model": "MODEL_NAME",
    "dtype": "EMAILRL_DTYPE",
    "seed": "SEED",
    "max_model_len": "MAX_MODEL_LEN",
    "max_num_seqs": "MAX_BATCH_TRAJECTORIES",
    "tensor_parallel_size": "VLLM_TENSOR_PARALLEL_SIZE",
    "gpu_memory_utilization": "VLLM_GPU_MEMORY_UTILIZATION",
    "enforce_eager": "VLLM_ENFORCE_EAGER",
    "enable_prefix_caching": "VLLM_ENABLE_PREFIX_CACHING",
    "enable_sleep_mode": "VLLM_ENABLE_SLEEP",
    "max_loras": "MAX_STALENESS",
    "max_cpu_loras": "MAX_STALENESS",
    "max_lora_rank": "LORA_RANK",
    "kv_cache_memory_bytes": "KV_CACHE_GIB",
}
"""Engine arguments that VLLM_ENGINE_ARGS may not set, with the setting to use instead; ``_OWN`` have none."""
_OWN = "served_model_name config host port enable_lora logprobs_mode skip_tokenizer_init disable_log_stats"
VLLM_WORK: Final = 2 * GIB  # part of vLLM's share reserved for activations and CUDA graphs; assumed
ADAPTER_BYTES: Final = 24
"""Per parameter: float32 weight, gradient, two moments and the sampler's copy, and one in the base's dtype."""
SHARE_FOR_BOTH: Final = 0.9  # of a GPU for trainer and sampler; the rest is CUDA's, the logits and fragmentation
GRAPHS_FROM_GIB: Final = 64  # smaller GPUs need the memory of graphs for steps that read prompts for the cache
LARGE_STEPS: Final = (96, 128, 256, 384, 512, 768, 1024, 1536, 2048)
"""Tokens of such steps: tool results, of one conversation or several, and a token each of the others. By itself, vLLM
captures up to twice MAX_BATCH_TRAJECTORIES, and launches the kernels of longer steps one by one: on 14B and an H200 a
step of reading prompts and sampling then takes 82 ms instead of 47 (docs/evidence/performance.md)."""


def shared_arguments(agent: AgentSettings, vllm: VllmSettings, model: ModelSettings, *, on_gpu: bool) -> dict[str, Any]:
    """The fields of ``vllm.EngineArgs`` that servers and in-process vLLM have in common. Log-probabilities are taken
    after temperature, unless top-p or top-k would change them too (``check_sampling``). vLLM loads no tokenizer: ids
    in, ids out, which with no statistics halves a server's own time per sampled token."""
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "language_model_only": True,  # no images: a model that sees them would load its processor
        "max_model_len": model.max_model_len,
        "tensor_parallel_size": vllm.vllm_tensor_parallel_size,
        "enforce_eager": vllm.vllm_enforce_eager,
        "enable_prefix_caching": vllm.vllm_enable_prefix_caching,
        "logprobs_mode": "raw_logprobs" if is_filtered(agent) else "processed_logprobs",
        "disable_log_stats": True,
        "enable_lora": True,
    }
    if (gib := agent.kv_cache_gib) is not None:  # vLLM derives it from free memory, which other processes may change
        arguments["kv_cache_memory_bytes"] = int(gib * GIB)
    if not on_gpu:
        # On a CPU a seeded request whose prompt is read in parts raises "CPU Generator does not use offset" (0.31).
        arguments["enable_chunked_prefill"] = False
    if model.load_in_4bit:
        arguments["quantization"] = "bitsandbytes"
    return arguments | further_arguments(vllm, model)


def engine_arguments(
    settings: PolicySettings, *, model: str, dtype: str, lora_rank: int, on_gpu: bool, sleeps: bool, graphs: list[int]
) -> dict[str, Any]:
    """The fields of ``vllm.EngineArgs`` for vLLM in this process. ``lora_rank`` is the maximum adapter rank; ``dtype``
    a torch dtype's name; ``sleeps`` as decided by ``sleeps``, ``graphs`` by ``capture_sizes``."""
    arguments: dict[str, Any] = {
        "model": model,
        "dtype": dtype,
        "seed": settings.training.seed % 2**32,
        "gpu_memory_utilization": settings.vllm.vllm_gpu_memory_utilization,
        "enable_sleep_mode": sleeps and on_gpu,
        "max_num_seqs": settings.agent.max_batch_trajectories,
        "max_loras": 1,
        "max_lora_rank": lora_rank_limit(lora_rank),
    }
    if graphs:
        arguments["cudagraph_capture_sizes"] = graphs
    if Place.here().world > 1:
        # One engine per tensor_parallel_size neighboring ranks, in the ranks' existing process group.
        arguments["distributed_executor_backend"] = "external_launcher"
    return arguments | shared_arguments(settings.agent, settings.vllm, settings.model, on_gpu=on_gpu)


def further_arguments(vllm: VllmSettings, model: ModelSettings) -> dict[str, Any]:
    """The object in VLLM_ENGINE_ARGS; UsageError for any other value, and for arguments that emailrl sets itself."""
    try:
        arguments = json.loads(vllm.vllm_engine_args or "{}")
    except (ValueError, RecursionError) as error:
        raise UsageError(f"VLLM_ENGINE_ARGS is not JSON: {error}.", EXAMPLE) from error
    if not isinstance(arguments, dict):
        raise UsageError("VLLM_ENGINE_ARGS is not a JSON object.", EXAMPLE)
    owned = SET_BY | dict.fromkeys(_OWN.split(), "") | ({"quantization": "LOAD_IN_4BIT"} if model.load_in_4bit else {})
    owned |= {"distributed_executor_backend": ""} if Place.here().world > 1 else {}
    for name in arguments:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            raise UsageError(f"VLLM_ENGINE_ARGS: {name!r} is not an argument name.", EXAMPLE)
        # Also abbreviated, as on vLLM's command line.
        setting = next((owned[each] for each in owned if each.startswith(name.removeprefix("no_"))), None)
        if setting is not None:
            hint = f"Set {setting} instead." if setting else "emailrl depends on its value."
            raise UsageError(f"VLLM_ENGINE_ARGS cannot set {name}.", hint)
    return arguments


def as_flags(arguments: Mapping[str, Any]) -> list[str]:
    """Engine arguments as flags of ``vllm serve``, without None values."""
    flags = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{'' if value else 'no-'}{flag}")
        elif value is not None:
            flags += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
    return flags


def lora_rank_limit(rank: int) -> int:
    """The smallest ``max_lora_rank`` that holds adapters of this rank; UsageError if vLLM has none."""
    if rank > LORA_RANKS[-1]:
        raise UsageError(f"vLLM supports adapters up to rank {LORA_RANKS[-1]}, not {rank}.", "Lower LORA_RANK.")
    return next(limit for limit in LORA_RANKS if rank <= limit)


def is_filtered(agent: AgentSettings) -> bool:
    """Whether training rollouts sample from a truncated distribution."""
    return agent.top_p < 1 or agent.top_k > 0


def check_vllm(settings: PolicySettings, *, trainable: bool) -> None:
    """Raise for every problem that can be detected before a model is loaded: EmailRLError if in-process vLLM is not
    installed, else UsageError."""
    agent, vllm = settings.agent, settings.vllm
    # vLLM returns log-probabilities before temperature, or after top-p and top-k; training needs those in between.
    if is_filtered(agent) and agent.temperature not in (0, 1):
        given = f"TEMPERATURE={agent.temperature:g} with TOP_P={agent.top_p:g} and TOP_K={agent.top_k}"
        hint = "vLLM states log-probabilities of one or the other: use TOP_P=1 and TOP_K=0, or TEMPERATURE=1."
        raise UsageError(f"On vLLM, {given} cannot be trained.", hint)
    if trainable and vllm.stale_spans == "correct" and settings.algorithm.importance_correction == "off":
        hint = "Set IMPORTANCE_CORRECTION=tis, or STALE_SPANS=refuse."
        raise UsageError("STALE_SPANS=correct needs an importance correction.", hint)
    read_path_map(vllm.vllm_adapter_path_map)
    further_arguments(vllm, settings.model)
    if read_urls(vllm.vllm_urls):
        check_key("VLLM_API_KEY", api_key(vllm))
        return
    if settings.model.backend == "unsloth":  # its patches affect vLLM's model too
        hint = "Set VLLM_URLS, or use --backend transformers or --engine transformers."
        raise UsageError("The unsloth backend does not work with vLLM in the same process.", hint)
    need("vllm", "--engine vllm", ", or set VLLM_URLS, or use --engine transformers.")
    ranks, per_engine = Place.here().local_world, vllm.vllm_tensor_parallel_size
    if Place.here().world > 1 and ranks % per_engine:
        what = f"{ranks} ranks on a host cannot be divided into engines of VLLM_TENSOR_PARALLEL_SIZE={per_engine}"
        raise UsageError(f"{what}.", f"Start a multiple of {per_engine} with --nproc, or set VLLM_URLS.")


def api_key(vllm: VllmSettings) -> str:
    """VLLM_API_KEY, empty if unset."""
    return vllm.vllm_api_key.get_secret_value() if vllm.vllm_api_key else ""


def read_urls(text: str, setting: str = "VLLM_URLS") -> list[str]:
    """The servers' unique addresses, without ``/v1``, default ports and capitals; UsageError for an invalid one."""
    urls = []
    for number, address in enumerate(filter(None, map(str.strip, text.split(","))), start=1):
        try:
            parts = urlsplit(address)
            is_plain = address.isprintable() and not any(character in address for character in " ?#")
            if not is_plain or parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
                raise ValueError
            userinfo, at, host = parts.netloc.rpartition("@")
            host = httpx.URL(f"{parts.scheme}://{host}").netloc.decode()
            urls.append(f"{parts.scheme}://{userinfo}{at}{host}{parts.path.rstrip('/').removesuffix('/v1')}")
        except (ValueError, httpx.InvalidURL):  # the port's attribute raises for all that are not one, save 0
            if "@" in text:  # an unescaped password may have been cut at its comma: show no part of it
                hint = "Expected http://user:password@host:8000, percent-encoded."
                raise UsageError(f"{setting}: address {number} is not valid.", hint) from None
            hint = "Expected http://host:8000, without a query or a fragment."
            raise UsageError(f"{setting}: {without_credentials(address)!r} is not a server's address.", hint) from None
    return list(dict.fromkeys(urls))


def read_path_map(text: str) -> tuple[Path, Path] | None:
    """``HERE=THERE`` as two absolute folders; None if unset."""
    if not text:
        return None
    here, separator, there = text.partition("=")
    if not separator or not here or not there.startswith("/"):
        raise UsageError(f"VLLM_ADAPTER_PATH_MAP={text!r} is not HERE=/THERE.", "Example: outputs=/mnt/outputs.")
    return Path(here).absolute(), Path(there)


@dataclass(frozen=True, slots=True)
class Trainer:
    """What a trainer with fused layers needs of a GPU, in bytes."""

    weights: int  # of the frozen base
    adapter: int
    activations: int  # of a full micro-batch, with all kept that GRADIENT_CHECKPOINTING keeps where memory is ample
    graphs: int = 0  # of vLLM's CUDA graphs for this model, if it captures ``LARGE_STEPS``

    @classmethod
    def of_sizes(
        cls, training: TrainingSettings, *, weights: int, adapter: int, itemsize: int, layers: int, **widths: int
    ) -> Trainer:
        """``adapter`` is in parameters, ``itemsize`` the base's; ``widths`` as for ``numbers_for``."""
        numbers = {keep: numbers_for(keep, layers=layers, **widths) for keep in Keep}
        keep = choose_keep(training.gradient_checkpointing, math.inf, numbers)
        tokens = micro_batch_cap(training, on_gpu=True, hidden=widths["hidden"])
        graphs = graph_bytes(layers=layers, hidden=widths["hidden"])
        return cls(weights, ADAPTER_BYTES * adapter, tokens * itemsize * numbers[keep], graphs)

    @classmethod
    def of(cls, policy: Policy, training: TrainingSettings) -> Trainer | None:
        """A loaded policy's, None if it is not trained with fused layers: the needs of others are not known."""
        from emailrl.model.fused import fused_backbone

        fused = fused_backbone(policy.model)
        if not policy.trainable or fused is None:
            return None
        frozen = [parameter for parameter in policy.model.parameters() if not parameter.requires_grad]
        return cls.of_sizes(
            training,
            weights=sum(parameter.numel() * parameter.itemsize for parameter in frozen),
            adapter=sum(parameter.numel() for _, parameter in policy.trainable_parameters()),
            itemsize=policy.dtype.itemsize,
            layers=len(fused.layers),
            **fused.widths,
        )


def sleeps(agent: AgentSettings, vllm: VllmSettings, trainer: Trainer | None, card_bytes: float) -> bool:
    """Whether vLLM releases a GPU of ``card_bytes`` to the trainer between rollouts. It does as VLLM_ENABLE_SLEEP says;
    with ``auto``, unless both are known to fit."""
    if vllm.vllm_enable_sleep != "auto" or trainer is None:
        return vllm.vllm_enable_sleep != "off"
    graphs = trainer.graphs if capture_sizes(agent, vllm, card_bytes) else 0
    both = trainer.weights + trainer.adapter + trainer.activations + graphs
    return both + vllm_share(agent, vllm, trainer.weights, card_bytes) > SHARE_FOR_BOTH * card_bytes


def vllm_share(agent: AgentSettings, vllm: VllmSettings, weight_bytes: int, card_bytes: float) -> float:
    """Bytes of vLLM on each of its GPUs while it samples; KV_CACHE_GIB overrides VLLM_GPU_MEMORY_UTILIZATION."""
    if agent.kv_cache_gib is None:
        return vllm.vllm_gpu_memory_utilization * card_bytes
    return weight_bytes // vllm.vllm_tensor_parallel_size + VLLM_WORK + agent.kv_cache_gib * GIB


def capture_sizes(agent: AgentSettings, vllm: VllmSettings, card_bytes: float) -> list[int]:
    """Numbers of tokens to capture graphs for, ascending; empty if vLLM is to choose them. It chooses on small GPUs and
    on CPUs (``card_bytes`` infinite), with tensor parallelism (not measured), and if VLLM_ENGINE_ARGS bears on it."""
    given = any(word in vllm.vllm_engine_args for word in ("cudagraph", "compilation", "batched_tokens", "speculative"))
    is_large = GRAPHS_FROM_GIB * GIB <= card_bytes < math.inf
    if not is_large or given or vllm.vllm_enforce_eager or vllm.vllm_tensor_parallel_size > 1:
        return []
    rows = agent.max_batch_trajectories
    return sorted({1, 2, 4, *range(8, rows, 8), rows, *(tokens for tokens in LARGE_STEPS if tokens > rows)})


def graph_bytes(*, layers: int, hidden: int) -> int:
    """Memory of the graphs of ``LARGE_STEPS``: 5.5 GiB measured on 14B (40 layers, 5,120 wide), else in proportion."""
    return int(5.5 * GIB * layers * hidden / (40 * 5120))
