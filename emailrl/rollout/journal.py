"""What is played is on disk as each trajectory ends, so that whatever ends the process costs only those under way.

A file of trajectories is appended to as they end, unscored, and written anew in order once they are scored. The
conditions under which they are played stand in a file of their own; only under the same ones is the rest played.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from emailrl.disk import naming, sync
from emailrl.engines import is_chat
from emailrl.errors import EmailRLError, UsageError
from emailrl.policy.resolve import read_chat_template
from emailrl.recording import Record, TrajectoryWriter, read_trajectories, write_trajectories
from emailrl.rewards.build import uses_judge
from emailrl.scenarios import fingerprint
from emailrl.settings import Settings, without_credentials
from emailrl.store import database_fingerprint
from emailrl.store.connection import HOW_DATABASES_CHANGE
from emailrl.trajectory import Scenario, StopReason, Trajectory


def playing_conditions(settings: Settings, scenarios: Sequence[Scenario], *, temperature: float) -> Record:
    """What decides how questions are played and scored, the policy itself apart; without secrets."""
    agent, rewards, db = settings.agent, settings.rewards, settings.store.db
    asks_judge = uses_judge(rewards)
    return {
        "questions": fingerprint(scenarios),
        "num_questions": len(scenarios),
        "database": database_fingerprint(db) if db.exists() else None,
        "engine": agent.engine,
        "server": without_credentials(settings.openai.openai_base_url) if is_chat(settings) else None,
        "dtype": settings.model.dtype,
        "load_in_4bit": settings.model.load_in_4bit,
        "chat_template_sha256": _template_hash(settings.model.chat_template),
        "environment": agent.environment,
        "question_template": agent.question_template,
        "search_order": agent.search_order,
        "search_without_keywords": agent.search_without_keywords,
        "max_turns": agent.max_turns,
        "max_tokens": agent.max_tokens,
        "max_model_len": settings.model.max_model_len,
        "temperature": temperature,
        "top_p": agent.top_p,
        "top_k": agent.top_k,
        "seed": settings.training.seed,
        "reward": without_credentials(rewards.reward),
        "reward_weights": settings.reward_weights.model_dump(),
        "judge": "llm" if asks_judge else "offline",
        "judge_model": rewards.judge_model if asks_judge else None,
        "judge_server": without_credentials(rewards.judge_base_url) if asks_judge else None,
    }


def _template_hash(path: Path | None) -> str | None:
    return None if path is None else hashlib.sha256(read_chat_template(path).encode()).hexdigest()


class Busy(EmailRLError):
    """Another process plays under the same conditions file."""


class Conditions:
    """A file that says under which conditions trajectories are played, held against other processes until ``close``.

    The place is claimed at once, before anything is loaded or played; where nothing is played it is as it was before.
    """

    def __init__(self, path: Path, now: Record, *, resume: bool) -> None:
        """Of a ``resume`` compare with what is there: UsageError where that is nothing, or something else.

        Raises Busy where another process plays. Else what is there stays until something is played.
        """
        self.path = path
        self._now = json.loads(json.dumps(now))
        self._resumed = resume
        self._new_folders: list[Path] = []
        self._stands = resume
        self._idle = False
        self._held: IO[bytes] | None = None
        try:
            self._hold()
            self.is_new = os.fstat(self._held_descriptor).st_size == 0
            """Whether nobody has played under the file before."""
            if resume:
                self._compare()
            elif self.is_new:
                self._write()
        except BaseException:
            self.close()
            raise

    def note(self) -> None:
        """Keep them: something is played under them."""
        if not self._stands:
            self._write()
        self._idle = False

    def close(self) -> None:
        """Let other processes play."""
        if self._held is None:
            return
        if self._idle:
            self.path.unlink(missing_ok=True)
            with suppress(OSError):  # something else is in them
                for folder in self._new_folders:
                    folder.rmdir()
        self._held.close()
        self._held = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _held_descriptor(self) -> int:
        assert self._held is not None
        return self._held.fileno()

    def _hold(self) -> None:
        """Open the file, made where it is missing, and lock it."""
        if not self._resumed:
            self._new_folders = [folder for folder in self.path.parents if not folder.exists()]
            self.path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                self._held = open(self.path, "rb+", opener=self._open)  # noqa: SIM115
            except FileNotFoundError:
                raise nothing_to_resume(self.path) from None
            try:
                fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._held.close()
                self._held = None
                raise Busy(f"Another process is writing {self.path}.", "Wait for it to finish.") from None
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._held.fileno()), self.path.stat()):
                    return
            self._held.close()  # its process took it away, as nothing was played under it

    def _open(self, path: str, flags: int) -> int:
        return os.open(path, flags if self._resumed else flags | os.O_CREAT, 0o666)

    def _write(self) -> None:
        self._stands = self._idle = True
        with naming(self.path):
            self.path.write_bytes(json.dumps(self._now, indent=2).encode() + b"\n")
            sync(self.path)

    def _compare(self) -> None:
        if self.is_new:
            raise nothing_to_resume(self.path)
        if changed := differences(self.path, self._now):
            also = f" {HOW_DATABASES_CHANGE}" if "other database" in changed else ""
            raise UsageError(
                f"{self.path} was started under other conditions: {'; '.join(changed)}.",
                f"Use the same, choose another --out, or start over with --overwrite.{also}",
            )


def nothing_to_resume(path: Path) -> UsageError:
    """The error where a file of conditions is missing."""
    return UsageError(f"Nothing to resume: {path} is missing.", "To start it, drop --resume.")


def differences(path: Path, now: Record) -> list[str]:
    """In words, what the file of conditions says otherwise than ``now``; UsageError where it cannot be read."""
    try:
        then = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise UsageError(f"{path} cannot be read.", "Start over with --overwrite.") from None
    now, then = json.loads(json.dumps(now)), then if isinstance(then, dict) else {}
    return [_difference(name, then.get(name), now.get(name)) for name in now | then if now.get(name) != then.get(name)]


class Journal:
    """A file of trajectories as they are played; without ``conditions`` (a pipe has none) only written in the end."""

    def __init__(self, path: Path, conditions: Conditions | None, *, resume: bool) -> None:
        """With ``resume`` what the file holds counts as played, but for rollouts that raised; else its first trajectory
        replaces it."""
        self.path = path
        self.trajectories: dict[str, Trajectory] = {}
        """What has been played, by id."""
        self._conditions = conditions
        self._resumed = resume
        self._writer: TrajectoryWriter | None = None
        if resume and path.is_file():
            last = {trajectory.id: trajectory for trajectory in read_trajectories(path)}
            self.trajectories = {
                each.id: each for each in last.values() if each.stop_reason is not StopReason.EXCEPTION
            }
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
        if self._conditions is None:
            return
        if self._writer is None:
            if not self._resumed:
                self.path.unlink(missing_ok=True)
            self._conditions.note()
            self._writer = TrajectoryWriter(self.path)
        self._writer.append(trajectory)

    def finish(self, place: Callable[[Trajectory], Any] = lambda _: 0) -> None:
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


def _difference(name: str, then: Any, now: Any) -> str:
    """One difference; of hashes and lists only that they differ."""
    words = name.removesuffix("_sha256").replace("_", " ")
    for value in (then, now):
        if isinstance(value, dict | list) or (isinstance(value, str) and re.fullmatch("[0-9a-f]{16,}", value)):
            return f"other {words}"
    return f"{words} was {_shown(then)}, now {_shown(now)}"


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
