"""The machines that a run can be planned for."""

from __future__ import annotations

import difflib
import shutil
import subprocess
from dataclasses import dataclass, replace
from typing import Final

from emailrl.errors import UsageError

GIB: Final = 2**30
REACHED: Final = 0.8
"""Share of the data sheet's FLOP/s that large matrix products reach: 790 of 989 TFLOP/s, measured on an H200."""

MEASURED: Final = "H200"
"""The GPU that times were measured on."""


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or a CPU."""

    name: str
    gib: float
    """Memory that a program can have in all."""
    tflops: float
    """Dense half-precision TFLOP/s that large matrix products reach."""
    bandwidth: float
    """Bytes a second to its memory."""
    note: str = ""
    is_gpu: bool = True


def _gpu(name: str, gib: float, sheet_tflops: float, terabytes: float, note: str = "") -> Device:
    return Device(name, gib, REACHED * sheet_tflops, terabytes * 1e12, note)


DEVICES: Final = {
    device.name.lower(): device
    for device in (
        _gpu("H200", 139.8, 989, 4.8),
        _gpu("H100", 79.1, 989, 3.35),
        _gpu("A100-80", 79.2, 312, 2.0),
        _gpu("A100-40", 39.4, 312, 1.55),
        _gpu("L40S", 44.4, 362, 0.86),
        _gpu("4090", 23.5, 165, 1.0),
        _gpu("3090", 23.6, 71, 0.94),
        _gpu("T4", 14.6, 65, 0.3, "a T4 has neither bf16 nor FlashAttention: slower, and more memory, than planned"),
        # Two cores with AVX-512, as docs/experiments.md has them; memory is this machine's.
        Device("CPU", 0.0, 0.1, 2e10, "a CPU's speed is a guess: 0.1 TFLOP/s", is_gpu=False),
    )
}
"""By lower-case name; memory as the driver states it, FLOP/s and bandwidth from NVIDIA's data sheets."""
_ALIASES: Final = {
    **{"a100": "a100-80", "a10080": "a100-80", "a10040": "a100-40", "h10080": "h100", "h200141": "h200"},
    **{"rtx4090": "4090", "rtx3090": "3090"},
}


def find_device(name: str) -> Device:
    """The machine named; UsageError for one that is not in the table."""
    key = name.lower().replace(" ", "").replace("gb", "")
    key = _ALIASES.get(key, key)
    if key == "cpu":
        return this_cpu()
    if key not in DEVICES:
        near = difflib.get_close_matches(key, DEVICES, n=1)
        hint = f"Did you mean {DEVICES[near[0]].name}? " if near else ""
        known = ", ".join(device.name for device in DEVICES.values())
        raise UsageError(f"Unknown GPU '{name}'.", f"{hint}Known are {known}.")
    return DEVICES[key]


def this_cpu() -> Device:
    """This machine without its GPUs: its memory is what is free of it now."""
    from emailrl.policy.size import available_memory

    return replace(DEVICES["cpu"], gib=available_memory() / GIB)


def this_machine() -> Device:
    """The first GPU here, with its own memory, else the CPU; UsageError for a GPU that is not in the table."""
    found = _gpus()
    if not found:
        return this_cpu()
    name, gib = found[0]
    compact = name.lower().replace(" ", "")
    kinds = [device for key, device in DEVICES.items() if device.is_gpu and key.split("-")[0] in compact]
    if not kinds:
        raise UsageError(f"This machine's {name} is not in the table.", "Name a similar one with --gpu.")
    nearest = min(kinds, key=lambda device: abs(device.gib - gib))
    return replace(nearest, gib=gib)


def count_gpus() -> int:
    """GPUs that the driver lists."""
    return len(_gpus())


def _gpus() -> list[tuple[str, float]]:
    """Name and GiB of each GPU that the driver lists."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
        rows = [line.rsplit(",", 1) for line in done.stdout.strip().splitlines()]
        return [(name.strip(), float(mib) / 1024) for name, mib in rows]
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return []  # a driver without a card, or one that does not answer: as no GPU
