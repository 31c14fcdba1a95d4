"""Rollouts by all ranks, each with an engine on its own card: what one process samples, however many there are."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from end_to_end.conftest import SettingsAt
from engines.vllm_stub import install
from ranks.processes import in_ranks

from emailrl.agent import play
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.model.load import load_policy
from emailrl.ranks import LostRank, Place
from emailrl.records import read_trajectories
from emailrl.records.trajectory import Trajectory
from emailrl.settings import Settings, load_settings
from emailrl.training.loop import train
from emailrl.training.team import follow

HONEST = play.run


def train_or_follow(settings: Settings) -> None:
    train(settings) if Place.here().rank == 0 else follow(settings.training, settings.model.device)


def noting(settings: Settings) -> list[list[str]]:
    """What a rank played, by id, one list for each time."""
    played: list[list[str]] = []

    def run(*given: Any, trajectories: Sequence[Trajectory], **named: Any) -> Sequence[Trajectory]:
        played.append([trajectory.id for trajectory in trajectories])
        return HONEST(*given, trajectories=trajectories, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(play, "run", run)
        train_or_follow(settings)
    return played


def recorded(run: Path) -> dict[str, list[Trajectory]]:
    return {path.name: list(read_trajectories(path)) for path in sorted((run / "trajectories").glob("*.jsonl"))}


def assert_same(run: Path, other: Path) -> None:
    """The same trajectories in the same order: ids exactly, log-probabilities up to the rounding of other batches."""
    mine, wanted = recorded(run), recorded(other)
    assert mine.keys() == wanted.keys()
    for name, trajectories in mine.items():
        for one, two in zip(trajectories, wanted[name], strict=True):
            assert (one.id, one.messages, one.rubric, one.policy_version) == (
                two.id, two.messages, two.rubric, two.policy_version,
            )  # fmt: skip
            for sample, same in zip(one.samples, two.samples, strict=True):
                assert (sample.token_ids, sample.loss_mask) == (same.token_ids, same.loss_mask)
                known = [pair for pair in zip(sample.sampler_logprobs, same.sampler_logprobs, strict=True) if pair[0]]
                assert known and all(a == pytest.approx(b, abs=1e-4) for a, b in known)
            assert one.reward == pytest.approx(two.reward, abs=1e-6)


@pytest.mark.parametrize("world", [2, 4])
def test_each_rank_plays_its_part_of_what_one_process_samples(
    world: int, settings_at: SettingsAt, tmp_path: Path
) -> None:
    given = {"max_steps": 2, "eval_steps": 1, "max_turns": 3, "num_generations": 2}
    [*alone] = noting(settings_at("one", per_device_train_batch_size=4, **given))
    ranks = in_ranks(
        world, partial(noting, settings_at("some", per_device_train_batch_size=4 // world, **given)), tmp_path
    )
    for whole, *parts in zip(alone, *ranks, strict=True):
        assert [name for part in parts for name in part] == whole
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert len(alone) >= 5  # evaluations of steps 0 to 2, and the rollouts of two steps
    assert_same(tmp_path / "some/grpo_masked", tmp_path / "one/grpo_masked")


def test_neighboring_ranks_share_an_engine_of_vllm(
    settings_at: SettingsAt, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"engine": "vllm", "max_steps": 1, "eval_steps": 1, "num_generations": 2}
    install(monkeypatch, load_policy(load_settings({"model_name": str(workplace / "model")}, environ={}, cwd=tmp_path)))
    alone = noting(settings_at("one", per_device_train_batch_size=4, **given))
    settings = settings_at("four", per_device_train_batch_size=1, vllm_tensor_parallel_size=2, **given)
    zero, one, two, three = in_ranks(4, partial(noting, settings), tmp_path)
    assert zero == one and two == three
    assert [[*first, *second] for first, second in zip(zero, two, strict=True)] == alone
    assert_same(tmp_path / "four/grpo_masked", tmp_path / "one/grpo_masked")
    log = (tmp_path / "four/grpo_masked/training.log").read_text()
    assert "rollouts run on 2 engines, each on 2 of 4 ranks" in log


def test_ranks_that_do_not_divide_into_engines_are_refused_by_all(
    settings_at: SettingsAt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emailrl.engines.vllm.arguments.find_spec", lambda name: name)
    settings = settings_at("three", engine="vllm", vllm_tensor_parallel_size=2)
    zero, *others = in_ranks(3, partial(train_or_follow, settings), tmp_path)
    assert isinstance(zero, UsageError) and "3 ranks on a host cannot be divided" in zero.message
    assert others == [None, None] and not (tmp_path / "three").exists()


def broken(settings: Settings, where: int, what: Callable[[], None]) -> None:
    """Train while ``what`` happens whenever one rank plays."""

    def run(*given: Any, **named: Any) -> Sequence[Trajectory]:
        if Place.here().rank == where:
            what()
        return HONEST(*given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(play, "run", run)
        train_or_follow(settings)


def away() -> None:
    raise EmailRLError("The mailbox is away.")


@pytest.mark.parametrize(("where", "said"), [(0, "The mailbox is away."), (1, "Rank 1: The mailbox is away.")])
def test_an_error_of_one_rank_ends_all_at_once_with_one_line(
    where: int, said: str, settings_at: SettingsAt, tmp_path: Path
) -> None:
    def run() -> None:
        here = Place.here().rank
        broken(settings_at("two"), here, away if here == where else lambda: time.sleep(60))

    begun = time.monotonic()
    zero, one = in_ranks(2, run, tmp_path)
    assert str(zero) == said and one is None and time.monotonic() - begun < 50


def test_ctrl_c_ends_ranks_that_play(settings_at: SettingsAt, tmp_path: Path) -> None:
    """Rank 0 has played its part and waits for rank 1, which is busy for a minute."""
    first = tmp_path / "pid"

    def interrupt() -> None:
        time.sleep(2)
        os.kill(int(first.read_text()), signal.SIGINT)
        time.sleep(60)

    def run() -> None:
        if Place.here().rank == 0:
            first.write_text(str(os.getpid()))
        broken(settings_at("two"), 1, interrupt)

    begun = time.monotonic()
    zero, one = in_ranks(2, run, tmp_path)
    assert isinstance(zero, KeyboardInterrupt) and one is None
    assert time.monotonic() - begun < 60


def test_a_rank_that_dies_while_it_plays_ends_all(settings_at: SettingsAt, tmp_path: Path) -> None:
    zero, one = in_ranks(
        2, partial(broken, settings_at("two"), 1, lambda: os.kill(os.getpid(), signal.SIGKILL)), tmp_path
    )
    assert isinstance(zero, LostRank) and "Rank 1 of 2 ended" in zero.message and one is None


def test_a_rank_without_the_database_is_named(
    settings_at: SettingsAt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Path.is_file

    def hidden() -> None:
        if Place.here().rank == 1:
            monkeypatch.setattr(Path, "is_file", lambda path: path.suffix != ".db" and honest(path))
        train_or_follow(settings_at("two"))

    zero, one = in_ranks(2, hidden, tmp_path)
    assert str(zero).startswith("Rank 1: No such mail database") and one is None
