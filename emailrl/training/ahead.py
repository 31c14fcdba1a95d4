"""Asynchronous rollouts: later steps are sampled in threads while a step is trained. A resumed run samples the steps
that were not trained again, from the versions of the policy that it keeps for that."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from threading import Thread

from emailrl.agent.play import Play
from emailrl.base.errors import EmailRLError
from emailrl.engines.vllm.servers import PinnedVersion, VllmServers
from emailrl.ranks import Activity
from emailrl.runs.log import Clock, Display
from emailrl.training.state import Collected, Rollouts, RunState, StepQuestions

LOOK_AGAIN = 1.0  # Seconds between checks of whether the rollouts that the trainer waits for make progress
STOP_SECONDS = 5.0  # Seconds to wait for a step's rollouts to stop; a custom environment that hangs is abandoned

PlayOn = Callable[[PinnedVersion, Activity], Play]  # Plays with an engine, and notes its progress
Result = tuple[Collected, StepQuestions]


@dataclass
class Batch:
    """The rollouts of one step, running in their own thread."""

    step: int
    engine: PinnedVersion
    activity: Activity = field(default_factory=Activity)
    loaded: Future[float] = field(default_factory=Future)  # How long loading its version took, in seconds
    result: Future[Result] = field(default_factory=Future)
    idle: float = 0.0  # Seconds before them in which no rollouts ran
    ended_at: float | None = None
    thread: Thread | None = None


@dataclass
class Ahead:
    """Samples the steps after the one in training; call all methods from the trainer's thread."""

    rollouts: Rollouts
    play_on: PlayOn
    engine: VllmServers
    state: RunState
    staleness: int
    last_step: int
    hand_over: Callable[[int], PinnedVersion]
    """An engine that, once loaded, samples from the policy after a step, or the current one if that is not kept."""
    limit: float  # Seconds that an environment may take for a turn
    seconds: dict[str, float] = field(default_factory=dict, init=False)
    """Of the last step: ``trainer_wait`` for rollouts and versions, and the trainer's part of a ``handover``; of its
    rollouts, ``adapter_load`` of their version, and ``sampler_wait``, in which no earlier ones ran."""

    def __post_init__(self) -> None:
        self._place = RunState(cursor=self.state.cursor)  # Where the questions of the next step to start begin
        self._batches: dict[int, Batch] = {}
        self._begun, self._clock = self.state.step, Clock()

    def take(self) -> Result:
        """Return the next step's rollouts once finished, and start those allowed to run meanwhile. Raises what ended
        them or the loading of a version early, and EmailRLError if an environment hangs."""
        step, self._clock = self.state.step + 1, Clock()
        for done in [number for number in self._batches if number < step]:
            self._batches.pop(done).engine.close()
        self.settle()
        while self._begun < min(step + self.staleness, self.last_step):
            self.settle()
            with self._clock.phase("handover"):
                batch = Batch(self._begun + 1, self.hand_over(max(0, self._begun - self.staleness)))
            earlier, questions = [each for _, each in sorted(self._batches.items())], None
            if not self.rollouts.choose_by_outcome:  # known before earlier steps end: the cursor moves past them now
                questions, same = self.rollouts.questions(self._place), self.rollouts.questions(self._place)
                same.take(self.rollouts.per_step)
                self._place.cursor = same.cursor
            self._batches[batch.step], self._begun = batch, batch.step
            given, name = (batch, earlier, questions), f"step-{batch.step}"
            batch.thread = Thread(target=self._run, args=given, name=name, daemon=True)
            batch.thread.start()
        batch = self._batches[step]
        with self._clock.phase("trainer_wait"):
            while not wait([batch.result], timeout=LOOK_AGAIN).done:
                if failure := batch.activity.stalled(f"The rollouts of step {batch.step}", self.limit):
                    raise failure
            result = batch.result.result()
        with self._clock.phase("handover"):
            self.engine.settle()  # not of a version that is still being loaded, which would wait for it
        theirs = {"adapter_load": batch.loaded.result(), "sampler_wait": batch.idle}
        self.seconds = self._clock.phases | theirs
        return result

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
            self.engine.settle()

    def _run(self, batch: Batch, earlier: Sequence[Batch], questions: StepQuestions | None) -> None:
        try:
            begun = time.perf_counter()
            batch.engine.load()
            now, ends = time.perf_counter(), [each.ended_at for each in earlier]
            batch.idle = now - max((now if end is None else end for end in ends), default=now)
            batch.loaded.set_result(now - begun)
            if earlier and questions is None:
                earlier[-1].result.result()
            asked = questions or self.rollouts.questions(self._place)
            play = self.play_on(batch.engine, batch.activity)
            collected = self.rollouts.play(batch.step, asked, Display(), play)
            if questions is None:
                self._place.cursor = asked.cursor
            batch.result.set_result((collected, asked))
        except BaseException as error:  # would otherwise end the thread silently
            what = str(error) or type(error).__name__
            failure = EmailRLError(f"The rollouts of step {batch.step} were ended: {what}.", "Use --resume latest.")
            for outcome in (batch.loaded, batch.result):
                if not outcome.done():
                    outcome.set_exception(error if isinstance(error, Exception) else failure)
        finally:
            batch.activity.end()
            batch.ended_at = time.perf_counter()
