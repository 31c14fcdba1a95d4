"""The machines that a run can be planned for."""

from __future__ import annotations

from pathlib import Path

import pytest
from plan.planned import H200, plan_for

from emailrl.base.errors import UsageError
from emailrl.plan import find_device, this_machine
from emailrl.plan.devices import GIB, Device


def test_an_unknown_gpu_is_said() -> None:
    with pytest.raises(UsageError, match="Unknown GPU 'H20'") as raised:
        find_device("H20")
    assert "Known: B200, H200, H100, " in raised.value.hint and "did you mean" not in raised.value.hint.lower()
    assert "Describe any other card: --gpu '24 GiB, 125 TFLOP/s, 0.6 TB/s'" in raised.value.hint
    for other in ("A10G", "GH200", "RTX 6000 Ada", "RTX 3090 Ti", "RTX 4090 48GB", "A100-20", ""):
        with pytest.raises(UsageError, match="Unknown GPU"):
            find_device(other)


CARDS = {
    "A100-80": ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe", "a100 80 GB", "A100"),
    "A100-40": ("NVIDIA A100-SXM4-40GB",),
    "H100": ("NVIDIA H100 80GB HBM3",),
    "H100-PCIe": ("NVIDIA H100 PCIe",),
    "H100-NVL": ("NVIDIA H100 NVL",),
    "4090": ("NVIDIA GeForce RTX 4090", "RTX4090"),
} | {name: (f"NVIDIA {name}",) for name in ("A10", "L4", "L40S", "B200")}
CARDS |= {"A6000": ("NVIDIA RTX A6000",), "T4": ("Tesla T4",)}


@pytest.mark.parametrize("kind", CARDS)
def test_cards_are_known_by_the_names_that_nvidia_smi_prints(kind: str) -> None:
    assert {find_device(name).name for name in CARDS[kind]} == {kind}


def test_a_card_can_be_described() -> None:
    card = find_device("24 GiB, 125 TFLOP/s, 0.6 TB/s")
    # Of the data sheet's FLOP/s large products reach four fifths.
    assert card == Device("card of 24 GiB", 24.0, pytest.approx(100.0), pytest.approx(0.6e12))
    other = find_device("600 GB/s,0.125 PFLOPS, 24GB")
    assert (other.gib, other.tflops, other.bandwidth) == pytest.approx((24e9 / 2**30, 100.0, 0.6e12))
    for wrong in ("24 GiB, 125 TFLOP/s", "24 GiB, 125 TFLOP/s, 0 TB/s", "24, 125, 0.6", "24 GiB, 24 GiB, 0.6 TB/s"):
        with pytest.raises(UsageError, match="Unknown GPU"):
            find_device(wrong)


def test_this_machines_gpu_is_known_by_its_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for driver, mib, kind in (("H100 80GB HBM3", 81_559, "H100"), ("A100-PCIE-40GB", 40_960, "A100-40")):
        fake.write_text(f"#!/bin/sh\necho 'NVIDIA {driver}, {mib}'\n")
        fake.chmod(0o755)
        found = this_machine()
        assert (found.name, found.gib, found.is_gpu) == (kind, mib / 1024, True)


def test_a_machine_without_a_gpu_is_its_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emailrl.plan.devices.available_memory", lambda: 8 * GIB)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (this_machine().name, this_machine().gib) == ("CPU", 8.0)
    made = plan_for(this_machine(), model="14B")
    assert made.ways[-1].text == "--gpu L40S"
    odd = tmp_path / "nvidia-smi"
    odd.write_text("#!/bin/sh\necho 'Banana 9000, 1000'\n")
    odd.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(UsageError, match="Banana 9000 is not in the table"):
        this_machine()
    odd.write_text("#!/bin/sh\necho 'NVIDIA H200 NVL, 143771'\n")
    kin = this_machine()
    assert (kin.name, kin.gib, kin.tflops) == ("NVIDIA H200 NVL", 143_771 / 1024, H200.tflops)
    assert kin.note == "NVIDIA H200 NVL is not in the table: times are those of the H200"
