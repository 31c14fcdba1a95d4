"""Assemble a run: everything that can be wrong is found before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from emailrl.agent.play import Collector, Play, Scores, Stage, build_stage
from emailrl.agent.task import MAIL, load_task
from emailrl.base.errors import UsageError
from emailrl.checkpoints import Checkpoint
from emailrl.engines import OpenPolicy, build_engine, check_engine
from emailrl.engines.base import PolicyEngine
from emailrl.engines.vllm.servers import VllmServers, check_servers
from emailrl.measure.evaluation import check_samples
from emailrl.ranks import ALONE, Ranks
from emailrl.rewards.build import build_scorer
from emailrl.rewards.scorer import OverlongScorer
from emailrl.settings import Settings, run_root
from emailrl.training.algorithms import Algorithm
from emailrl.training.mix import advice, resolve, staleness
from emailrl.training.run.agreement import check_agrees
from emailrl.training.run.ahead import Ahead, reusable
from emailrl.training.run.checkpointing import CheckpointWriter
from emailrl.training.run.data import RunData, load_data
from emailrl.training.run.directory import check_replaceable, clear_run, give_back_replaced, new_directory
from emailrl.training.run.display import SILENT, Display
from emailrl.training.run.ending import check_unfinished
from emailrl.training.run.filtering import make_filter
from emailrl.training.run.follower import Task, build_updater, check_shard, load_trained, mesh_of
from emailrl.training.run.interrupts import Interrupts
from emailrl.training.run.modes import MODES, Mode
from emailrl.training.run.printing import header
from emailrl.training.run.resume import (
    Resumed,
    load_state,
    lost_metrics,
    new_run_id,
    read_state,
    resumed,
    rewind,
    seed_generators,
    take_snapshot,
)
from emailrl.training.run.run import Run
from emailrl.training.run.start import find_start, with_lora
from emailrl.training.run.state import RunState, count_steps, questions_per_step
from emailrl.training.run.team import Role, Team, leave_and_close, play_on_all, plays_on_all, team_notes
from emailrl.training.run.tracking import Say, Tracker, check_services
from emailrl.training.update import Updater


@contextmanager
def open_run(
    settings: Settings, *,
    resume: str | None, overwrite: bool, say: Say, display: Display = SILENT, ranks: Ranks = ALONE,
) -> Iterator[Run]:  # fmt: skip
    """Check settings, checkpoint, rewards, data, model and engine, in this order; then claim the directory and start.

    A resumed run is locked before its checkpoint is chosen, so that no other process can advance it in between.
    """
    mode, algorithm = MODES[settings.training.mode], resolve(settings)
    _check(settings, mode, ranks)
    _say_notes(say, give_back_replaced(settings))
    with resumed(settings, resume, overwrite=overwrite) as before:
        checkpoint = before.checkpoint if before else None
        if overwrite and resume is None:
            check_replaceable(run_root(settings.output.output_dir, settings.training.mode))
        start = find_start(settings, checkpoint)
        settings = start.settings
        wanted = make_filter(algorithm, settings.algorithm, answers=mode.reward is None)
        scorer, eval_scorer = (
            _training_scorer(settings, mode, algorithm),
            build_scorer(settings.rewards, settings.reward_weights, settings.agent),
        )
        data = _noted_data(settings, algorithm, checkpoint, start.notes)
        seed_generators(settings.training.seed)
        total = _total_steps(settings, mode, len(data.train), ranks.world)
        run_id = checkpoint.metadata.run_id if checkpoint else new_run_id(mode.name)
        if before and checkpoint:
            ended = (state := read_state(checkpoint)).stop_reason(settings.evaluation, total, _epochs(settings, mode))
            check_unfinished(before.directory, state, ended, data)
        with _loaded(settings, start.adapter, checkpoint, total, ranks, say) as (opened, updater, settings, state):
            policy, engine = opened.policy, opened.engine
            data.notes += policy.notes + team_notes(settings, ranks)
            stage, eval_stage = build_stage(settings, policy, mode.make_environment), build_stage(settings, policy)
            with (
                _directory(settings, before, state, overwrite=overwrite and resume is None) as (directory, changes),
                closing(
                    Tracker(directory, settings, run_id=run_id, step=state.step, evaluated=state.evaluated, say=say)
                ) as tracker,
            ):
                tracker.display = display
                interrupts = Interrupts(tracker.say)
                sampler = _sampler(settings, ranks, engine, interrupts)
                agent, name = settings.agent, mode.name
                collector = Collector(_play(sampler, stage, ranks, "train"), scorer, agent, name, run_id)
                evaluator = Collector(_play(sampler, eval_stage, ranks, "eval"), eval_scorer, agent, name, run_id)
                writer = CheckpointWriter(
                    directory=directory, settings=settings, data=data, policy=policy, updater=updater, run_id=run_id,
                    parent=start.parent, resumed_from=checkpoint.reference if checkpoint else None,
                    snapshot=take_snapshot(state), saved_step=state.step if checkpoint else None,
                )  # fmt: skip
                run = Run(
                    settings=settings, mode=mode, algorithm=algorithm, data=data, directory=directory, state=state,
                    policy=policy, collector=collector, evaluator=evaluator, updater=updater,
                    engine=sampler,
                    tracker=tracker, interrupts=interrupts, filter=wanted, total_steps=total,
                    epochs=_epochs(settings, mode), writer=writer, ranks=ranks, staleness=staleness(settings),
                )  # fmt: skip
                _announce(run, changes)
                with _overlapping(run, stage, checkpoint):
                    yield run


def _noted_data(settings: Settings, algorithm: Algorithm, checkpoint: Checkpoint | None, notes: list[str]) -> RunData:
    """The questions, with the notes to print before this run starts."""
    data = load_data(settings)
    data.notes += notes + advice(algorithm, settings)
    if checkpoint:
        changes = check_agrees(checkpoint, settings, data)
        data.notes += [f"changed since the checkpoint: {change}" for change in changes]
    return data


def _sampler(settings: Settings, ranks: Ranks, engine: PolicyEngine, interrupts: Interrupts) -> PolicyEngine | Team:
    """This engine, or the engines of all ranks."""
    if not plays_on_all(settings, ranks):
        return engine
    return Team(ranks, engine, interrupts, per_engine=settings.engine_gpus)


def _play(sampler: PolicyEngine | Team, stage: Stage, ranks: Ranks, role: Role) -> Play:
    if isinstance(sampler, Team):
        return play_on_all(sampler, stage, role)
    return stage.on(sampler) if ranks.is_alone else stage.noted(sampler, ranks.activity)


@contextmanager
def _overlapping(run: Run, stage: Stage, checkpoint: Checkpoint | None) -> Iterator[None]:
    """Run rollouts while steps train, if MAX_STALENESS allows it."""
    played, notes = reusable(checkpoint, run.staleness, run.policy.vocabulary) if checkpoint else ({}, [])
    run.versions.check()
    _say_notes(run.tracker.say, notes)
    if not run.staleness:
        yield
        return
    assert isinstance(run.engine, VllmServers)
    ahead = Ahead(
        run.rollouts, run.collector, stage, run.engine, run.state, staleness=run.staleness, last_step=run.total_steps,
        hand_over=run.hand_over, limit=run.settings.training.rank_timeout, played=played,
    )  # fmt: skip
    run.ahead, run.writer.keep_ahead = ahead, ahead.save
    with closing(ahead):
        yield


@contextmanager
def _directory(
    settings: Settings, before: Resumed | None, state: RunState, *, overwrite: bool
) -> Iterator[tuple[Path, list[str]]]:
    """The run's directory without records beyond the state's step, and notes on what was changed there."""
    if before is None:
        with new_directory(settings, overwrite=overwrite) as directory:
            yield directory, []
        return
    notes = []
    if before.checkpoint is None:
        clear_run(before.directory)
        notes.append(f"a run in {before.directory} died before its first checkpoint; this one replaces it")
    yield before.directory, notes + rewind(before.directory, state) + lost_metrics(before.directory, state.step)


@contextmanager
def _loaded(
    settings: Settings, adapter: Path | None, checkpoint: Checkpoint | None, total: int, ranks: Ranks, say: Say
) -> Iterator[tuple[OpenPolicy, Updater, Settings, RunState]]:
    """The policy and its engine, the updater, the settings with the adapter's own, and the state.

    As in the checkpoint, and equal on every rank.
    """

    def load() -> tuple[OpenPolicy, Updater, Settings, RunState]:
        policy = load_trained(settings, adapter, ranks, mesh)
        opened = OpenPolicy(settings, policy, build_engine(settings, policy))
        stack.callback(leave_and_close, ranks, opened.engine)
        own = settings if settings.training.adapter is None else with_lora(settings, policy.lora)
        updater = build_updater(policy, own, total_steps=total, ranks=ranks)
        return opened, updater, own, _restore(checkpoint, updater) if checkpoint else RunState()

    say("Loading the model ...")
    with ExitStack() as stack:
        with ranks.at_work():
            ranks.broadcast(None if ranks.is_alone else Task.of(settings, total, adapter))
            mesh = mesh_of(settings, ranks)
            opened, updater, own, state = ranks.agree(load)
            updater.synchronize()
            ranks.started()
        yield opened, updater, own, state


def _restore(checkpoint: Checkpoint, updater: Updater) -> RunState:
    state, moments = load_state(checkpoint)
    updater.load_state_dict(moments)
    return state


def _training_scorer(settings: Settings, mode: Mode, algorithm: Algorithm) -> Scores:
    """The mode's reward minus the penalty for overlong completions; evaluations are scored without the penalty."""
    scorer = build_scorer(settings.rewards, settings.reward_weights, settings.agent, reward=mode.reward)
    wanted, max_tokens = settings.algorithm, settings.agent.max_tokens
    buffer = wanted.overlong_buffer
    if buffer is None:
        buffer = round(algorithm.overlong_share * max_tokens)
    return OverlongScorer(scorer, max_tokens, buffer, wanted.overlong_penalty) if buffer else scorer


def _epochs(settings: Settings, mode: Mode) -> int | None:
    return settings.training.num_train_epochs if mode.epochs_bound else None


def _check(settings: Settings, mode: Mode, ranks: Ranks) -> None:
    """Check what can be wrong before anything is loaded."""
    check_services(settings)
    check_engine(settings, trainable=True)
    check_shard(settings, ranks)
    check_samples(settings.evaluation.eval_samples, settings.agent.eval_temperature)
    _check_environment(settings, mode)
    if settings.has_servers:
        check_servers(settings.vllm)


def _say_notes(say: Say, notes: Iterable[str]) -> None:
    for note in notes:
        say(f"Note: {note}")


def _announce(run: Run, changes: list[str]) -> None:
    """Print the header and all notes, and start the display."""
    sizes = {"num_train": len(run.data.train), "num_eval": len(run.data.val), "num_ranks": run.ranks.world}
    start, total, tracker = run.state.step, run.total_steps, run.tracker
    tracker.say(header(run.settings, run_dir=run.directory, start=start, total=total, **sizes))
    tracker.say("\n".join(f"Note: {note}" for note in run.data.notes + changes))
    tracker.display.start(run.directory, start, total)


def _check_environment(settings: Settings, mode: Mode) -> None:
    """Load the user's environment before the model; reject it if the mode uses its own prompt."""
    environment = settings.agent.environment
    load_task(environment)
    if environment != MAIL and mode.make_environment is not None:
        raise UsageError(
            f"Mode {settings.training.mode} trains on a static email prompt, not in the environment {environment}.",
            "Use --mode masked or rollout.",
        )


def _total_steps(settings: Settings, mode: Mode, num_questions: int, num_ranks: int) -> int:
    training = settings.training
    return count_steps(
        num_questions, questions_per_step(training, num_ranks), training.max_steps, _epochs(settings, mode)
    )
