"""Asynchronous rollouts: while a step trains, the next MAX_STALENESS steps are sampled.

The rollouts of step t are sampled by the policy as it was after step max(0, t - 1 - MAX_STALENESS). They start as soon
as that policy is loaded. Staleness is bounded by what is started, never by dropping late rollouts, which would favor
short conversations. Which policy samples a step does not depend on timing, so a resumed run continues exactly as the
uninterrupted one would have.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from types import MappingProxyType

from emailrl.engines.base import PinnedEngine, VersionedEngine
from emailrl.errors import EmailRLError
from emailrl.ranks import Activity
from emailrl.recording import read_trajectories, write_trajectories
from emailrl.rollout.collect import Collector
from emailrl.rollout.noted import Noted
from emailrl.training.run.display import NoDisplay
from emailrl.training.run.filtering import Collected
from emailrl.training.run.rollouts import Rollouts
from emailrl.training.run.state import RunState, StepQuestions
from emailrl.trajectory import Trajectory

IN_FLIGHT = "in_flight.jsonl"
"""In a checkpoint: finished rollouts of steps not yet trained, without rewards."""
LOOK_AGAIN = 1.0
"""Seconds between checks of whether the rollouts that the trainer waits for make progress."""
STOP_SECONDS = 5.0
"""Seconds to wait for a step's rollouts to stop; a custom environment that hangs is abandoned."""

Result = tuple[Collected, StepQuestions]


class Ended(NoDisplay):
    """Copies of finished rollouts (scoring changes the originals); they are shown once trained."""

    def __init__(self, trajectories: Iterable[Trajectory] = ()) -> None:
        self.trajectories = [copy.deepcopy(trajectory) for trajectory in trajectories]

    def played(self, trajectory: Trajectory) -> None:
        """Keep a rollout."""
        self.trajectories.append(copy.deepcopy(trajectory))


@dataclass
class Batch:
    """The rollouts of one step, running in their own thread."""

    step: int
    engine: PinnedEngine
    ended: Ended
    activity: Activity = field(default_factory=Activity)
    result: Future[Result] = field(default_factory=Future)
    ended_at: float | None = None
    thread: Thread | None = None


class Ahead:
    """Samples the steps after the one in training; call all methods from the trainer's thread.

    ``load(n)`` makes the engine sample from the policy after step ``n``, or from the current one if that is no longer
    kept. ``played`` are rollouts of an interrupted run, by id. An environment may take ``limit`` seconds for a turn.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        collector: Collector,
        engine: VersionedEngine,
        state: RunState,
        *,
        staleness: int,
        last_step: int,
        load: Callable[[int], None],
        limit: float,
        played: Mapping[str, Trajectory] = MappingProxyType({}),
    ) -> None:
        self._rollouts, self._collector, self._engine, self._state = rollouts, collector, engine, state
        self._staleness, self._last_step, self._load, self._played = staleness, last_step, load, played
        self._limit = limit
        self._place = RunState(cursor=state.cursor, pass_rates=dict(state.pass_rates))
        """Where the questions of the next step to start begin."""
        self._batches: dict[int, Batch] = {}
        self._begun = state.step
        self.seconds: dict[str, float] = {}
        """How long the trainer waited for the last step's rollouts, and how long no rollouts ran before it."""

    def take(self) -> Result:
        """Return the next step's rollouts once finished, and start those allowed to run meanwhile.

        Raises the error that ended them early, if any, and EmailRLError if one of their environments hangs.
        """
        step = self._state.step + 1
        for done in [number for number in self._batches if number < step]:
            self._batches.pop(done).engine.close()
        sampler_wait = self._begin_until(min(step + self._staleness, self._last_step))
        begun = time.perf_counter()
        result = self._wait_for(self._batches[step])
        self.seconds = {"trainer_wait": time.perf_counter() - begun, "sampler_wait": sampler_wait}
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

    def _begin_until(self, last: int) -> float:
        """Start the steps up to ``last``; return the seconds for which no rollouts ran before them."""
        ends = [batch.ended_at for batch in self._batches.values()]
        idle = 0.0
        for step in range(self._begun + 1, last + 1):
            self._load(max(0, step - 1 - self._staleness))
            if step == self._begun + 1 and ends:
                idle = 0.0 if None in ends else time.perf_counter() - max(end for end in ends if end is not None)
            self._begin(step)
        return idle

    def _begin(self, step: int) -> None:
        batch = Batch(step, self._engine.pin(), Ended(each for each in self._played.values() if each.step == step))
        before = self._batches.get(step - 1)
        questions = None if self._rollouts.choose_by_outcome else self._foreseen()
        self._batches[step], self._begun = batch, step
        batch.thread = Thread(target=self._run, args=(batch, before, questions), name=f"step-{step}", daemon=True)
        batch.thread.start()

    def _foreseen(self) -> StepQuestions:
        """The next step's questions, if they do not depend on earlier outcomes; advances the cursor past them."""
        questions, same = self._rollouts.questions(self._place), self._rollouts.questions(self._place)
        same.take(self._rollouts.per_step)
        self._place.cursor = same.cursor
        return questions

    def _run(self, batch: Batch, before: Batch | None, questions: StepQuestions | None) -> None:
        try:
            result = self._play(batch, before, questions)
        except Exception as error:
            batch.result.set_exception(error)
        except BaseException as error:  # would otherwise end the thread silently
            what = str(error) or type(error).__name__
            failure = EmailRLError(f"The rollouts of step {batch.step} were ended: {what}.", "Use --resume latest.")
            batch.result.set_exception(failure)
        else:
            batch.result.set_result(result)
        finally:
            batch.activity.end()
            batch.ended_at = time.perf_counter()

    def _play(self, batch: Batch, before: Batch | None, questions: StepQuestions | None) -> Result:
        if questions is None:
            if before is not None:
                before.result.result()
            questions = self._rollouts.questions(self._place)
        batch.activity.note("starting the environments")
        collected = self._rollouts.play(
            batch.step,
            questions,
            self._collector.on(Noted(batch.engine, batch.activity)),
            display=batch.ended,
            played=self._played,
        )
        if self._rollouts.choose_by_outcome:
            self._place.note_pass_rates(questions.asked, collected.groups)
            self._place.cursor = questions.cursor
        return collected, questions


def rollouts_in_flight(checkpoint: Path) -> dict[str, Trajectory]:
    """A checkpoint's rollouts of steps not yet trained, by id; those that raised are played again."""
    path = checkpoint / IN_FLIGHT
    if not path.is_file():
        return {}
    return {each.id: each for each in read_trajectories(path) if each.exception is None}
