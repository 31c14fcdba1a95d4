"""Every named algorithm, interrupted in the middle and resumed, is bit for bit the run that was not interrupted."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from same_run import assert_same_run, state_of

from emailrl.records import read_records
from emailrl.settings import Settings
from emailrl.training.algorithms import ALGORITHMS
from emailrl.training.loop import TrainResult, train
from emailrl.training.update import Updater, UpdateResult

MakeSettings = Callable[..., Settings]
REFILL = {"filter_on": "reward", "filter_low": 0.4, "filter_high": 0.7, "overlong_buffer": 0, "max_refill_rounds": 2}
"""Random completions have about as many even as odd ids: some groups fall out, some stay."""
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, REFILL if algorithm.dynamic_filtering else {}) for name, algorithm in ALGORITHMS.items()),
    ("grpo", {"dynamic_filtering": True, "update_epochs": 2} | REFILL),
    ("ppo", {"critic_warmup_steps": 2, "update_epochs": 2, "max_steps": 4}),
]


def run_of(settings: Settings, interrupt_at: int | None, monkeypatch: pytest.MonkeyPatch) -> TrainResult:
    """Train to the end; with ``interrupt_at``, Ctrl-C comes in the updates of that step and the run is resumed."""
    original = Updater.train

    def interrupted(updater: Updater, samples: Any, paid: Any, *, step: int) -> UpdateResult:
        if step == interrupt_at:
            os.kill(os.getpid(), signal.SIGINT)
        return original(updater, samples, paid, step=step)

    if interrupt_at is None:
        return train(settings)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Updater, "train", interrupted)
        train(settings)
    return train(settings, resume="auto")


@pytest.mark.parametrize(("algorithm", "changes"), CASES, ids=[f"{name}-{len(changes)}" for name, changes in CASES])
def test_a_resumed_run_equals_the_uninterrupted(
    algorithm: str, changes: dict[str, Any], make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: dict[str, Any] = {
        "algorithm": algorithm, "max_steps": 3, "save_total_limit": 1, "lr_scheduler": "cosine",
        "per_device_train_batch_size": 3, "min_group_std": 0.01,
    } | changes  # fmt: skip
    whole = run_of(make_settings(**wanted), None, monkeypatch)
    resumed = run_of(
        make_settings(**wanted), wanted["max_steps"] - 1, monkeypatch
    )  # a directory of its own, where it finds itself again
    assert whole.run_dir != resumed.run_dir and resumed.steps == wanted["max_steps"]
    assert_same_run(resumed.run_dir, whole.run_dir)
    metrics = list(read_records(whole.run_dir / "metrics.jsonl"))
    assert len({line["kl_coef"] for line in metrics if line["kl_coef"] is not None}) > 1  # it adapts
    state = state_of(whole.run_dir / "final")
    moments = state["updater"]["optimizer"]["state"]
    assert any(float(moment["exp_avg"].abs().max()) > 0 for moment in moments.values())
    if changes.get("max_refill_rounds"):
        assert sum(line["refill_rounds"] for line in metrics) > 0
        assert any(line["groups_kept"] for line in metrics)
    if ALGORITHMS[algorithm].has_critic:
        assert any(name.startswith("value_head.") for name in state["updater"]["parameters"])
        assert (whole.run_dir / "final" / "value_head.safetensors").is_file()
