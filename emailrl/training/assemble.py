"""Assemble a run: everything that can be wrong is found before anything is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from emailrl.agent.play import Collector, Play, Scores, Stage, build_stage
from emailrl.agent.task import MAIL, load_task
from emailrl.base.errors import UsageError
from emailrl.base.plain import counted
from emailrl.checkpoints import Checkpoint
from emailrl.engines import build_engine, check_engine
from emailrl.engines.base import PolicyEngine
from emailrl.engines.vllm.servers import check_servers
from emailrl.measure.evaluation import check_samples
from emailrl.model.policy import Policy
from emailrl.model.shard import check_shardable
from emailrl.ranks import Ranks
from emailrl.rewards.build import build_scorer
from emailrl.rewards.scorer import OverlongScorer
from emailrl.runs.folder import check_replaceable, clear_run, give_back_replaced, new_directory
from emailrl.runs.interrupts import Interrupts
from emailrl.runs.log import RULE, Display, Tracker, check_services
from emailrl.runs.resume import (
    Resumed,
    load_state,
    lost_metrics,
    new_run_id,
    read_state,
    resumed,
    rewind,
    run_to_resume,
    seed_generators,
)
from emailrl.runs.run import Origin
from emailrl.runs.start import Start, check_agrees, find_start, with_lora
from emailrl.settings import Settings, run_root
from emailrl.training.algorithms import Algorithm
from emailrl.training.data import RunData, load_data
from emailrl.training.ending import check_unfinished
from emailrl.training.mix import advice, resolve
from emailrl.training.modes import MODES, Mode
from emailrl.training.passes import count_steps, num_epochs, questions_per_step
from emailrl.training.rollouts import Rollouts, make_filter
from emailrl.training.run import TrainingRun
from emailrl.training.state import RunState
from emailrl.training.team import (
    Role,
    Task,
    Team,
    build_updater,
    leave_and_close,
    load_trained,
    mesh_of,
    play_on_all,
    plays_on_all,
    read_adapter,
)
from emailrl.training.update import Updater


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is known of a run before its model is loaded."""

    mode: Mode
    algorithm: Algorithm
    before: Resumed | None
    """The run to resume; None for a new one."""
    start: Start
    data: RunData
    notes: list[str]
    scorers: dict[Role, Scores]
    total_steps: int
    epochs: int | None
    """Passes over the questions that end the run; None if only ``total_steps`` does."""

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint to resume from."""
        return self.before.checkpoint if self.before else None


@dataclass(frozen=True, slots=True)
class Loaded:
    """The model's parts: as in the checkpoint, and equal on every rank."""

    settings: Settings
    """With the adapter's own."""
    policy: Policy
    engine: PolicyEngine
    updater: Updater
    state: RunState


@contextmanager
def open_run(
    settings: Settings, ranks: Ranks, display: Display, *, resume: str | None, overwrite: bool
) -> Iterator[TrainingRun]:
    """Check settings, checkpoint, rewards, data, model and engine, in this order; then claim the directory and start.

    A resumed run is locked before its checkpoint is chosen, so that no other process can advance it in between.
    """
    output, training = settings.output, settings.training
    mode, base = MODES[training.mode], run_root(output.output_dir, training.mode)
    algorithm = resolve(settings)
    _check(settings, mode, ranks)
    for note in give_back_replaced(base):
        display.say(f"Note: {note}")
    with ExitStack() as stack:
        before = None
        if resume is not None:
            any_mode = "mode" not in training.model_fields_set
            directory = run_to_resume(resume, output.output_dir, training.mode, any_mode=any_mode)
            if directory is not None:
                before = stack.enter_context(resumed(resume, directory, overwrite=overwrite))
        elif overwrite:
            check_replaceable(base)
        ready = _prepared(settings, mode, algorithm, before, ranks)
        loaded = stack.enter_context(_loaded(ready, ranks, display))
        if before is None:
            directory = stack.enter_context(new_directory(base, overwrite=overwrite and resume is None))
            changes = []
        else:
            directory, changes = before.directory, _cleared(before, loaded.state)
        run = stack.enter_context(_assembled(ready, loaded, ranks, directory, display))
        _announce(run, ready, ranks, changes)
        yield run


def _check(settings: Settings, mode: Mode, ranks: Ranks) -> None:
    """Check what can be wrong before anything is loaded."""
    check_services(settings.tracking)
    check_engine(settings, trainable=True)
    if settings.model.shard == "host":
        check_shardable(settings.model, settings.agent, settings.vllm)
        if ranks.is_alone:
            mesh_of("host", ranks)
    check_samples(settings.evaluation.eval_samples, settings.agent.eval_temperature)
    environment = settings.agent.environment
    load_task(environment)
    if environment != MAIL and mode.make_environment is not None:
        raise UsageError(
            f"Mode {mode.name} trains on a static email prompt, not in the environment {environment}.",
            "Use --mode masked or rollout.",
        )
    if settings.has_servers:
        check_servers(settings.vllm)


def _prepared(settings: Settings, mode: Mode, algorithm: Algorithm, before: Resumed | None, ranks: Ranks) -> Prepared:
    """Find where to start, the questions and the rewards; NothingLeft if the run to resume is complete."""
    checkpoint = before.checkpoint if before else None
    start = find_start(settings, checkpoint)
    settings, training = start.settings, start.settings.training
    scorers: dict[Role, Scores] = {
        "train": _training_scorer(settings, mode, algorithm),
        "eval": build_scorer(settings.rewards, settings.reward_weights, settings.agent),
    }
    data = load_data(settings.data, settings.store.db, training.seed)
    notes = [*data.notes, *start.notes, *advice(settings)]
    if checkpoint:
        notes += check_agrees(
            checkpoint, settings, mode.name,
            database=data.database_fingerprint, questions=data.questions_fingerprint, source=data.source,
        )  # fmt: skip
    seed_generators(training.seed)
    epochs = training.num_train_epochs if mode.epochs_bound else None
    total = count_steps(len(data.train), questions_per_step(training, ranks.world), training.max_steps, epochs)
    if before and checkpoint:
        state = read_state(checkpoint, RunState)
        ended = state.stop_reason(settings.evaluation, total, epochs)
        check_unfinished(before.directory, state, ended, confirms=bool(data.confirm))
    return Prepared(mode, algorithm, before, start, data, notes, scorers, total, epochs)


def _training_scorer(settings: Settings, mode: Mode, algorithm: Algorithm) -> Scores:
    """The mode's reward minus the penalty for overlong completions; evaluations are scored without the penalty."""
    scorer = build_scorer(settings.rewards, settings.reward_weights, settings.agent, reward=mode.reward)
    wanted, max_tokens = settings.algorithm, settings.agent.max_tokens
    buffer = wanted.overlong_buffer
    if buffer is None:
        buffer = round(algorithm.overlong_share * max_tokens)
    return OverlongScorer(scorer, max_tokens, buffer, wanted.overlong_penalty) if buffer else scorer


@contextmanager
def _loaded(ready: Prepared, ranks: Ranks, display: Display) -> Iterator[Loaded]:
    """Load the model on every rank; the engine is closed at the end."""
    settings, adapter, total = ready.start.settings, ready.start.adapter, ready.total_steps

    def load() -> Loaded:
        policy = load_trained(settings, adapter, ranks, mesh)
        engine = build_engine(settings, policy)
        stack.callback(leave_and_close, ranks, engine)
        own = settings if settings.training.adapter is None else with_lora(settings, policy.lora)
        updater, state = build_updater(policy, own, total_steps=total, ranks=ranks), RunState()
        if ready.checkpoint:
            state, moments = load_state(ready.checkpoint, RunState)
            updater.load_state_dict(moments)
        return Loaded(own, policy, engine, updater, state)

    display.say("Loading the model ...")
    with ExitStack() as stack:
        with ranks.at_work():
            task = None if ranks.is_alone else Task(settings.without_secrets(), total, read_adapter(adapter))
            ranks.broadcast(task)
            mesh = mesh_of(settings.model.shard, ranks)
            loaded = ranks.agree(load)
            loaded.updater.synchronize()
            ranks.started()
        yield loaded


def _cleared(before: Resumed, state: RunState) -> list[str]:
    """Remove from a resumed run's directory what lies beyond the state's step; return notes on what was changed."""
    if before.checkpoint is not None:
        return rewind(before.directory, state) + lost_metrics(before.directory, state.step)
    clear_run(before.directory)
    return [f"a run in {before.directory} died before its first checkpoint; this one replaces it"]


@contextmanager
def _assembled(
    ready: Prepared, loaded: Loaded, ranks: Ranks, directory: Path, display: Display
) -> Iterator[TrainingRun]:
    settings, mode, state, checkpoint = loaded.settings, ready.mode, loaded.state, ready.checkpoint
    run_id = checkpoint.metadata.run_id if checkpoint else new_run_id(mode.name)
    origin = Origin(
        run_id, mode.name, settings.training.algorithm, ready.data.database_fingerprint,
        ready.data.questions_fingerprint, ready.start.parent, checkpoint.reference if checkpoint else None,
    )  # fmt: skip
    with ExitStack() as stack:
        tracker = stack.enter_context(
            closing(
                Tracker(
                    directory, settings, display, run_id=run_id, mode=mode.name, step=state.step,
                    evaluated=state.evaluated,
                )
            )
        )  # fmt: skip
        interrupts = Interrupts(tracker.say)
        sampler: PolicyEngine | Team = loaded.engine
        if plays_on_all(settings, ranks):
            sampler = Team(ranks, loaded.engine, interrupts, per_engine=settings.engine_gpus)
        stage = build_stage(settings, loaded.policy, mode.make_environment)
        stages: dict[Role, Stage] = {"train": stage, "eval": build_stage(settings, loaded.policy)}
        collectors = {
            role: Collector(_play(sampler, stages[role], ranks, role), scorer, settings.agent, mode.name, run_id)
            for role, scorer in ready.scorers.items()
        }
        wanted = make_filter(ready.algorithm, settings.algorithm, answers=mode.reward is None)
        lag = settings.staleness
        run = TrainingRun(
            settings=settings, directory=directory, origin=origin, state=state, policy=loaded.policy,
            updater=loaded.updater, tracker=tracker, interrupts=interrupts,
            saved_step=state.step if checkpoint else None, mode=mode, algorithm=ready.algorithm, val=ready.data.val,
            confirm=ready.data.confirm, engine=sampler, evaluator=collectors["eval"],
            rollouts=Rollouts(
                settings.training, ready.data.train, directory, wanted, collectors["train"], ready.epochs, ranks.world
            ),
            total_steps=ready.total_steps, staleness=lag, play_on=stage.noted if lag else None,
        )  # fmt: skip
        if run.ahead is not None:
            stack.enter_context(closing(run.ahead))
        yield run


def _play(sampler: PolicyEngine | Team, stage: Stage, ranks: Ranks, role: Role) -> Play:
    if isinstance(sampler, Team):
        return play_on_all(sampler, stage, role)
    return stage.on(sampler) if ranks.is_alone else stage.noted(sampler, ranks.activity)


# -- what it says ---------------------------------------------------------------------------------------------------


def _announce(run: TrainingRun, ready: Prepared, ranks: Ranks, changes: list[str]) -> None:
    """Print the header and all notes, and start the display."""
    settings, data, step, total = run.settings, ready.data, run.state.step, run.total_steps
    sizes = {"num_train": len(data.train), "num_eval": len(data.val), "num_ranks": ranks.world}
    run.tracker.say(header(settings, run_dir=run.directory, start=step, total=total, **sizes))
    notes = [*ready.notes, *run.policy.notes]
    if plays_on_all(settings, ranks):
        each, several = settings.engine_gpus, ranks.world
        notes.append(f"rollouts run on {several // each} engines, each on {each} of {several} ranks")
    run.tracker.say("\n".join(f"Note: {note}" for note in notes + changes))
    run.tracker.display.start(run.directory, step, total)


def header(
    settings: Settings, *, run_dir: Path, num_train: int, num_eval: int, start: int, total: int, num_ranks: int = 1
) -> str:
    """The header of a run."""
    training, wanted = settings.training, settings.algorithm
    per_step = questions_per_step(training, num_ranks)
    epochs = num_epochs(total, per_step, num_train)
    on_ranks = f" | ranks: {num_ranks}" if num_ranks > 1 else ""
    reference = "the adapter as it was at the start" if wanted.reference == "start" else "the base model"
    return "\n".join(
        (
            RULE,
            f"Resuming at step {start} of {total}" if start else f"Starting training: {counted(total, 'step')}",
            f"Mode: {training.mode} ({MODES[training.mode].summary})",
            f"Model: {settings.model.name} | algorithm: {training.algorithm}{_sampling(settings)}",
            f"Train questions: {num_train} | eval questions: {num_eval}",
            f"Rollouts per question: {training.num_generations} | questions per step: {per_step}{on_ranks}"
            f" | {total} step{'s are' if total != 1 else ' is'} {epochs:.2g} epochs",
            f"KL reference: {reference if wanted.beta else 'none (BETA=0)'}",
            f"Target accuracy: {settings.evaluation.target_accuracy:.1%}",
            f"Output: {run_dir}",
            RULE,
        )
    )


def _sampling(settings: Settings) -> str:
    """The servers that sample, and how far ahead, if they do."""
    if not settings.has_servers:
        return ""
    servers = [url for url in settings.vllm.vllm_urls.split(",") if url.strip()]
    steps = settings.staleness
    ahead = f", up to {counted(steps, 'step')} ahead of training" if steps else ""
    return f" | rollouts on {counted(len(servers), 'vLLM server')}{ahead}"
