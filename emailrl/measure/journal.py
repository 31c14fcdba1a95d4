"""Saves each trajectory as it ends, so that an interrupted process loses only the unfinished ones. Unscored
trajectories are appended to a file as they end; once scored, the file is rewritten in order. Their conditions are kept
in a separate file, and only a process with the same conditions may resume."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, Self

from emailrl.agent.play import Collector
from emailrl.base.credentials import without_credentials
from emailrl.base.disk import Lock, check_own, naming, sync
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.mail import database_fingerprint
from emailrl.mail.database import HOW_DATABASES_CHANGE
from emailrl.measure.evaluation import has_crashed
from emailrl.model.resolve import read_chat_template
from emailrl.questions.load import fingerprint
from emailrl.records import Record, TrajectoryWriter, read_trajectories, write_trajectories
from emailrl.records.trajectory import Scenario, Trajectory
from emailrl.rewards.scorer import uses_judge
from emailrl.settings import PlayingSettings
from emailrl.settings.names import by_name
from emailrl.settings.tree import PLAYED_WITH


def played_with(settings: PlayingSettings) -> Record:
    """The settings of ``PLAYED_WITH`` by name; None for words that are unset."""
    leaves = map(by_name().__getitem__, PLAYED_WITH)
    values = {leaf.field: (leaf.of(settings), leaf.default) for leaf in leaves}
    return {name: None if isinstance(now, str) and now == usual else now for name, (now, usual) in values.items()}


def playing_conditions(
    settings: PlayingSettings, scenarios: Sequence[Scenario], *, temperature: float, models: Sequence[str] = ()
) -> Record:
    """Everything that determines how questions are played and scored, except the policy; without secrets. ``models``
    are the base models that play, by default the one of the settings."""
    agent, rewards, db, dtypes = settings.agent, settings.rewards, settings.store.db, dict[str, str]()
    if not (settings.is_chat or settings.has_servers):  # a server chooses its own
        from emailrl.model.policy import DTYPES, sampling_dtype  # imports torch

        names = {dtype: name for name, dtype in DTYPES.items()}
        for model in models or [settings.model.name]:
            dtypes[model] = names[sampling_dtype(settings.with_model(model).model)]
    dtype = min(dtypes.values(), default=None)
    if len(set(dtypes.values())) > 1:
        dtype = ", ".join(f"{model}: {name}" for model, name in dtypes.items())
    asks_judge, template = uses_judge(rewards), settings.model.chat_template
    return {
        "questions": fingerprint(scenarios),
        "num_questions": len(scenarios),
        "database": database_fingerprint(db) if db.exists() else None,
        "engine": agent.engine,
        "server": without_credentials(settings.openai.openai_base_url) if settings.is_chat else None,
        "dtype": dtype,
        "load_in_4bit": settings.model.load_in_4bit,
        "chat_template_sha256": template and hashlib.sha256(read_chat_template(template).encode()).hexdigest(),
        **played_with(settings),
        "environment": agent.environment,
        "question_template": agent.question_template,
        "search_order": agent.search_order,
        "search_without_keywords": agent.search_without_keywords,
        "max_turns": agent.max_turns,
        "max_tokens": agent.max_tokens,
        "max_thinking_tokens": agent.max_thinking_tokens,
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


class Busy(EmailRLError):
    """Another process holds the same conditions file."""

    code = "busy"


class Conditions:
    """A file of the conditions under which trajectories are played, locked against other processes until ``close``. The
    file is locked immediately, before anything is loaded or played; if nothing is played, it stays unchanged."""

    def __init__(self, path: Path, now: Record, *, resume: bool) -> None:
        """With ``resume``, compare with the existing file: UsageError if it is missing or differs. Raises Busy if
        another process holds it. An existing file stays until something is played."""
        self.path, self._now, self._is_written = path, now, resume
        self._new_folders = [folder for folder in path.parents if not folder.exists()]
        check_own(path, "--out")
        if not resume:
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = Lock(path, create=not resume)
        except FileNotFoundError:
            raise nothing_to_resume(path) from None
        except BlockingIOError:
            raise Busy(f"Another process is writing {path}.", "Wait for it to finish.") from None
        self.is_new = path.stat().st_size == 0  # Whether nothing was played under the file before.
        self._is_idle = self.is_new and not resume
        try:
            if resume and self.is_new:
                raise nothing_to_resume(path)
            if resume and (changed := differences(path, now)):
                also = f" {HOW_DATABASES_CHANGE}" if "other database" in changed else ""
                hint = f"Repeat the original options with --resume, choose another --out, or use --overwrite.{also}"
                raise UsageError(f"{path} was started under other conditions: {'; '.join(changed)}.", hint)
            if self._is_idle:
                self._write()
        except BaseException:
            self.close()
            raise

    def note(self) -> None:
        """Keep the conditions: something is played under them."""
        if not self._is_written:
            self._write()
        self._is_idle = False

    def close(self) -> None:
        self._lock.close(remove=self._is_idle)
        if self._is_idle:
            with suppress(OSError):  # the folders are not empty
                for folder in self._new_folders:
                    folder.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _write(self) -> None:
        self._is_written = True
        with naming(self.path):
            self.path.write_bytes(json.dumps(self._now, indent=2).encode() + b"\n")
            sync(self.path)


def nothing_to_resume(path: Path) -> UsageError:
    return UsageError(f"Nothing to resume: {path} is missing.", "To start it, drop --resume.", "nothing-to-resume")


def differences(path: Path, now: Record) -> list[str]:
    """Describe how the conditions file differs from ``now``; UsageError if it cannot be read."""
    try:
        then = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise UsageError(f"{path} cannot be read.", "Start over with --overwrite.") from None
    now, then = json.loads(json.dumps(now)), then if isinstance(then, dict) else {}
    changes = {name: (then.get(name), now.get(name)) for name in now | then}
    return [_difference(name, *values) for name, values in changes.items() if values[0] != values[1]]


def _difference(name: str, then: Any, now: Any) -> str:
    """One difference; for hashes and lists, only that they differ."""
    words = name.removesuffix("_sha256").replace("_", " ")
    for value in (then, now):
        if isinstance(value, dict | list) or (isinstance(value, str) and re.fullmatch("[0-9a-f]{16,}", value)):
            return f"other {words}"
    shown = [value if isinstance(value, str) else json.dumps(value) for value in (then, now)]
    before, after = (text if len(text) <= 60 else f"{text[:59]}…" for text in shown)
    return f"{words} was {before}, now {after}"


class Journal:
    """A file of trajectories, saved as they are played; without ``conditions`` (a pipe), written only at the end."""

    def __init__(self, path: Path, conditions: Conditions | None, *, resume: bool) -> None:
        """With ``resume``, the file's trajectories count as played, except rollouts that raised; else the first
        trajectory replaces the file."""
        self.path, self._conditions, self._resumed = path, conditions, resume
        self.trajectories: dict[str, Trajectory] = {}  # Played trajectories, by id.
        self._writer: TrajectoryWriter | None = None
        if resume and path.is_file():
            last = {each.id: each for each in read_trajectories(path)}
            self.trajectories = {name: each for name, each in last.items() if not has_crashed(each)}
        for trajectory in self.trajectories.values():
            if not trajectory.reward_terms:
                trajectory.exception = None  # the reason it got no reward

    @property
    def scored(self) -> list[Trajectory]:
        """Trajectories with a reward, or an exception instead of one."""
        return list(filter(_is_scored, self.trajectories.values()))

    def is_whole(self, count: int) -> bool:
        ended = [each for each in self.trajectories.values() if each.reward_terms or has_crashed(each)]
        return len(ended) == len(self.trajectories) == count

    def play(
        self,
        collector: Collector,
        portions: Sequence[Sequence[Scenario]],
        num_samples: int,
        *,
        progress: Callable[[Trajectory], object],
        **how: Any,
    ) -> None:
        """Play and score what is missing, a portion of the questions after the other, and order the file by question.
        ``how`` is passed to ``Collector.collect``. At a KeyboardInterrupt, what has ended is scored first."""
        place = {scenario.id: number for number, scenario in enumerate(chain(*portions))}

        def ended(trajectory: Trajectory) -> None:
            self.trajectories[trajectory.id] = trajectory
            if self._conditions is not None:
                if self._writer is None:
                    if not self._resumed:
                        self.path.unlink(missing_ok=True)
                    self._conditions.note()
                    self._writer = TrajectoryWriter(self.path)
                self._writer.append(trajectory)
            progress(trajectory)

        interrupt, played = None, dict(self.trajectories)
        try:
            for portion in portions:
                collector.collect(portion, num_samples, step=0, progress=ended, played=played, **how)
        except KeyboardInterrupt as error:
            interrupt = error
            collector.score([each for each in self.trajectories.values() if not _is_scored(each)])
        order = sorted(self.trajectories.values(), key=lambda t: (place[t.scenario.id], len(t.id), t.id))
        self.trajectories = {each.id: each for each in order}
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if order:
            write_trajectories(self.path, order)
        if interrupt:
            raise interrupt


def is_complete(path: Path, conditions: Path) -> bool:
    """Whether a file has all rollouts that its conditions file asks for, with their rewards."""
    try:
        then = json.loads(conditions.read_bytes())
        count = then["num_questions"] * then["num_generations"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):  # resuming it says what is wrong
        return False
    return Journal(path, None, resume=True).is_whole(count)


def _is_scored(trajectory: Trajectory) -> bool:
    return bool(trajectory.reward_terms) or trajectory.exception is not None
