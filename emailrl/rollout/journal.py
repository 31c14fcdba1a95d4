"""What is played is on disk as each trajectory ends, so that whatever ends the process costs only those under way.

A file of trajectories is appended to as they end, unscored, and written anew in order once they are scored. The
conditions under which they are played stand in a file of their own; only under the same ones is the rest played.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from emailrl.disk import replace_bytes
from emailrl.engines import is_chat
from emailrl.errors import EmailRLError, UsageError
from emailrl.recording import Record, TrajectoryWriter, read_trajectories, write_trajectories
from emailrl.scenarios import fingerprint
from emailrl.settings import Settings, without_credentials
from emailrl.store import database_fingerprint
from emailrl.trajectory import Scenario, StopReason, Trajectory


def playing_conditions(settings: Settings, scenarios: Sequence[Scenario], *, temperature: float) -> Record:
    """What decides how questions are played and scored, the policy itself apart; without secrets."""
    agent, rewards, db = settings.agent, settings.rewards, settings.store.db
    return {
        "questions": fingerprint(scenarios),
        "num_questions": len(scenarios),
        "database": database_fingerprint(db) if db.exists() else None,
        "engine": agent.engine,
        "server": without_credentials(settings.openai.openai_base_url) if is_chat(settings) else None,
        "environment": agent.environment,
        "search_order": agent.search_order,
        "max_turns": agent.max_turns,
        "max_tokens": agent.max_tokens,
        "max_model_len": settings.model.max_model_len,
        "temperature": temperature,
        "top_p": agent.top_p,
        "top_k": agent.top_k,
        "seed": settings.training.seed,
        "reward": without_credentials(rewards.reward),
        "reward_weights": settings.reward_weights.model_dump(),
        "judge": rewards.judge,
        "judge_model": rewards.judge_model,
    }


class Conditions:
    """A file that says under which conditions trajectories are played, held against other processes until ``close``."""

    def __init__(self, path: Path, now: Record, *, resume: bool) -> None:
        """Of a ``resume`` compare with what is there: UsageError where that is nothing, or something else."""
        self.path = path
        self._now = json.loads(json.dumps(now))
        self._held: IO[bytes] | None = None
        if resume:
            self._compare()
            self._hold()

    def note(self) -> None:
        """Write them, unless they are there already."""
        if self._held is None:
            replace_bytes(self.path, json.dumps(self._now, indent=2).encode() + b"\n")
            self._hold()

    def close(self) -> None:
        """Let other processes play."""
        if self._held is not None:
            self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _compare(self) -> None:
        try:
            then = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            raise UsageError(
                f"There is nothing to resume: {self.path} is missing.", "Without --resume it begins."
            ) from None
        except (ValueError, RecursionError):
            raise UsageError(f"{self.path} cannot be read.", "Begin anew with --overwrite.") from None
        then = then if isinstance(then, dict) else {}
        changed = [name for name in self._now | then if self._now.get(name) != then.get(name)]
        if changed:
            told = "; ".join(
                f"{name} {_shown(then.get(name))} there, {_shown(self._now.get(name))} now" for name in changed
            )
            raise UsageError(f"{self.path} says other conditions: {told}.", "Give the same, or begin anew elsewhere.")

    def _hold(self) -> None:
        self._held = self.path.open("rb")
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EmailRLError(f"Another process plays under {self.path}.", "Wait for it to end.") from None


class Journal:
    """A file of trajectories as they are played. What is no ordinary file (a pipe) is only written in the end."""

    def __init__(self, path: Path, conditions: Conditions, *, resume: bool) -> None:
        """With ``resume`` what the file holds counts as played; else its first trajectory replaces it."""
        self.path = path
        self.trajectories: dict[str, Trajectory] = {}
        """What has been played, by id."""
        self._conditions = conditions
        self._resumed = resume
        self._writer: TrajectoryWriter | None = None
        if resume and path.is_file():
            self.trajectories = {trajectory.id: trajectory for trajectory in read_trajectories(path)}
        for trajectory in self.trajectories.values():
            if not _is_over(trajectory):
                trajectory.exception = None  # why it got no reward then

    @property
    def unscored(self) -> list[Trajectory]:
        """Those that nobody has tried to score yet."""
        return [each for each in self.trajectories.values() if not each.reward_terms and each.exception is None]

    @property
    def scored(self) -> list[Trajectory]:
        """The others: with a reward, or with the exception that stands for it."""
        return [each for each in self.trajectories.values() if each.reward_terms or each.exception is not None]

    def is_whole(self, count: int) -> bool:
        """Whether so many have been played and scored."""
        return len(self.trajectories) == count and all(map(_is_over, self.trajectories.values()))

    def append(self, trajectory: Trajectory) -> None:
        """Keep a trajectory that has ended."""
        self.trajectories[trajectory.id] = trajectory
        if self.path.exists() and not self.path.is_file():
            return
        if self._writer is None:
            if not self._resumed:
                self.path.unlink(missing_ok=True)
            self._conditions.note()
            self._writer = TrajectoryWriter(self.path)
        self._writer.append(trajectory)

    def finish(self, place: Callable[[Trajectory], int] = lambda _: 0) -> None:
        """Put all of them, as they now are, where they were kept: in the order of ``place``, or as they ended."""
        self.trajectories = {each.id: each for each in sorted(self.trajectories.values(), key=place)}
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self.trajectories:
            write_trajectories(self.path, self.trajectories.values())


def _is_over(trajectory: Trajectory) -> bool:
    """Whether nothing is left to do: it has its reward, or the rollout itself raised."""
    return bool(trajectory.reward_terms) or trajectory.stop_reason is StopReason.EXCEPTION


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
