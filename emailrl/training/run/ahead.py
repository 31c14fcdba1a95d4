"""What a resumed run takes over: finished rollouts of steps not yet trained."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread
from types import MappingProxyType

from emailrl.agent.play import Collector, Stage, audit
from emailrl.base.errors import EmailRLError
from emailrl.base.plain import counted
from emailrl.checkpoints import Checkpoint
from emailrl.engines.vllm.servers import PinnedVersion, VllmServers
from emailrl.ranks import Activity
from emailrl.records import read_trajectories, write_trajectories
from emailrl.records.trajectory import Trajectory
from emailrl.training.run.display import NoDisplay
from emailrl.training.run.filtering import Collected
from emailrl.training.run.metrics import Clock
from emailrl.training.run.rollouts import Rollouts
from emailrl.training.run.state import RunState, StepQuestions

IN_FLIGHT = "in_flight.jsonl"
"""In a checkpoint: finished rollouts of steps not yet trained, without rewards."""


def rollouts_in_flight(checkpoint: Path) -> dict[str, Trajectory]:
    """A checkpoint's rollouts of steps not yet trained, by id; those that raised are played again."""
    path = checkpoint / IN_FLIGHT
    if not path.is_file():
        return {}
    return {each.id: each for each in read_trajectories(path) if each.exception is None}


def reusable(checkpoint: Checkpoint, staleness: int, vocabulary: int) -> tuple[dict[str, Trajectory], list[str]]:
    """The rollouts in flight that are at most ``staleness`` steps old, by id, and a note if there are older ones.

    Raises EmailRLError for one that the policy, with token ids below ``vocabulary``, cannot have sampled.
    """
    if IN_FLIGHT not in checkpoint.metadata.files:  # only files listed there have been verified
        return {}, []
    found = rollouts_in_flight(checkpoint.path)
    young = {name: each for name, each in found.items() if _age(each, checkpoint) <= staleness}
    for each in young.values():
        audit(each)
        if any(token >= vocabulary for sample in each.samples for token in sample.token_ids):
            raise _unusable(each, checkpoint, "has token ids outside the model's vocabulary")
    if len(young) == len(found):
        return young, []
    old = counted(len(found) - len(young), "rollout")
    return young, [f"{old} in {checkpoint.path / IN_FLIGHT} exceed MAX_STALENESS={staleness} and are sampled again"]


def _age(trajectory: Trajectory, checkpoint: Checkpoint) -> int:
    """How many steps its policy is older than the one that its step will train."""
    if not trajectory.turns:
        return 0
    version = re.fullmatch(r"v-(\d+)", trajectory.policy_version)
    if version is None:
        raise _unusable(trajectory, checkpoint, "does not name the policy that sampled it")
    return trajectory.step - 1 - int(version[1])


def _unusable(trajectory: Trajectory, checkpoint: Checkpoint, why: str) -> EmailRLError:
    return EmailRLError(
        f"{checkpoint.path / IN_FLIGHT}: trajectory {trajectory.id} {why}.",
        "Use another checkpoint: emailrl checkpoints list.",
    )


LOOK_AGAIN = 1.0
"""Seconds between checks of whether the rollouts that the trainer waits for make progress."""
STOP_SECONDS = 5.0
"""Seconds to wait for a step's rollouts to stop; a custom environment that hangs is abandoned."""

Result = tuple[Collected, StepQuestions]


class Ended(NoDisplay):
    """Copies of finished rollouts (scoring changes the originals); they are shown once trained."""

    def __init__(self, trajectories: Iterable[Trajectory] = ()) -> None:
        self.trajectories = [_copied(trajectory) for trajectory in trajectories]

    def played(self, trajectory: Trajectory) -> None:
        """Keep a rollout."""
        self.trajectories.append(_copied(trajectory))


def _copied(trajectory: Trajectory) -> Trajectory:
    """A copy that shares only the lists of tokens, which scoring never changes and which take most of the time."""
    tokens: list[object] = [each for turn in trajectory.turns for each in (turn.completion_ids, turn.logprobs)]
    tokens += [each for one in trajectory.samples for each in (one.token_ids, one.loss_mask, one.sampler_logprobs)]
    return copy.deepcopy(trajectory, {id(each): each for each in tokens})


@dataclass
class Batch:
    """The rollouts of one step, running in their own thread."""

    step: int
    engine: PinnedVersion
    ended: Ended
    activity: Activity = field(default_factory=Activity)
    loaded: Future[float] = field(default_factory=Future)
    """How long loading its version took, in seconds."""
    result: Future[Result] = field(default_factory=Future)
    idle: float = 0.0
    """Seconds before them in which no rollouts ran."""
    ended_at: float | None = None
    thread: Thread | None = None


class Ahead:
    """Samples the steps after the one in training; call all methods from the trainer's thread.

    ``hand_over(n)`` returns an engine that, once loaded, samples from the policy after step ``n``, or from the current
    one if that is no longer kept. ``played`` are rollouts of an interrupted run, by id. An environment may take
    ``limit`` seconds for a turn.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        collector: Collector,
        stage: Stage,
        engine: VllmServers,
        state: RunState,
        *,
        staleness: int,
        last_step: int,
        hand_over: Callable[[int], PinnedVersion],
        limit: float,
        played: Mapping[str, Trajectory] = MappingProxyType({}),
    ) -> None:
        self._rollouts, self._collector, self._stage = rollouts, collector, stage
        self._engine, self._state = engine, state
        self._staleness, self._last_step, self._hand_over = staleness, last_step, hand_over
        self._limit, self._played = limit, played
        self._place = RunState(cursor=state.cursor)
        """Where the questions of the next step to start begin."""
        self._batches: dict[int, Batch] = {}
        self._begun, self._clock = state.step, Clock()
        self.seconds: dict[str, float] = {}
        """Of the last step: ``trainer_wait`` for rollouts and versions, and the trainer's part of a ``handover``; of
        its rollouts, ``adapter_load`` of their version, and ``sampler_wait``, in which no earlier ones ran."""

    def take(self) -> Result:
        """Return the next step's rollouts once finished, and start those allowed to run meanwhile.

        Raises the error that ended them early or that a version's loading ended with, if any, and EmailRLError if one
        of their environments hangs.
        """
        step, self._clock = self._state.step + 1, Clock()
        for done in [number for number in self._batches if number < step]:
            self._batches.pop(done).engine.close()
        self.settle()
        while self._begun < min(step + self._staleness, self._last_step):
            self._begin(self._begun + 1)
        batch = self._batches[step]
        with self._clock.phase("trainer_wait"):
            result = self._wait_for(batch)
        with self._clock.phase("handover"):
            self._engine.settle()  # not of a version that is still being loaded, which would wait for it
        theirs = {"adapter_load": batch.loaded.result(), "sampler_wait": batch.idle}
        self.seconds = self._clock.phases | theirs
        return result

    def _wait_for(self, batch: Batch) -> Result:
        while not wait([batch.result], timeout=LOOK_AGAIN).done:
            if failure := batch.activity.stalled(f"The rollouts of step {batch.step}", self._limit):
                raise failure.as_error()
        return batch.result.result()

    def save(self, directory: Path, step: int) -> None:
        """Save finished rollouts of later steps in the checkpoint of ``step``."""
        batches = [batch for number, batch in sorted(self._batches.items()) if number > step]
        later = [trajectory for batch in batches for trajectory in batch.ended.trajectories]
        if later:
            write_trajectories(directory / IN_FLIGHT, later)

    def close(self) -> None:
        """Stop everything that is running."""
        for batch in self._batches.values():
            batch.engine.cancel()
        until = time.monotonic() + STOP_SECONDS
        for batch in self._batches.values():
            if batch.thread is not None:
                batch.thread.join(max(until - time.monotonic(), 0.0))
            batch.engine.close()
        self._batches.clear()

    def settle(self) -> None:
        """Wait until the version handed over last is loaded, and finish its verification; raises as ``take`` does."""
        with self._clock.phase("trainer_wait"):
            for batch in self._batches.values():
                batch.loaded.result()
        with self._clock.phase("handover"):
            self._engine.settle()

    def _begin(self, step: int) -> None:
        self.settle()
        with self._clock.phase("handover"):
            engine = self._hand_over(max(0, step - 1 - self._staleness))
        batch = Batch(step, engine, Ended(each for each in self._played.values() if each.step == step))
        earlier = [each for _, each in sorted(self._batches.items())]
        questions = None if self._rollouts.choose_by_outcome else self._foreseen()
        self._batches[step], self._begun = batch, step
        batch.thread = Thread(target=self._run, args=(batch, earlier, questions), name=f"step-{step}", daemon=True)
        batch.thread.start()

    def _foreseen(self) -> StepQuestions:
        """The next step's questions, if they do not depend on earlier outcomes; advances the cursor past them."""
        questions, same = self._rollouts.questions(self._place), self._rollouts.questions(self._place)
        same.take(self._rollouts.per_step)
        self._place.cursor = same.cursor
        return questions

    def _run(self, batch: Batch, earlier: Sequence[Batch], questions: StepQuestions | None) -> None:
        try:
            batch.loaded.set_result(self._load(batch, earlier))
            result = self._play(batch, earlier, questions)
        except BaseException as error:  # would otherwise end the thread silently
            what = str(error) or type(error).__name__
            failure = EmailRLError(f"The rollouts of step {batch.step} were ended: {what}.", "Use --resume latest.")
            for outcome in (batch.loaded, batch.result):
                if not outcome.done():
                    outcome.set_exception(error if isinstance(error, Exception) else failure)
        else:
            batch.result.set_result(result)
        finally:
            batch.activity.end()
            batch.ended_at = time.perf_counter()

    def _load(self, batch: Batch, earlier: Sequence[Batch]) -> float:
        begun = time.perf_counter()
        batch.engine.load()
        now, ends = time.perf_counter(), [each.ended_at for each in earlier]
        batch.idle = now - max((now if end is None else end for end in ends), default=now)
        return now - begun

    def _play(self, batch: Batch, earlier: Sequence[Batch], questions: StepQuestions | None) -> Result:
        if questions is None:
            if earlier:
                earlier[-1].result.result()
            questions = self._rollouts.questions(self._place)
        collected = self._rollouts.play(
            batch.step,
            questions,
            replace(self._collector, play=self._stage.noted(batch.engine, batch.activity)),
            display=batch.ended,
            played=self._played,
        )
        if self._rollouts.choose_by_outcome:
            self._place.cursor = questions.cursor
        return collected, questions
