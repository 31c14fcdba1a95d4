"""Several ranks: all load what rank 0 names, play a part of the conversations and train a share of the samples.

What a trajectory samples depends only on its id, so it does not matter which rank plays it. With tensor parallelism,
neighboring ranks share an engine and play the same part in lockstep; the first of them returns it.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Literal

from emailrl.agent.play import Play, Progress, Stage, build_stage
from emailrl.base.errors import UsageError
from emailrl.base.process import handled_by
from emailrl.checkpoints import CONFIG, WEIGHTS
from emailrl.engines import build_engine
from emailrl.engines.base import PolicyEngine, SamplingParams
from emailrl.mail.connection import no_database
from emailrl.model.load import load_policy
from emailrl.model.policy import Policy
from emailrl.ranks import ALONE, Activity, RankGroup, Ranks, joined
from emailrl.records.trajectory import Trajectory
from emailrl.runs.run import Interrupts, seed_generators
from emailrl.settings import Settings, TrainingSettings
from emailrl.training.across import Across
from emailrl.training.algorithms import MODES, resolve
from emailrl.training.batch import Share
from emailrl.training.update import Updater

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Role = Literal["train", "eval"]  # Training trajectories follow the mode; all others follow the settings
Order = tuple[Literal["load_adapter", "play", "release"], tuple[Any, ...]]
"""What rank 0 has the others do: the name of the ``Follower``'s method, and its arguments."""

LARGEST_GAP: Final = 1.0
"""Mean absolute difference of servers' log-probabilities, in nats. Rounding stays below 0.1 in 16 bits; the policies of
``MAX_STALENESS`` steps differ in single tokens, but not by a factor of e on average. The probe scores one completion
per server and version; this compares every trained token, which costs nothing."""
TIMES_TOLERANCE: Final = 10
"""The limit is at least this multiple of VLLM_PROBE_TOLERANCE, which allows for another base or precision."""


@dataclass(frozen=True, slots=True)
class Task:
    """What rank 0 sends the others before they load the model."""

    settings: Settings  # Without secrets
    total_steps: int
    adapter: dict[str, bytes] | None
    """Files of the initial adapter, since other hosts may not see its folder; None for a new one."""


def load_trained(settings: Settings, adapter: Path | None, ranks: Ranks, mesh: DeviceMesh | None) -> Policy:
    """The policy that a run trains, the same on every rank; ``mesh`` is that of ``mesh_of``."""
    critic, accompanied = resolve(settings).has_critic, ranks.accompanied
    return load_policy(settings, adapter=adapter, trainable=True, critic=critic, mesh=mesh, accompanied=accompanied)


def build_updater(
    policy: Policy, settings: Settings, *, total_steps: int | None = None, ranks: Ranks = ALONE
) -> Updater:
    """The updater of a run, the same on every rank."""
    tolerance = settings.vllm.vllm_probe_tolerance or 0.0
    return Updater(
        policy,
        resolve(settings),
        settings.training,
        settings.algorithm,
        settings.agent,
        total_steps=total_steps,
        across=Across(ranks, sharded=policy.sharded),
        largest_gap=max(LARGEST_GAP, TIMES_TOLERANCE * tolerance) if settings.has_servers else math.inf,
    )


def build_stages(settings: Settings, policy: Policy) -> dict[Role, Stage]:
    """Where the conversations of each role take place."""
    make = MODES[settings.training.mode].make_environment
    return {"train": build_stage(settings, policy, make), "eval": build_stage(settings, policy)}


def mesh_of(shard: str, ranks: Ranks) -> DeviceMesh | None:
    """This host's ranks, if a base may be sharded over them; UsageError for SHARD=host with only one rank."""
    mesh = None if shard == "off" else ranks.host_mesh()
    if mesh is None and shard == "host":
        raise UsageError(
            "SHARD=host needs at least two ranks per host, the same number on every host.",
            "Start them with emailrl train --nproc N, or unset SHARD.",
        )
    return mesh


def plays_on_all(settings: Settings, ranks: Ranks) -> bool:
    """Whether every rank has an engine: there are several ranks and no vLLM servers."""
    return not ranks.is_alone and not settings.has_servers


def leave_and_close(ranks: Ranks, engine: PolicyEngine) -> None:
    """Close this rank's engine; closing vLLM also ends the process group, and may wait forever for a lost rank."""
    ranks.leave()
    if ranks.lost is None:
        engine.close()


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
        """See ``Sampler.load_adapter``; all engines load it together, from the files that are broadcast."""
        with self._ordered([("load_adapter", (version,))] * self.ranks.world):
            self.ranks.broadcast(read_adapter(path))
            self.ranks.agree(lambda: self.engine.load_adapter(path, version))

    def release(self) -> None:
        """See ``Sampler.release``."""
        with self._ordered([("release", ())] * self.ranks.world):
            self.ranks.agree(self.engine.release)

    def resume(self) -> None:
        """See ``Sampler.resume``; the other ranks do so with their next order."""
        self.engine.resume()

    def player(self, stage: Stage, role: Role) -> Play:
        """Play with the engines of all ranks; ``stage`` is rank 0's."""

        def play(
            trajectories: Sequence[Trajectory], sampling: SamplingParams, seed: int, progress: Progress = None
        ) -> Sequence[Trajectory]:
            """``progress`` receives other ranks' trajectories once all have ended."""
            self.interrupts.check()  # before the other ranks begin
            ranks, num_engines = self.ranks, self.ranks.world // self.per_engine
            # In order, in parts of nearly equal size, so that most groups, which share a prompt, stay together.
            bounds = [len(trajectories) * number // num_engines for number in range(num_engines + 1)]
            parts = [trajectories[begin:end] for begin, end in pairwise(bounds)]
            orders: list[Order] = [
                ("play", (parts[rank // self.per_engine], sampling, seed, role)) for rank in range(ranks.world)
            ]

            def own(activity: Activity) -> Sequence[Trajectory]:
                return stage.on(self.engine, activity)(parts[0], sampling, seed, progress)

            with self._ordered(orders):
                with self.interrupts.droppable():
                    played = ranks.apart(own)
                first, *others = ranks.collect(played)
            theirs = [trajectory for part in others for trajectory in part]
            if progress is not None:
                for trajectory in theirs:
                    progress(trajectory)
            return [*first, *theirs]

        return play

    @contextmanager
    def _ordered(self, orders: Sequence[Order]) -> Iterator[None]:
        """Send each rank its order and carry out rank 0's own; the first Ctrl-C does not interrupt it."""
        with self.interrupts.held(), self.ranks.at_work():
            self.ranks.scatter(orders)
            yield


def follow(training: TrainingSettings, device: str) -> None:
    """Run as a rank that works for rank 0, until rank 0 ends.

    ``training`` and ``device`` are used to connect; all other settings come from rank 0. SIGINT and SIGTERM are passed
    on to rank 0: the first lets it end the run cleanly, a SIGINT after it ends this process.
    """
    with joined(training, device=device) as ranks:
        assert isinstance(ranks, RankGroup)
        asked: list[int] = []

        def handle(number: int, frame: FrameType | None) -> None:
            if ranks.is_over or (asked and number == signal.SIGINT):
                raise KeyboardInterrupt
            asked.append(number)
            ranks.stop()

        with handled_by(handle), closing(Follower(ranks)) as follower:
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
            self._start()
            return
        order: Order | Share | None = self.ranks.scatter(None)
        if order is None:
            self.updater.forward.pass_along()
        elif isinstance(order, Share):
            self.updater.take(order)
        else:
            name, arguments = order
            getattr(self, name)(*arguments)

    def close(self) -> None:
        """Release the engine, if there is one, and its adapter's files."""
        if self.engine is not None:
            leave_and_close(self.ranks, self.engine)
        self._folder.close()

    def load_adapter(self, version: str) -> None:
        """Sample from the adapter that is broadcast next; from the bare base model if it is None."""
        files: dict[str, bytes] | None = self.ranks.broadcast(None)
        before, self._folder = self._folder, ExitStack()
        folder = Path(self._folder.enter_context(TemporaryDirectory(prefix="emailrl-adapter-")))
        self.ranks.agree(lambda: self._awake().load_adapter(write_adapter(files, folder), version))
        before.close()

    def play(self, trajectories: Sequence[Trajectory], sampling: SamplingParams, seed: int, role: Role) -> None:
        """Play these trajectories."""

        def played(activity: Activity) -> Sequence[Trajectory]:
            activity.note("waking the engine")
            return self.stages[role].on(self._awake(), activity)(trajectories, sampling, seed, None)

        ended = self.ranks.apart(played)
        self.ranks.collect(ended if self._hands_in else [])

    def release(self) -> None:
        """Release the engine's memory."""
        assert self.engine is not None
        self.ranks.agree(self.engine.release)

    def _awake(self) -> PolicyEngine:
        assert self.engine is not None
        self.engine.resume()
        return self.engine

    def _start(self) -> None:
        task: Task | None = self.ranks.broadcast(None)
        assert task is not None
        settings = task.settings
        seed_generators(settings.training.seed + self.ranks.rank)  # so that no environment draws as on rank 0
        mesh = mesh_of(settings.model.shard, self.ranks)

        def load() -> Updater:
            with TemporaryDirectory() as folder:
                policy = load_trained(settings, write_adapter(task.adapter, Path(folder)), self.ranks, mesh)
            if plays_on_all(settings, self.ranks):
                if not settings.store.db.is_file():
                    raise no_database(settings.store.db)
                self.engine = build_engine(settings, policy)
                self._hands_in = self.ranks.rank % settings.engine_gpus == 0
                self.stages = build_stages(settings, policy)
            return build_updater(policy, settings, total_steps=task.total_steps, ranks=self.ranks)

        updater = self.ranks.agree(load)
        updater.synchronize()
        self.ranks.started()
        self.updater = updater
