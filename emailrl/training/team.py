"""Several ranks: all load what rank 0 names, play a part of the conversations and train a share of the samples.

Rank 0 asks the questions, distributes the trajectories, gathers, scores and records them. What a trajectory samples
depends only on its id, so it does not matter which rank plays it. With tensor parallelism, several neighboring ranks
share an engine and play the same part in lockstep; the first of them returns it.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import TYPE_CHECKING, Final, Literal

from emailrl.agent.play import Play, Stage, build_stage
from emailrl.base.errors import UsageError
from emailrl.base.process import handled_by
from emailrl.engines import build_engine
from emailrl.engines.base import PolicyEngine, SamplingParams
from emailrl.mail.connection import no_database
from emailrl.model.adapter import CONFIG, WEIGHTS
from emailrl.model.load import load_policy
from emailrl.model.policy import Policy
from emailrl.ranks import ALONE, Activity, RankGroup, Ranks, joined
from emailrl.records.trajectory import Trajectory
from emailrl.runs.interrupts import Interrupts
from emailrl.runs.resume import seed_generators
from emailrl.settings import PolicySettings, Settings, TrainingSettings
from emailrl.training.across import Across
from emailrl.training.algorithms import Algorithm
from emailrl.training.batch import Share
from emailrl.training.mix import resolve
from emailrl.training.modes import MODES
from emailrl.training.update import Updater

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Role = Literal["train", "eval"]
"""Training trajectories follow the mode; all others follow the settings."""

LARGEST_GAP: Final = 1.0
"""Mean absolute difference of servers' log-probabilities, in nats. Rounding stays below 0.1 in 16 bits; the policies of
``MAX_STALENESS`` steps differ in single tokens, but not by a factor of e on average. The probe scores one completion
per server and version; this compares every trained token, which costs nothing."""
TIMES_TOLERANCE: Final = 10
"""The limit is at least this multiple of VLLM_PROBE_TOLERANCE, which allows for another base or precision."""


# -- what every rank loads ------------------------------------------------------------------------------------------


def load_trained(
    settings: PolicySettings, algorithm: Algorithm, adapter: Path | None, ranks: Ranks, mesh: DeviceMesh | None
) -> Policy:
    """The policy that a run trains, the same on every rank; ``mesh`` is that of ``mesh_of``."""
    return load_policy(
        settings,
        adapter=adapter,
        trainable=True,
        critic=algorithm.has_critic,
        mesh=mesh,
        accompanied=ranks.accompanied,
    )


def build_updater(
    policy: Policy,
    algorithm: Algorithm,
    settings: PolicySettings,
    *,
    total_steps: int | None = None,
    ranks: Ranks = ALONE,
) -> Updater:
    """The updater of a run, the same on every rank."""
    tolerance = settings.vllm.vllm_probe_tolerance or 0.0
    return Updater(
        policy,
        algorithm,
        settings.training,
        settings.algorithm,
        settings.agent,
        total_steps=total_steps,
        across=Across(ranks, sharded=policy.sharded),
        largest_gap=max(LARGEST_GAP, TIMES_TOLERANCE * tolerance) if settings.has_servers else math.inf,
    )


def mesh_of(shard: str, ranks: Ranks) -> DeviceMesh | None:
    """This host's ranks, if a base may be sharded over them; UsageError for SHARD=host with only one rank."""
    mesh = None if shard == "off" else ranks.host_mesh()
    if mesh is None and shard == "host":
        raise UsageError(
            "SHARD=host needs at least two ranks per host, the same number on every host.",
            "Start them with emailrl train --nproc N, or unset SHARD.",
        )
    return mesh


def plays_on_all(settings: PolicySettings, ranks: Ranks) -> bool:
    """Whether every rank has an engine: there are several ranks and no vLLM servers."""
    return not ranks.is_alone and not settings.has_servers


def leave_and_close(ranks: Ranks, engine: PolicyEngine) -> None:
    """Close this rank's engine; closing vLLM also ends the process group, and may wait forever for a lost rank."""
    ranks.leave()
    if ranks.lost is None:
        engine.close()


# -- rank 0's orders ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Task:
    """What rank 0 sends the others before they load the model."""

    settings: Settings
    """Without secrets."""
    total_steps: int
    adapter: dict[str, bytes] | None
    """Files of the initial adapter, since other hosts may not see its folder; None for a new one."""


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


# -- the other ranks ------------------------------------------------------------------------------------------------


def follow(training: TrainingSettings, device: str) -> None:
    """Run as a rank that works for rank 0, until rank 0 ends.

    ``training`` and ``device`` are used to connect; all other settings come from rank 0. SIGINT and SIGTERM are passed
    on to rank 0: the first lets it end the run cleanly, a SIGINT after it ends this process.
    """
    with joined(training, device=device) as ranks:
        assert isinstance(ranks, RankGroup)
        with _asking(ranks), closing(Follower(ranks)) as follower:
            ranks.follow(follower.work)


class Follower:
    """Carries out rank 0's calls: first load the model, then sample and train."""

    def __init__(self, ranks: RankGroup) -> None:
        self.ranks = ranks
        self.updater: Updater | None = None
        self.engine: PolicyEngine | None = None
        self.stages: dict[Role, Stage] = {}
        self._hands_in = False
        self._folder = ExitStack()

    def work(self) -> None:
        """Handle one call from rank 0."""
        if self.updater is None:
            self._load()
            return
        order: Order | Share | None = self.ranks.scatter(None)
        match order:
            case Load():
                self._load_adapter(order.version)
            case PlayPart():
                played = self.ranks.apart(lambda activity: self._play(order, activity))
                self.ranks.collect(played if self._hands_in else [])
            case Release():
                self.ranks.agree(self._woken(awake=False).release)
            case Share():
                self.updater.take(order)
            case None:
                self.updater.forward.pass_along()

    def close(self) -> None:
        """Release the engine, if there is one, and its adapter's files."""
        if self.engine is not None:
            leave_and_close(self.ranks, self.engine)
        self._folder.close()

    def _load(self) -> None:
        task: Task | None = self.ranks.broadcast(None)
        assert task is not None
        seed_generators(task.settings.training.seed + self.ranks.rank)  # so that no environment draws as on rank 0
        mesh = mesh_of(task.settings.model.shard, self.ranks)
        updater = self.ranks.agree(lambda: self._load_policy(task, mesh))
        updater.synchronize()
        self.ranks.started()
        self.updater = updater

    def _load_policy(self, task: Task, mesh: DeviceMesh | None) -> Updater:
        settings, algorithm = task.settings, resolve(task.settings)
        with TemporaryDirectory() as folder:
            policy = load_trained(settings, algorithm, write_adapter(task.adapter, Path(folder)), self.ranks, mesh)
        if plays_on_all(settings, self.ranks):
            if not settings.store.db.is_file():
                raise no_database(settings.store.db)
            self.engine = build_engine(settings, policy)
            self._hands_in = self.ranks.rank % settings.engine_gpus == 0
            make = MODES[settings.training.mode].make_environment
            self.stages = {"train": build_stage(settings, policy, make), "eval": build_stage(settings, policy)}
        return build_updater(policy, algorithm, settings, total_steps=task.total_steps, ranks=self.ranks)

    def _woken(self, *, awake: bool = True) -> PolicyEngine:
        assert self.engine is not None
        if awake:
            self.engine.resume()
        return self.engine

    def _load_adapter(self, version: str) -> None:
        files: dict[str, bytes] | None = self.ranks.broadcast(None)
        before, self._folder = self._folder, ExitStack()
        folder = Path(self._folder.enter_context(TemporaryDirectory(prefix="emailrl-adapter-")))
        self.ranks.agree(lambda: self._woken().load_adapter(write_adapter(files, folder), version))
        before.close()

    def _play(self, order: PlayPart, activity: Activity) -> Sequence[Trajectory]:
        activity.note("waking the engine")
        play = self.stages[order.role].noted(self._woken(), activity)
        return play(order.trajectories, order.sampling, order.seed, None)


@contextmanager
def _asking(ranks: RankGroup) -> Iterator[None]:
    """Pass SIGINT or SIGTERM on to rank 0; a SIGINT after it is a KeyboardInterrupt."""
    asked: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if ranks.is_over or (asked and number == signal.SIGINT):
            raise KeyboardInterrupt
        asked.append(number)
        ranks.stop()

    with handled_by(handle):
        yield
