"""Several ranks: all load what rank 0 names, play a part of the conversations and train a share of the samples. What a
trajectory samples depends only on its id, so it does not matter which rank plays it. With tensor parallelism,
neighboring ranks share an engine and play the same part in lockstep; the first of them returns it."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Literal

from emailrl.agent.play import Progress, Stage, build_stage, check_template
from emailrl.base.errors import UsageError
from emailrl.base.process import handled_by
from emailrl.checkpoints import CONFIG, WEIGHTS
from emailrl.engines import build_engine
from emailrl.engines.base import PolicyEngine, SamplingParams
from emailrl.engines.vllm.teacher import ServerTeacher
from emailrl.mail.database import no_database
from emailrl.model.policy import Policy, load_policy
from emailrl.model.teacher import Teacher, fingerprint, load_teacher
from emailrl.ranks import ALONE, Activity, RankGroup, Ranks, joined
from emailrl.records.trajectory import Trajectory
from emailrl.runs.log import silent
from emailrl.runs.run import Interrupts, seed_generators
from emailrl.settings import Settings, TrainingSettings
from emailrl.settings.fields import is_url
from emailrl.training.across import Across
from emailrl.training.algorithms import MODES, Algorithm
from emailrl.training.batch import Share
from emailrl.training.update import Updater

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Role = Literal["train", "eval"]  # Training trajectories follow the mode; all others follow the settings
Stages = dict[Role, Stage]  # Where the conversations of each role take place
Begin = Callable[[Updater], None]
Loaded = tuple[Updater, PolicyEngine | None, Stages]  # Engine and stages only of a rank that plays
Work = Callable[[], object]
Join = Callable[[RankGroup, ExitStack], Work]
Adapter = Path | dict[str, bytes] | None  # Its folder, or its files for a rank on a host that may not see that

LARGEST_GAP: Final = 1.0
"""Mean absolute difference of servers' log-probabilities, in nats. Rounding stays below 0.1 in 16 bits; the policies of
``MAX_STALENESS`` steps differ in single tokens, but not by a factor of e on average. The probe scores one completion
per server and version; this compares every trained token, which costs nothing."""
TIMES_TOLERANCE: Final = 10
"""The limit is at least this multiple of VLLM_PROBE_TOLERANCE, which allows for another base or precision."""


def identify_teacher(settings: Settings) -> str | None:
    """What identifies the weights of a run's teacher; None without one. EmailRLError if a server does not answer."""
    named = settings.training.teacher
    return named and (ServerTeacher(settings).identify() if is_url(named) else fingerprint(settings))


def build_teacher(settings: Settings, policy: Policy) -> Teacher | None:
    """The teacher of a run, the same on every rank; None without one. Raises UsageError for another tokenizer."""
    if named := settings.training.teacher:
        return ServerTeacher(settings).checked(policy) if is_url(named) else load_teacher(settings, policy)
    return None


def build_updater(
    policy: Policy, settings: Settings, algorithm: Algorithm, *, total_steps: int | None = None, ranks: Ranks = ALONE
) -> Updater:
    """The updater of a run, the same on every rank, with its teacher."""
    gap = max(LARGEST_GAP, TIMES_TOLERANCE * (settings.vllm.vllm_probe_tolerance or 0.0))
    gap = gap if settings.has_servers else math.inf
    parts = algorithm, settings.training, settings.algorithm, settings.agent
    across, teacher = Across(ranks, sharded=policy.sharded), build_teacher(settings, policy)
    return Updater(policy, *parts, total_steps=total_steps, across=across, largest_gap=gap, teacher=teacher)


def mesh_of(shard: str, ranks: Ranks) -> DeviceMesh | None:
    """This host's ranks, if a base may be sharded over them; UsageError for SHARD=host with only one rank."""
    mesh = None if shard == "off" else ranks.host_mesh()
    if mesh is None and shard == "host":
        hint = "Start them with emailrl train --nproc N, or unset SHARD."
        raise UsageError("SHARD=host needs at least two ranks per host, the same number on every host.", hint)
    return mesh


def plays_on_all(settings: Settings, ranks: Ranks) -> bool:
    """Whether every rank has an engine: there are several ranks and no vLLM servers."""
    return not ranks.is_alone and not settings.has_servers


def read_adapter(path: Path | None) -> dict[str, bytes] | None:
    """Read an adapter's files for ranks on hosts that may not see its folder; None for no adapter."""
    return None if path is None else {name: (path / name).read_bytes() for name in (CONFIG, WEIGHTS)}


def write_adapter(files: dict[str, bytes] | None, folder: Path) -> Path | None:
    """The inverse of ``read_adapter``: write the files to ``folder``."""
    for name, content in (files or {}).items():
        (folder / name).write_bytes(content)
    return folder if files else None


def load(
    settings: Settings, algorithm: Algorithm, adapter: Adapter, total: int, ranks: Ranks, stack: ExitStack, begin: Begin
) -> Loaded:
    """On every rank: load the model, build the updater, ``begin`` with its state, and take rank 0's weights. Returns
    the updater, this rank's engine, which ``stack`` closes, and its stages."""
    mesh, critic, beside = mesh_of(settings.model.shard, ranks), algorithm.has_critic, ranks.accompanied

    def work() -> Loaded:
        with TemporaryDirectory() as folder:
            path = write_adapter(adapter, Path(folder)) if isinstance(adapter, dict) else adapter
            policy = load_policy(
                settings, adapter=path, trainable=True, critic=critic, mesh=mesh, accompanied=beside,
                check=partial(check_template, settings),
            )  # fmt: skip
        # Before an engine takes what is free.
        updater = build_updater(policy, settings, algorithm, total_steps=total, ranks=ranks)
        engine, stages = None, Stages()
        if ranks.is_first or plays_on_all(settings, ranks):
            if not settings.store.db.is_file():
                raise no_database(settings.store.db)
            engine = build_engine(settings, policy)
            stack.callback(_close, ranks, engine)
            make = MODES[settings.training.mode].make_environment
            stages = {"train": build_stage(settings, policy, make), "eval": build_stage(settings, policy)}
        begin(updater)
        return updater, engine, stages

    loaded = ranks.agree(work)
    loaded[0].synchronize()
    ranks.started()
    return loaded


def _close(ranks: Ranks, engine: PolicyEngine) -> None:
    """Close this rank's engine; closing vLLM also ends the process group, and may wait forever for a lost rank."""
    ranks.leave()
    if ranks.lost is None:
        engine.close()


@dataclass
class Team:
    """The engines of all ranks, of which each rank has its own: rank 0 calls, and all do their part together."""

    ranks: Ranks
    engine: PolicyEngine
    stages: Stages
    per_engine: int  # Ranks that share an engine
    interrupts: Interrupts
    folder: ExitStack = field(default_factory=ExitStack)  # Holds the adapter loaded last, if it came from rank 0

    # -- on rank 0

    def load_adapter(self, path: Path | None, version: str) -> None:
        """See ``Sampler.load_adapter``; all engines load it together, from the files that are broadcast."""
        self._call("load", [(version,)] * self.ranks.world, path)

    def release(self) -> None:
        """See ``Sampler.release``."""
        self._call("sleep", [()] * self.ranks.world)

    def resume(self) -> None:
        """See ``Sampler.resume``; the other ranks do so with their next call."""
        self.engine.resume()

    def play_all(
        self, role: Role, given: Sequence[Trajectory], sampling: SamplingParams, seed: int, progress: Progress = None
    ) -> Sequence[Trajectory]:
        """``Play`` with all engines; ``progress`` receives other ranks' trajectories once all have ended."""
        self.interrupts.check()  # before the other ranks begin
        num_engines = self.ranks.world // self.per_engine
        # In order, in parts of nearly equal size, so that most groups, which share a prompt, stay together.
        bounds = [len(given) * number // num_engines for number in range(num_engines + 1)]
        parts = [(role, given[begin:end], sampling, seed) for begin, end in pairwise(bounds)]
        ranks = range(self.ranks.world)
        first, *others = self._call("play", [parts[rank // self.per_engine] for rank in ranks], progress)
        theirs = [trajectory for part in others for trajectory in part]
        if progress is not None:
            for trajectory in theirs:
                progress(trajectory)
        return [*first, *theirs]

    def _call(self, name: str, parts: Sequence[tuple[Any, ...]], *own: Any) -> Any:
        """Have each rank do the method with its part, rank 0 with its ``own`` as well; the first Ctrl-C waits."""
        with self.interrupts.held(), self.ranks.at_work():
            self.ranks.scatter([(name, part) for part in parts])
            return getattr(self, name)(*parts[0], *own)

    # -- on every rank

    def load(self, version: str, path: Path | None = None) -> None:
        """Sample from rank 0's adapter in ``path`` from now on; from the bare base model if it is None."""
        files = self.ranks.broadcast(read_adapter(path))
        before = self.folder.pop_all()

        def work() -> None:
            own = path
            if not self.ranks.is_first:
                folder = self.folder.enter_context(TemporaryDirectory(prefix="emailrl-adapter-"))
                own = write_adapter(files, Path(folder))
            self.engine.resume()
            self.engine.load_adapter(own, version)

        self.ranks.agree(work)
        before.close()

    def play(
        self, role: Role, given: Sequence[Trajectory], sampling: SamplingParams, seed: int, progress: Progress = None
    ) -> list[Sequence[Trajectory]]:
        """Play these trajectories; on rank 0, those of all engines."""

        def played(activity: Activity) -> Sequence[Trajectory]:
            activity.note("waking the engine")
            self.engine.resume()
            return self.stages[role].on(self.engine, activity)(given, sampling, seed, progress)

        with self.interrupts.droppable():
            ended = self.ranks.apart(played)
        return self.ranks.collect(ended if self.ranks.rank % self.per_engine == 0 else [])

    def sleep(self) -> None:
        """Release the engine's memory."""
        self.ranks.agree(self.engine.release)


def join(ranks: RankGroup, stack: ExitStack) -> Work:
    """Load the model of the run that rank 0 begins; returns what each later call asks for: to sample, or to train."""
    task: Any = None
    settings, algorithm, adapter, total = ranks.broadcast(task)
    seed_generators(settings.training.seed + ranks.rank)  # so that no environment draws as on rank 0
    updater, engine, stages = load(settings, algorithm, adapter, total, ranks, stack, lambda _: None)
    team = Team(ranks, engine, stages, settings.engine_gpus, Interrupts(silent)) if engine else None

    def work() -> None:
        order: tuple[str, tuple[Any, ...]] | Share | None = ranks.scatter(None)
        if order is None:
            updater.forward.pass_along()
        elif isinstance(order, Share):
            updater.take(order)
        else:
            name, part = order
            getattr(team, name)(*part)

    return work


def follow(training: TrainingSettings, device: str, join: Join = join) -> None:
    """Run as a rank that works for rank 0, until rank 0 ends: ``join`` answers its first call, what that returns the
    others. ``training`` and ``device`` are used to connect; all other settings come from rank 0. SIGINT and SIGTERM are
    passed on to rank 0: the first lets it end the run cleanly, a SIGINT after it ends this process."""
    with joined(training, device=device) as ranks:
        assert isinstance(ranks, RankGroup)
        stack = ExitStack()
        asked: list[int] = []
        works: list[Work] = []

        def handle(number: int, frame: FrameType | None) -> None:
            if ranks.is_over or (asked and number == signal.SIGINT):
                raise KeyboardInterrupt
            asked.append(number)
            ranks.stop()

        def work() -> None:
            if works:
                works[0]()
            else:
                works.append(join(ranks, stack))

        with handled_by(handle), stack:
            ranks.follow(work)
