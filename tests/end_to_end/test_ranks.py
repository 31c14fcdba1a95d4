"""Whole runs by several ranks: the run of one process, recorded by rank 0; rollouts on all, a sharded base, hangs."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from end_to_end.conftest import SettingsAt
from engines.vllm_stub import VllmStub, install
from ranks.processes import in_ranks
from safetensors.torch import load_file
from torch import Tensor

from emailrl.agent import play
from emailrl.base.errors import UsageError
from emailrl.checkpoints import list_checkpoints
from emailrl.model.policy import load_policy
from emailrl.ranks import Place
from emailrl.records import Record, read_records, read_trajectories
from emailrl.records.trajectory import Trajectory
from emailrl.settings import Settings, load_settings
from emailrl.training import run as run_module
from emailrl.training.loop import TrainResult, train
from emailrl.training.team import follow
from emailrl.training.update import Updater


def rank(settings: Settings, **how: Any) -> TrainResult | list[str]:
    """What one rank does; a follower returns which files below the run it opened for writing."""
    if Place.here().rank == 0:
        return train(settings, **how)
    opened, written = list[str](), settings.output.output_dir.parent

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


def test_two_ranks_make_the_run_of_one_which_rank_0_alone_records_and_each_draws_by_a_seed_of_its_own(
    one: TrainResult, settings_at: SettingsAt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Updater.synchronize

    def note(updater: Updater) -> None:
        drawn = random.random(), float(np.random.rand()), torch.initial_seed()
        (tmp_path / f"{updater.across.rank}.json").write_text(json.dumps(drawn))
        honest(updater)

    monkeypatch.setattr(Updater, "synchronize", note)
    settings = settings_at("two", per_device_train_batch_size=2)
    result, opened = in_ranks(2, partial(rank, settings), tmp_path)
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
    for number in (0, 1):
        seed = settings.training.seed + number
        wanted = [random.Random(seed).random(), float(np.random.RandomState(seed).rand()), seed]
        assert json.loads((tmp_path / f"{number}.json").read_text()) == wanted


def test_a_run_goes_on_with_another_number_of_ranks(one: TrainResult, settings_at: SettingsAt, tmp_path: Path) -> None:
    """Two steps of four questions by four ranks, the third by two; then a fourth by one."""
    for ranks, size, steps in ((4, 1, 2), (2, 2, 3)):
        settings = settings_at("some", per_device_train_batch_size=size, max_steps=steps)
        folder = tmp_path / f"{ranks}"
        folder.mkdir()
        result, *_ = in_ranks(ranks, partial(rank, settings, resume="auto"), folder)
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
    settings = settings_at("two", per_device_train_batch_size=1, **changes)
    result, _ = in_ranks(2, partial(rank, settings), tmp_path)
    mine, wanted = adapter(result.run_dir), adapter(alone.run_dir)
    for name, value in wanted.items():
        torch.testing.assert_close(mine[name], value, atol=1e-5, rtol=0)


def test_a_stop_asked_of_another_rank_ends_the_run_in_order(
    settings_at: SettingsAt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, once = Updater.take, iter([signal.SIGTERM])

    def asked(updater: Updater, share: Any) -> Any:
        for number in once if updater.across.rank else ():
            signal.raise_signal(number)
        return honest(updater, share)

    monkeypatch.setattr(Updater, "take", asked)
    settings = settings_at("two", max_steps=500, save_steps=500, rank_timeout=120)
    zero, opened = in_ranks(2, partial(rank, settings), tmp_path)
    assert isinstance(zero, KeyboardInterrupt) and opened == []
    run = tmp_path / "two/grpo_masked"
    (checkpoint,) = [item for item in list_checkpoints(run) if item.metadata.kind != "best"]
    assert checkpoint.metadata.step == len(metrics(run)) > 0


def test_a_stop_during_an_evaluation_saves_the_step_before_it(
    settings_at: SettingsAt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = run_module.TrainingRun.measure

    def interrupted(run: Any, questions: Any, step: int, label: str) -> Any:
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return honest(run, questions, step, label)

    monkeypatch.setattr(run_module.TrainingRun, "measure", interrupted)
    settings = settings_at("two", max_steps=4, eval_steps=2, save_steps=500, rank_timeout=120)
    zero, opened = in_ranks(2, partial(rank, settings), tmp_path)
    assert isinstance(zero, KeyboardInterrupt) and opened == []
    monkeypatch.undo()
    saved = {item.path.name for item in list_checkpoints(tmp_path / "two" / "grpo_masked")}
    assert saved == {"best_model", "checkpoint-2"}
    resumed, _ = in_ranks(2, partial(rank, settings, resume="latest"), tmp_path)
    evaluated = [record["step"] for record in read_records(resumed.run_dir / "evaluations.jsonl")]
    assert evaluated == [0, 2, 4] and [record["step"] for record in metrics(resumed.run_dir)] == [1, 2, 3, 4]


SHARDED = {"shard": "host", "per_device_train_batch_size": 1}


@pytest.fixture
def served_at(settings_at: SettingsAt, stub: VllmStub) -> SettingsAt:
    """The same, on the server."""
    return partial(settings_at, engine="vllm", vllm_urls=stub.url, max_staleness=0, beta=0.1)


@pytest.mark.parametrize("lag", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_two_ranks_with_a_sharded_base_make_the_run_of_one(
    lag: int, served_at: SettingsAt, stub: VllmStub, tmp_path: Path
) -> None:
    """Rank 0 proves to itself with each adapter that the server samples from it, between updates."""
    one = train(served_at("one", per_device_train_batch_size=2, max_staleness=lag))
    proofs = stub.calls.count("/v1/load_lora_adapter")
    settings = served_at("two", **SHARDED, max_staleness=lag)
    result, _ = in_ranks(2, partial(rank, settings), tmp_path)
    assert result.steps == 3 and stub.calls.count("/v1/load_lora_adapter") == 2 * proofs
    assert_close(result.run_dir, one.run_dir)
    assert sampled(result.run_dir) == sampled(one.run_dir)
    for mine, other in zip(metrics(result.run_dir), metrics(one.run_dir), strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-3, abs=1e-5)
        assert mine["kl"] == pytest.approx(other["kl"], rel=1e-3, abs=1e-6)
    assert "is sharded over the 2 ranks of a host" in (result.run_dir / "training.log").read_text()


def test_a_sharded_base_without_servers_is_refused_by_all_ranks(served_at: SettingsAt, tmp_path: Path) -> None:
    settings = served_at("two", **SHARDED | {"engine": "transformers", "vllm_urls": "", "max_staleness": None})
    first, second = in_ranks(2, partial(rank, settings), tmp_path)
    assert isinstance(first, UsageError) and "cannot sample from a sharded base model" in first.message
    assert "VLLM_URLS" in first.hint and second is not None
    assert not (tmp_path / "two").exists() or not list((tmp_path / "two").rglob("metrics.jsonl"))


def test_one_process_has_nobody_to_share_a_base_with(served_at: SettingsAt) -> None:
    with pytest.raises(UsageError, match="SHARD=host needs at least two ranks") as error:
        train(served_at("one", **SHARDED))
    assert "--nproc" in error.value.hint


HONEST = play.run


def noting(settings: Settings) -> list[list[str]]:
    """What a rank played, by id, one list for each time."""
    played: list[list[str]] = []

    def run(*given: Any, trajectories: Sequence[Trajectory], **named: Any) -> Sequence[Trajectory]:
        played.append([trajectory.id for trajectory in trajectories])
        return HONEST(*given, trajectories=trajectories, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(play, "run", run)
        rank(settings)
    return played


@pytest.mark.parametrize("world", [2, 4])
def test_each_rank_plays_its_part_of_what_one_process_samples(
    world: int, settings_at: SettingsAt, tmp_path: Path
) -> None:
    given = {"max_steps": 2, "eval_steps": 1, "max_turns": 3, "num_generations": 2}
    [*alone] = noting(settings_at("one", per_device_train_batch_size=4, **given))
    settings = settings_at("some", per_device_train_batch_size=4 // world, **given)
    ranks = in_ranks(world, partial(noting, settings), tmp_path)
    for whole, *parts in zip(alone, *ranks, strict=True):
        assert [name for part in parts for name in part] == whole
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert len(alone) >= 5  # evaluations of steps 0 to 2, and the rollouts of two steps
    assert sampled(tmp_path / "some/grpo_masked") == sampled(tmp_path / "one/grpo_masked")


def test_neighboring_ranks_share_an_engine_of_vllm(
    settings_at: SettingsAt, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"engine": "vllm", "max_steps": 1, "eval_steps": 1, "num_generations": 2, "max_turns": 1}
    install(monkeypatch, load_policy(load_settings({"model_name": str(workplace / "model")}, environ={}, cwd=tmp_path)))
    alone = noting(settings_at("one", per_device_train_batch_size=4, **given))
    settings = settings_at("four", per_device_train_batch_size=1, vllm_tensor_parallel_size=2, **given)
    zero, one, two, three = in_ranks(4, partial(noting, settings), tmp_path)
    assert zero == one and two == three
    assert [[*first, *second] for first, second in zip(zero, two, strict=True)] == alone
    assert sampled(tmp_path / "four/grpo_masked") == sampled(tmp_path / "one/grpo_masked")
    log = (tmp_path / "four/grpo_masked/training.log").read_text()
    assert "rollouts run on 2 engines, each on 2 of 4 ranks" in log


def test_ranks_that_do_not_divide_into_engines_are_refused_by_all(
    settings_at: SettingsAt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emailrl.base.install.find_spec", lambda name: name)
    settings = settings_at("three", engine="vllm", vllm_tensor_parallel_size=2)
    zero, *others = in_ranks(3, partial(rank, settings), tmp_path)
    assert isinstance(zero, UsageError) and "3 ranks on a host cannot be divided" in zero.message
    assert others == [[], []] and not (tmp_path / "three").exists()


def test_ctrl_c_ends_ranks_that_play(settings_at: SettingsAt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has played its part and waits for rank 1, which is busy for minutes."""
    first = tmp_path / "pid"

    def played(*given: Any, **named: Any) -> Sequence[Trajectory]:
        if Place.here().rank == 0:
            first.write_text(str(os.getpid()))
        else:
            time.sleep(2)
            os.kill(int(first.read_text()), signal.SIGINT)
            time.sleep(600)
        return HONEST(*given, **named)

    monkeypatch.setattr(play, "run", played)
    zero, one = in_ranks(2, partial(rank, settings_at("two")), tmp_path)
    assert isinstance(zero, KeyboardInterrupt) and one == []


def test_a_rank_without_the_database_is_named(
    settings_at: SettingsAt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Path.is_file

    def hidden() -> TrainResult | list[str]:
        if Place.here().rank == 1:
            monkeypatch.setattr(Path, "is_file", lambda path: path.suffix != ".db" and honest(path))
        return rank(settings_at("two"))

    zero, one = in_ranks(2, hidden, tmp_path)
    assert str(zero).startswith("Rank 1: No such mail database") and one == []
