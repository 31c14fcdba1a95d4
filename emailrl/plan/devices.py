"""The machines for which a run can be planned."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from typing import Final

from emailrl.base.errors import UsageError
from emailrl.model.layout import available_memory

GIB: Final = 2**30
PEAK_SHARE: Final = 0.8
"""Share of the data sheet's FLOP/s that large matrix products reach: 790 of 989 TFLOP/s, measured on an H200."""
MEASURED: Final = "H200"  # The GPU on which times were measured.
NVLINK: Final = 200e9  # Bytes per second of a collective between the GPUs of a host with NVLink. Assumed.
PCIE: Final = 20e9  # The same without NVLink, and for reading from host memory. Assumed.
LINKED: Final = ("B200", "H200", "H100", "A100-80", "A100-40")  # GPUs usually connected by NVLink within a host.
HOP: Final = 10e-6  # Minimum seconds per ring step. Assumed.


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    gib: float  # Total memory available to a program.
    tflops: float  # Dense half-precision TFLOP/s achieved by large matrix products.
    bandwidth: float  # Memory bandwidth in bytes per second.
    note: str = ""
    is_gpu: bool = True

    def times(self, count: int) -> Device:
        """This many of them running one model with tensor parallelism: combined speed, but not memory."""
        return replace(self, tflops=count * self.tflops, bandwidth=count * self.bandwidth)


@dataclass(frozen=True, slots=True)
class Cluster:
    """GPUs of one kind, and how they are connected."""

    device: Device
    per_host: int = 1
    hosts: int = 1
    network: float = 100.0  # Gbit/s between two hosts.

    @property
    def gpus(self) -> int:
        return self.per_host * self.hosts

    @property
    def inside(self) -> float:
        """Bytes per second between the GPUs of a host."""
        return NVLINK if self.device.name in LINKED else PCIE

    def reduce_seconds(self, size: int, ranks: int) -> float:
        """One ring all-reduce of ``size`` bytes: every link carries it twice, minus one part; the slowest decides."""
        if ranks == 1:
            return 0.0
        slowest = self.inside if ranks <= self.per_host else min(self.inside, self.network * 1e9 / 8)
        return 2 * (ranks - 1) / ranks * size / slowest + 2 * (ranks - 1) * HOP

    def gather_seconds(self, size: int, cards: int, *, offload: bool) -> float:
        """Gather a base of ``size`` bytes from the ``cards`` of a host; from the host's memory with ``offload``."""
        return (cards - 1) / cards * size / self.inside + (size / cards / PCIE if offload else 0.0)


def _gpu(name: str, gib: float, sheet_tflops: float, terabytes: float, note: str = "") -> Device:
    return Device(name, gib, PEAK_SHARE * sheet_tflops, terabytes * 1e12, note)


_OF_A_T4: Final = "a T4 has neither bf16 nor FlashAttention: it is slower and needs more memory than planned"
DEVICES: Final = {
    device.name.lower(): device
    for device in (
        _gpu("B200", 178.4, 2250, 8.0),
        _gpu("H200", 139.8, 989, 4.8),
        _gpu("H100", 79.1, 989, 3.35),
        _gpu("H100-PCIe", 79.1, 756, 2.0),
        _gpu("H100-NVL", 93.1, 835, 3.9),
        _gpu("A100-80", 79.2, 312, 2.0),
        _gpu("A100-40", 39.4, 312, 1.55),
        _gpu("L40S", 44.4, 362, 0.86),
        _gpu("L4", 22.0, 121, 0.3),
        _gpu("A6000", 47.4, 155, 0.77),
        _gpu("A10", 22.0, 125, 0.6),
        _gpu("4090", 23.5, 165, 1.0),
        _gpu("3090", 23.6, 71, 0.94),
        _gpu("T4", 14.6, 65, 0.3, _OF_A_T4),
        # Two cores with AVX-512, as docs/evidence/experiments.md has them; memory is this machine's.
        Device("CPU", 0.0, 0.1, 2e10, "a CPU's speed is a guess: 0.1 TFLOP/s", is_gpu=False),
    )
}
"""By lower-case name; memory as the driver states it, FLOP/s and bandwidth from NVIDIA's data sheets."""
EXAMPLE: Final = "24 GiB, 125 TFLOP/s, 0.6 TB/s"
_UNITS: Final = {"gb": 1e9, "gib": 2**30, "tb": 1e12, "tib": 2**40, "tflop": 1, "pflop": 1000}
_ADORNMENTS: Final = re.compile(r"nvidia|geforce|tesla|quadro|rtx|sxm\d*|hbm\d*e?|gb|gib")
_SIZE: Final = re.compile(r"(\d{2,3})(?:gb|gib)?")


def find_device(name: str) -> Device:
    """The machine with this name (in the table or from nvidia-smi) or description (as ``EXAMPLE``); else UsageError."""
    if name.strip().lower() == "cpu":
        return this_cpu()
    found = _described(name) or _named(name)
    if found is None:
        known = ", ".join(device.name for device in DEVICES.values())
        raise UsageError(f"Unknown GPU '{name}'.", f"Known: {known}. Describe any other card: --gpu '{EXAMPLE}'.")
    return found


def _described(text: str) -> Device | None:
    """A GPU described by memory, dense half-precision FLOP/s and bandwidth, in any order; None if one is missing."""
    given: dict[str, float] = {}
    for part in text.lower().split(","):
        amount = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?) ?([gt]i?b|[tp]flops?)(/s)?", part.strip())
        if amount is None:
            return None
        unit = amount[2].removesuffix("s")
        of_bytes = "bandwidth" if amount[3] else "memory"
        given["tflops" if "flop" in unit else of_bytes] = float(amount[1]) * _UNITS[unit]
    if len(given) < 3 or not all(given.values()):
        return None
    gib = given["memory"] / GIB
    return _gpu(f"card of {gib:.4g} GiB", gib, given["tflops"], given["bandwidth"] / 1e12)


def _named(name: str, gib: float | None = None) -> Device | None:
    """The GPU with this name and, if several have it, the stated memory; None if it is not in the table."""
    words = [word.removeprefix("rtx") for word in re.findall(r"[a-z0-9]+", name.lower())]
    sizes = [float(found[1]) for word in words if (found := _SIZE.fullmatch(word))]
    kind = "-".join(word for word in words if word and not _SIZE.fullmatch(word) and not _ADORNMENTS.fullmatch(word))
    for wanted in (kind, kind.removesuffix("-pcie")):
        cards = [card for key, card in DEVICES.items() if card.is_gpu and re.sub(r"-\d+$", "", key) == wanted]
        if gib is None and sizes:  # a different memory size is a different GPU
            cards = [card for card in cards if abs(card.gib - sizes[0]) < sizes[0] / 10]
        if cards:
            own = gib or max(sizes, default=cards[0].gib)
            return min(cards, key=lambda card: abs(card.gib - own))
    return None


def this_cpu() -> Device:
    """This machine without its GPUs, with the memory that is free now."""
    return replace(DEVICES["cpu"], gib=available_memory() / GIB)


def this_machine() -> Device:
    """The first GPU here, with its own memory, else the CPU; UsageError for a GPU unlike any in the table."""
    found = driver_gpus()
    if not found:
        return this_cpu()
    name, gib = found[0]
    card = _named(name, gib)
    if card is not None:
        return replace(card, gib=gib)
    words = re.findall(r"[a-z0-9]+", name.lower())
    kin = [device for key, device in DEVICES.items() if device.is_gpu and key.split("-")[0] in words]
    if not kin:
        raise UsageError(f"This machine's {name} is not in the table.", f"Describe it: --gpu '{EXAMPLE}'.")
    card = min(kin, key=lambda each: abs(each.gib - gib))
    return replace(card, name=name, gib=gib, note=f"{name} is not in the table: times are those of the {card.name}")


def driver_gpus() -> list[tuple[str, float]]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
        rows = [line.rsplit(",", 1) for line in done.stdout.strip().splitlines()]
        return [(name.strip(), float(mib) / 1024) for name, mib in rows]
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return []  # a driver without a GPU, or one that does not respond, counts as no GPU
