"""Rollouts on all ranks: each plays a part of the conversations with an engine on its own GPU.

Rank 0 asks the questions, distributes the trajectories, gathers, scores and records them. What a trajectory samples
depends only on its id, so it does not matter which rank plays it. With tensor parallelism, several neighboring ranks
share an engine and play the same part in lockstep; the first of them returns it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Literal

from emailrl.agent.play import Play, Stage, build_stage
from emailrl.engines import OpenPolicy
from emailrl.engines.base import PolicyEngine, SamplingParams
from emailrl.mail.connection import no_database
from emailrl.model.adapter import CONFIG, WEIGHTS
from emailrl.ranks import Activity, Ranks
from emailrl.records.trajectory import Trajectory
from emailrl.settings import Settings
from emailrl.training.run.interrupts import Interrupts
from emailrl.training.run.modes import MODES

Role = Literal["train", "eval"]
"""Training trajectories follow the mode; all others follow the settings."""


@dataclass(frozen=True, slots=True)
class Load:
    """Sample from the adapter that is broadcast next; from the bare base model if it is None."""

    version: str


@dataclass(frozen=True, slots=True)
class PlayPart:
    """Play these trajectories."""

    trajectories: Sequence[Trajectory]
    sampling: SamplingParams
    seed: int
    role: Role


@dataclass(frozen=True, slots=True)
class Release:
    """Release the engine's memory."""


Order = Load | PlayPart | Release
ORDERS: Final = (Load, PlayPart, Release)


def plays_on_all(settings: Settings, ranks: Ranks) -> bool:
    """Whether every rank has an engine: there are several ranks and no vLLM servers."""
    return not ranks.is_alone and not settings.has_servers


def leave_and_close(ranks: Ranks, engine: PolicyEngine) -> None:
    """Close this rank's engine; closing vLLM also ends the process group, and may wait forever for a lost rank."""
    ranks.leave()
    if ranks.lost is None:
        engine.close()


def team_notes(settings: Settings, ranks: Ranks) -> list[str]:
    """Note on the engines for a run's header; none for a single process or vLLM servers."""
    if not plays_on_all(settings, ranks):
        return []
    each, several = settings.engine_gpus, ranks.world
    return [f"rollouts run on {several // each} engines, each on {each} of {several} ranks"]


def deal(trajectories: Sequence[Trajectory], num_engines: int) -> list[Sequence[Trajectory]]:
    """Split in order into parts of nearly equal size, so that most groups, which share a prompt, stay together."""
    bounds = [len(trajectories) * number // num_engines for number in range(num_engines + 1)]
    return [trajectories[begin:end] for begin, end in pairwise(bounds)]


def read_adapter(path: Path | None) -> dict[str, bytes] | None:
    """Read an adapter's files for ranks on hosts that may not see its folder; None for no adapter."""
    return None if path is None else {name: (path / name).read_bytes() for name in (CONFIG, WEIGHTS)}


def write_adapter(files: dict[str, bytes] | None, folder: Path) -> Path | None:
    """The inverse of ``read_adapter``: write the files to ``folder``."""
    for name, content in (files or {}).items():
        (folder / name).write_bytes(content)
    return folder if files else None


class Team:
    """Rank 0's side; its own engine is one of those it directs."""

    def __init__(self, ranks: Ranks, engine: PolicyEngine, interrupts: Interrupts, *, per_engine: int) -> None:
        self.ranks, self.engine, self.interrupts, self.per_engine = ranks, engine, interrupts, per_engine

    def load_adapter(self, path: Path | None, version: str) -> None:
        """See ``Sampler.load_adapter``; all engines load it together."""
        with self.ordered([Load(version)] * self.ranks.world):
            self.ranks.broadcast(read_adapter(path))
            self.ranks.agree(lambda: self.engine.load_adapter(path, version))

    def release(self) -> None:
        """See ``Sampler.release``."""
        with self.ordered([Release()] * self.ranks.world):
            self.ranks.agree(self.engine.release)

    def resume(self) -> None:
        """See ``Sampler.resume``; the other ranks do so with their next order."""
        self.engine.resume()

    @contextmanager
    def ordered(self, orders: Sequence[Order]) -> Iterator[None]:
        """Send each rank its order and carry out rank 0's own; the first Ctrl-C does not interrupt it."""
        with self.interrupts.held(), self.ranks.at_work():
            self.ranks.scatter(orders)
            yield


def play_on_all(team: Team, stage: Stage, role: Role) -> Play:
    """Play with the engines of all ranks; ``stage`` is rank 0's."""

    def play(
        trajectories: Sequence[Trajectory],
        sampling: SamplingParams,
        seed: int,
        progress: Callable[[Trajectory], None] | None = None,
    ) -> Sequence[Trajectory]:
        """``progress`` receives other ranks' trajectories once all have ended."""
        team.interrupts.check()  # before the other ranks begin
        ranks, per_engine = team.ranks, team.per_engine
        parts = deal(trajectories, ranks.world // per_engine)
        orders = [PlayPart(parts[rank // per_engine], sampling, seed, role) for rank in range(ranks.world)]
        with team.ordered(orders):
            with team.interrupts.droppable():
                played = ranks.apart(
                    lambda activity: stage.noted(team.engine, activity)(parts[0], sampling, seed, progress)
                )
            first, *others = ranks.collect(played)
        theirs = [trajectory for part in others for trajectory in part]
        if progress is not None:
            for trajectory in theirs:
                progress(trajectory)
        return [*first, *theirs]

    return play


class Member:
    """Another rank's side: carries out rank 0's orders."""

    def __init__(self, ranks: Ranks, settings: Settings, opened: OpenPolicy) -> None:
        if not settings.store.db.is_file():
            raise no_database(settings.store.db)
        self.ranks, self.engine = ranks, opened.engine
        self.hands_in = ranks.rank % settings.engine_gpus == 0
        make = MODES[settings.training.mode].make_environment
        self.stages: dict[Role, Stage] = {
            "train": build_stage(settings, opened.policy, make),
            "eval": build_stage(settings, opened.policy),
        }
        self._folder = ExitStack()

    def do(self, order: Order) -> None:
        """Carry out one order."""
        match order:
            case Load():
                self._load(order.version)
            case PlayPart():
                played = self.ranks.apart(lambda activity: self._play(order, activity))
                self.ranks.collect(played if self.hands_in else [])
            case Release():
                self.ranks.agree(self.engine.release)

    def close(self) -> None:
        """Release the engine and its adapter's files."""
        leave_and_close(self.ranks, self.engine)
        self._folder.close()

    def _load(self, version: str) -> None:
        files: dict[str, bytes] | None = self.ranks.broadcast(None)
        before, self._folder = self._folder, ExitStack()
        folder = Path(self._folder.enter_context(TemporaryDirectory(prefix="emailrl-adapter-")))

        def load() -> None:
            self.engine.resume()
            self.engine.load_adapter(write_adapter(files, folder), version)

        self.ranks.agree(load)
        before.close()

    def _play(self, order: PlayPart, activity: Activity) -> Sequence[Trajectory]:
        activity.note("waking the engine")
        self.engine.resume()
        play = self.stages[order.role].noted(self.engine, activity)
        return play(order.trajectories, order.sampling, order.seed, None)
