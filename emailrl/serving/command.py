"""Flags, environment and GPUs of each vLLM server."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from emailrl.engines.budget import rows_per_server, server_share
from emailrl.engines.vllm_arguments import api_key, as_flags, lora_rank_limit, shared_arguments
from emailrl.errors import EmailRLError, UsageError
from emailrl.policy.layout import dtype_name
from emailrl.policy.resolve import base_name, resolve_model
from emailrl.settings import Settings, check_key

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def server_command(settings: Settings, *, host: str, port: int, on_gpu: bool, extra: Sequence[str] = ()) -> list[str]:
    """The command of one server, with room for the adapters of MAX_STALENESS + 2 versions; ``extra`` flags come last.

    Raises as ``resolve_model`` does, EmailRLError if vLLM is not installed.
    """
    if find_spec("vllm") is None:
        raise EmailRLError("vLLM is not installed.", "Run in the clone: pip install -e '.[vllm]'.")
    vllm, model = settings.vllm, settings.model
    adapters = vllm.staleness(servers=True) + 2
    arguments = {
        "model": str(resolve_model(model.name, model.smol_base)),
        "served_model_name": base_name(model.name),
        "host": host,
        "port": port,
        "dtype": DTYPES[dtype_name(model.dtype, on_gpu=on_gpu)],
        "gpu_memory_utilization": server_share(vllm),
        "max_num_seqs": rows_per_server(settings.agent),
        "max_lora_rank": lora_rank_limit(settings.lora.lora_rank),
        "max_loras": adapters,
        # A new version is loaded before the oldest is unloaded.
        "max_cpu_loras": adapters + 1,
        "disable_uvicorn_access_log": True,  # a line per request and health check, in a log that is never cut
        "generation_config": "vllm",  # the model's own may limit completions to fewer tokens than asked for
    }
    flags = as_flags(arguments | shared_arguments(settings, on_gpu=on_gpu))
    # As a module: the script of the CPU builds is broken.
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags, *extra]


def server_environment(settings: Settings, gpus: Sequence[str]) -> dict[str, str]:
    """The environment of one server: only ``gpus`` are visible (none: a CPU build); the API key is not in its flags.

    Raises UsageError for a key that no request can carry.
    """
    environment = {"VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1"} | os.environ
    environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    if key := api_key(settings):
        check_key("VLLM_API_KEY", key)
        environment["VLLM_API_KEY"] = key
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return environment


def find_gpus(chosen: str | None, environ: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs to use: those chosen, else CUDA_VISIBLE_DEVICES, else all; empty on a machine without GPUs."""
    named = chosen if chosen is not None else environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [gpu.strip() for gpu in named.split(",") if gpu.strip()]
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False, timeout=60)
    return [str(number) for number, line in enumerate(listed.stdout.splitlines()) if line.startswith("GPU ")]


def deal_gpus(gpus: Sequence[str], replicas: int, each: int) -> list[list[str]]:
    """Each replica's GPUs, consecutive ones; none on a machine without GPUs. UsageError if there are too few."""
    if not gpus:
        return [[] for _ in range(replicas)]
    if len(gpus) < replicas * each:
        raise UsageError(
            f"{replicas} replicas on {each} GPU{'s' * (each > 1)} each need {replicas * each}, and there"
            f" {'is' if len(gpus) == 1 else 'are'} {len(gpus)}.",
            "Lower --replicas or --tensor-parallel, or name more with --gpus.",
        )
    return [list(gpus[number * each : (number + 1) * each]) for number in range(replicas)]


def log_file(folder: Path, port: int) -> Path:
    """The file for a server's output."""
    return folder / f"vllm-{port}.log"
