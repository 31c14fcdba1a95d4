"""The subjects of a benchmark, and their collectors."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from emailrl.agent.attack import under_attack
from emailrl.base.errors import UsageError
from emailrl.checkpoints import find_runs
from emailrl.engines import is_chat
from emailrl.model.adapter import Adapter, find_adapter

if TYPE_CHECKING:
    from emailrl.agent.collect import Collector
    from emailrl.agent.play import Stage
    from emailrl.engines.base import Engine
    from emailrl.settings import Settings

Players = Generator[tuple["Subject", "Collector"], None, None]
Staged = Generator[tuple["Subject", "Stage", "Engine"], None, None]


@dataclass(frozen=True, slots=True)
class Subject:
    """A policy to measure: a base model, bare or with an adapter."""

    label: str
    """Its identity: the model's name, or the adapter's absolute path."""
    model_name: str
    adapter: Adapter | None = None
    attacked: bool = False
    """Whether its emails contain injected orders (``environment.attack``)."""


def choose_subjects(checkpoints: Sequence[str], models: Sequence[str], settings: Settings) -> list[Subject]:
    """The policies to measure: those named, else the newest best checkpoint, else the configured base model.

    Each checkpoint, or exported adapter, is verified by its hashes and loaded on the base model it was trained on.
    Raises UsageError for a checkpoint with the openai engine, as chat servers only take model names.
    """
    output_dir = settings.output.output_dir
    if is_chat(settings):
        if checkpoints:
            raise UsageError("The openai engine cannot run a checkpoint.", "Name the server's model with --model.")
        return [Subject(name, name) for name in dict.fromkeys(models or [settings.model.name])]
    if not checkpoints and not models:
        checkpoints, models = (["best"], []) if find_runs(output_dir, which="best") else ([], [settings.model.name])
    found = [find_adapter(which, output_dir) for which in checkpoints]
    subjects = [Subject(str(each.path.absolute()), each.base_model, each) for each in found]
    subjects += [Subject(name, name) for name in models]
    return list({subject.label: subject for subject in subjects}.values())


def players(subjects: Sequence[Subject], settings: Settings) -> Players:
    """Yield each subject with its collector; a base model is loaded once for all its subjects."""
    from emailrl.agent.collect import Collector
    from emailrl.agent.task import load_task
    from emailrl.rewards.build import build_scorer

    load_task(settings.agent.environment)  # check the user's code before a model is loaded
    scorer = build_scorer(settings)
    staged = _on_chat_server if is_chat(settings) else _on_policies
    with closing(staged(subjects, settings)) as pairs:
        for subject, stage, engine in pairs:
            if subject.attacked:
                stage = replace(stage, make_environment=under_attack(stage.make_environment))
            run_id = subject.adapter.run_id if subject.adapter else ""
            yield subject, Collector(stage.on(engine), scorer, stage.settings.agent, settings.training.mode, run_id)


def _on_chat_server(subjects: Sequence[Subject], settings: Settings) -> Staged:
    from emailrl.agent.play import Stage
    from emailrl.agent.task import load_task
    from emailrl.engines import build_chat_engine

    task = load_task(settings.agent.environment, settings.agent)
    for subject in subjects:
        named = settings.with_model(subject.model_name)
        with closing(build_chat_engine(named, task.tools)) as engine:
            yield subject, Stage(named, task.make, None), engine


def _on_policies(subjects: Sequence[Subject], settings: Settings) -> Staged:
    from emailrl.agent.play import build_stage
    from emailrl.engines.opened import open_policy

    for model_name in dict.fromkeys(subject.model_name for subject in subjects):
        with closing(open_policy(settings.with_model(model_name))) as opened:
            stage = build_stage(opened.settings, opened.policy)
            for subject in subjects:
                if subject.model_name == model_name:
                    adapter = subject.adapter
                    opened.engine.load_adapter(adapter.path if adapter else None, subject.label)
                    yield subject, stage, opened.engine
