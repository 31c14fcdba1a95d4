"""Whole runs by several ranks: the run of one process, recorded by rank 0 alone, resumed on any number of them."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from end_to_end.conftest import SettingsAt
from ranks.processes import in_ranks
from safetensors.torch import load_file
from torch import Tensor

from emailrl.base.errors import EmailRLError
from emailrl.checkpoints import list_checkpoints
from emailrl.ranks import Place
from emailrl.records import Record, read_records, read_trajectories
from emailrl.settings import Settings
from emailrl.training import run as run_module
from emailrl.training import team
from emailrl.training.loop import TrainResult, train
from emailrl.training.team import follow
from emailrl.training.update import Updater


def rank(settings: Settings, written: Path, **how: Any) -> TrainResult | list[str]:
    """What one rank does; a follower returns which files below the run it opened for writing."""
    if Place.here().rank == 0:
        return train(settings, **how)
    opened: list[str] = []

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(str(written)) and arguments[1] not in ("r", "rb", None):
            opened.append(str(arguments[0]))

    sys.addaudithook(watch)
    follow(settings.training, settings.model.device)
    return opened


def adapter(run: Path, name: str = "final") -> dict[str, Tensor]:
    return load_file(run / name / "adapter_model.safetensors")


def assert_close(run: Path, other: Path) -> None:
    mine, wanted, start = adapter(run), adapter(other), adapter(other, "policy/v-000002")
    for name, value in wanted.items():
        torch.testing.assert_close(mine[name], value, atol=1e-5, rtol=0)
    assert max(float((wanted[name] - start[name]).abs().max()) for name in wanted) > 5e-4  # the last step alone


def sampled(run: Path) -> list[Any]:
    return [
        [
            (one.id.split("/")[-1], one.samples[0].token_ids, one.adapter_sha256 is not None)
            for one in read_trajectories(path)
        ]
        for path in sorted((run / "trajectories").glob("step-*.jsonl"))
    ]


def metrics(run: Path) -> list[Record]:
    return list(read_records(run / "metrics.jsonl"))


@pytest.fixture
def one(settings_at: SettingsAt) -> TrainResult:
    """Three steps of four questions by one process."""
    return train(settings_at("one", per_device_train_batch_size=4))


def test_two_ranks_make_the_run_of_one_which_rank_0_alone_records(
    one: TrainResult, settings_at: SettingsAt, tmp_path: Path
) -> None:
    settings = settings_at("two", per_device_train_batch_size=2)
    result, opened = in_ranks(2, partial(rank, settings, tmp_path / "two"), tmp_path)
    assert result.steps == 3 and opened == []
    assert_close(result.run_dir, one.run_dir)
    assert sampled(result.run_dir) == sampled(one.run_dir)
    names = [{str(path.relative_to(run)) for path in run.rglob("*")} for run in (result.run_dir, one.run_dir)]
    assert names[0] == names[1]
    assert [record["step"] for record in metrics(result.run_dir)] == [1, 2, 3]
    for record in metrics(result.run_dir):
        assert record["rank_tokens_max"] >= record["rank_tokens_mean"] > 0 < record["all_reduce_seconds"]
    assert "rank_tokens_mean" not in metrics(one.run_dir)[0]
    assert "questions per step: 4 | ranks: 2" in (result.run_dir / "training.log").read_text()


def test_a_run_goes_on_with_another_number_of_ranks(one: TrainResult, settings_at: SettingsAt, tmp_path: Path) -> None:
    """Two steps of four questions by four ranks, the third by two; then a fourth by one."""
    for ranks, size, steps in ((4, 1, 2), (2, 2, 3)):
        settings = settings_at("some", per_device_train_batch_size=size, max_steps=steps)
        folder = tmp_path / f"{ranks}"
        folder.mkdir()
        result, *_ = in_ranks(ranks, partial(rank, settings, tmp_path / "some", resume="auto"), folder)
        assert result.steps == steps
    assert_close(result.run_dir, one.run_dir)
    assert sampled(result.run_dir) == sampled(one.run_dir)
    last = train(settings_at("some", per_device_train_batch_size=4, max_steps=4), resume="latest")
    assert last.run_dir == result.run_dir and [record["step"] for record in metrics(last.run_dir)] == [1, 2, 3, 4]


def test_ranks_start_from_an_adapter_that_only_rank_0_can_see(
    one: TrainResult, settings_at: SettingsAt, tmp_path: Path
) -> None:
    changes = {"adapter_path": one.run_dir / "final", "max_steps": 1}
    for name in ("lora_rank", "lora_alpha", "lora_dropout"):
        changes[name] = None
    alone = train(settings_at("alone", per_device_train_batch_size=2, **changes))
    result, _ = in_ranks(
        2, partial(rank, settings_at("two", per_device_train_batch_size=1, **changes), tmp_path / "two"), tmp_path
    )
    mine, wanted = adapter(result.run_dir), adapter(alone.run_dir)
    for name, value in wanted.items():
        torch.testing.assert_close(mine[name], value, atol=1e-5, rtol=0)


def test_a_stop_asked_of_another_rank_ends_the_run_in_order(
    settings_at: SettingsAt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Updater.take
    once = iter([signal.SIGTERM])

    def asked(updater: Updater, share: Any) -> Any:
        for number in once if updater.across.rank else ():
            signal.raise_signal(number)
        return honest(updater, share)

    monkeypatch.setattr(Updater, "take", asked)
    settings = settings_at("two", max_steps=500, save_steps=500, rank_timeout=20)
    zero, opened = in_ranks(2, partial(rank, settings, tmp_path / "two"), tmp_path)
    assert isinstance(zero, KeyboardInterrupt) and opened == []
    (checkpoint,) = [
        item for item in list_checkpoints(tmp_path / "two" / "grpo_masked") if item.metadata.kind != "best"
    ]
    assert checkpoint.metadata.step == len(metrics(tmp_path / "two" / "grpo_masked")) > 0


def test_a_stop_during_an_evaluation_saves_the_step_before_it(
    settings_at: SettingsAt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = run_module.evaluate

    def interrupted(*args: Any, step: int, **how: Any) -> Any:
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return honest(*args, step=step, **how)

    monkeypatch.setattr(run_module, "evaluate", interrupted)
    settings = settings_at("two", max_steps=4, eval_steps=2, save_steps=500, rank_timeout=20)
    zero, opened = in_ranks(2, partial(rank, settings, tmp_path / "two"), tmp_path)
    assert isinstance(zero, KeyboardInterrupt) and opened == []
    monkeypatch.undo()
    saved = {item.path.name for item in list_checkpoints(tmp_path / "two" / "grpo_masked")}
    assert saved == {"best_model", "checkpoint-2"}
    resumed, _ = in_ranks(2, partial(rank, settings, tmp_path / "two", resume="latest"), tmp_path)
    evaluated = [record["step"] for record in read_records(resumed.run_dir / "evaluations.jsonl")]
    assert evaluated == [0, 2, 4] and [record["step"] for record in metrics(resumed.run_dir)] == [1, 2, 3, 4]


def test_every_rank_seeds_the_global_generators(
    settings_at: SettingsAt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def note(updater: Updater) -> None:
        drawn = random.random(), float(np.random.rand()), torch.initial_seed()
        (tmp_path / f"rank-{updater.across.rank}.json").write_text(json.dumps(drawn))

    monkeypatch.setattr(Updater, "synchronize", note)
    settings = settings_at("two", max_steps=1, eval_steps=9, seed=7)
    in_ranks(2, partial(rank, settings, tmp_path / "two"), tmp_path)
    for number in (0, 1):
        drawn = json.loads((tmp_path / f"rank-{number}.json").read_text())
        seed = 7 + number
        assert drawn == [random.Random(seed).random(), float(np.random.RandomState(seed).rand()), seed]


def test_a_model_that_only_one_rank_lacks_is_named(
    settings_at: SettingsAt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def missing(*_: Any, **__: Any) -> None:
        raise EmailRLError("No model here.", "Copy it.")

    monkeypatch.setattr(team, "load_trained", missing)
    zero, opened = in_ranks(2, partial(rank, settings_at("two"), tmp_path / "two"), tmp_path)
    assert str(zero) == "Rank 1: No model here. Copy it." and opened == []
    assert not (tmp_path / "two" / "grpo_masked").exists()
