"""What the trainer decides, and ``emailrl plan`` with it."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from typing import Any

import pytest

from emailrl.model.layout import (
    Keep,
    attends_fully,
    choose_keep,
    micro_batch_cap,
    recomputes,
    wants_fused,
    why_not_packed,
)
from emailrl.settings import TrainingSettings


def test_the_cap_of_a_micro_batch_is_what_its_setting_says() -> None:
    described = TrainingSettings.model_fields["max_tokens_per_micro_batch"].description or ""
    assert micro_batch_cap(TrainingSettings(), on_gpu=True, hidden=1024) == 16384 and "16384 on a GPU" in described
    assert micro_batch_cap(TrainingSettings(), on_gpu=True, hidden=1023) == 65536 and "(65536 for models" in described
    assert "hidden size below 1024" in described
    for hidden in (64, 5120):
        assert micro_batch_cap(TrainingSettings(), on_gpu=False, hidden=hidden) == 2048
        assert micro_batch_cap(TrainingSettings(max_tokens_per_micro_batch=100), on_gpu=True, hidden=hidden) == 100
    assert re.search(r"2048\s+on a CPU", described)


@pytest.mark.parametrize(
    ("config", "fully"),
    [
        ({}, True),
        ({"sliding_window": None}, True),
        ({"sliding_window": 4096}, False),
        ({"sliding_window": 4096, "use_sliding_window": False}, True),
        ({"sliding_window": 4096, "layer_types": ["full_attention", "full_attention"]}, True),
        ({"layer_types": ["full_attention", "sliding_attention"]}, False),
        ({"layer_types": ["linear_attention"]}, False),
    ],
)
def test_windows_and_recurrence_are_seen_in_the_config(config: dict[str, Any], fully: bool) -> None:
    assert attends_fully(config) is fully


def test_what_packs_is_fused_on_a_gpu_and_other_layers_know_no_middle() -> None:
    assert why_not_packed("sdpa", fully=True) is None
    assert "not eager" in str(why_not_packed("eager", fully=True)) and why_not_packed("sdpa", fully=False)
    for packs, on_gpu, wanted in ((True, True, True), (True, False, False), (False, True, False)):
        assert wants_fused(TrainingSettings(), packs=packs, on_gpu=on_gpu) is wanted
    assert not wants_fused(TrainingSettings(fused_layers=False), packs=True, on_gpu=True)
    for setting, on_cpu, on_gpu in (("on", 1, 1), ("selective", 1, 1), ("auto", 0, 1), ("off", 0, 0)):
        assert [recomputes(setting, on_gpu=place) for place in (False, True)] == [on_cpu, on_gpu]


def test_auto_keeps_the_most_that_nine_tenths_of_the_free_memory_hold() -> None:
    sizes = {Keep.INPUT: 100, Keep.ATTENTION: 200, Keep.HIDDEN: 500, Keep.ALL: 900}
    found = [choose_keep("auto", free, sizes) for free in (0, 222, 223, 556, 1000, math.inf)]
    assert found == [Keep.INPUT, Keep.INPUT, Keep.ATTENTION, Keep.HIDDEN, Keep.ALL, Keep.ALL]
    assert [choose_keep(one, 0, sizes) for one in ("on", "selective", "off")] == [
        Keep.INPUT, Keep.ATTENTION, Keep.ALL,
    ]  # fmt: skip


def test_deciding_needs_no_torch() -> None:
    modules = "emailrl.model.layout, emailrl.engines.budget, emailrl.training.passes"
    script = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
