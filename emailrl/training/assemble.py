"""Assemble a run: everything that can be wrong is found before anything is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from emailrl.agent.play import Collector, Play, Score
from emailrl.agent.task import MAIL, load_task
from emailrl.base.errors import UsageError
from emailrl.base.http import Bill
from emailrl.base.plain import counted
from emailrl.checkpoints import Checkpoint, run_root
from emailrl.engines import check_engine
from emailrl.engines.base import PolicyEngine
from emailrl.engines.vllm.servers import check_servers
from emailrl.mail import database_fingerprint
from emailrl.measure.evaluation import check_samples
from emailrl.model.shard import check_shardable
from emailrl.questions.load import coverage_notes, fingerprint, read_questions
from emailrl.ranks import Ranks
from emailrl.records.trajectory import Scenario
from emailrl.rewards.scorer import MeasuringScorer, OverlongScorer, build_scorer
from emailrl.runs.folder import check_replaceable, clear_run, give_back_replaced, new_directory
from emailrl.runs.log import RULE, Display, Tracker, check_services
from emailrl.runs.resume import Start, check_agrees, find_start, lost_metrics, resumed, rewind, run_to_resume, with_lora
from emailrl.runs.run import Interrupts, Origin, load_state, new_run_id, restore, seed_generators
from emailrl.settings import Settings
from emailrl.training import algorithms, team
from emailrl.training.run import TrainingRun, check_unfinished
from emailrl.training.state import Rollouts, RunState, make_filter

NOT_EVALUATED = "no validation question has an answer: nothing is evaluated, and the result is final"


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is known of a run before its model is loaded."""

    start: Start
    origin: Origin
    state: RunState
    algorithm: algorithms.Algorithm
    train: list[Scenario]
    val: list[Scenario]
    confirm: list[Scenario]
    """Other validation questions, unused for selection: they measure the best model without selection bias."""
    notes: list[str]
    scores: dict[team.Role, Score]
    bill: Bill
    total_steps: int
    epochs: int | None  # Passes over the questions that end the run; None if only ``total_steps`` does


@contextmanager
def opened(
    settings: Settings, ranks: Ranks, display: Display, *, resume: str | None, overwrite: bool
) -> Iterator[TrainingRun]:
    """Check settings, checkpoint, rewards, data, model and engine, in this order; then claim the directory. A resumed
    run is locked before its checkpoint is chosen, so that no other process can advance it in between."""
    output, training = settings.output, settings.training
    mode, base = algorithms.MODES[training.mode], run_root(output.output_dir, training.mode)
    _check(settings, mode, ranks)
    for note in give_back_replaced(base):
        display.say(f"Note: {note}")
    with ExitStack() as stack:
        directory = checkpoint = None
        if resume is not None:
            any_mode = "mode" not in training.model_fields_set
            directory = run_to_resume(resume, output.output_dir, training.mode, any_mode=any_mode)
            if directory is not None:
                checkpoint = stack.enter_context(resumed(resume, directory, overwrite=overwrite))
        elif overwrite:
            check_replaceable(base)
        ready = _prepared(settings, mode, checkpoint, ranks)
        display.say("Loading the model ...")
        start, state, total = ready.start, ready.state, ready.total_steps
        with ranks.at_work():
            if not ranks.is_alone:
                public = start.settings.without_secrets()
                ranks.broadcast((public, ready.algorithm, team.read_adapter(start.adapter), total))
            begin = partial(restore, checkpoint) if checkpoint else lambda _: None
            loaded = team.load(start.settings, ready.algorithm, start.adapter, total, ranks, stack, begin)
        if directory is None:
            directory = stack.enter_context(new_directory(base, overwrite=overwrite and resume is None))
        elif checkpoint is not None:
            ready.notes.extend(rewind(directory, state) + lost_metrics(directory, state.step))
        else:
            clear_run(directory)
            ready.notes.append(f"a run in {directory} died before its first checkpoint; this one replaces it")
        run = _assembled(ready, loaded, ranks, directory, display, stack)
        run.tracker.display.start(directory, state.step, total)
        yield run


def _assembled(
    ready: Prepared, loaded: team.Loaded, ranks: Ranks, directory: Path, display: Display, stack: ExitStack
) -> TrainingRun:
    """The run of these parts, announced; ``stack`` ends it."""
    (updater, engine, stages), state = loaded, ready.state
    assert engine is not None
    own, origin, total = ready.start.settings, ready.origin, ready.total_steps
    own = own if own.training.adapter is None else with_lora(own, updater.policy.lora)
    at = {"step": state.step, "evaluated": -1 if state.last_evaluated is None else state.last_evaluated}
    tracker = Tracker(directory, own, display, run_id=origin.run_id, mode=origin.mode, **at)
    stack.enter_context(closing(tracker))
    sizes = {"num_train": len(ready.train), "num_eval": len(ready.val), "num_ranks": ranks.world}
    tracker.say(header(own, run_dir=directory, start=state.step, total=total, **sizes))
    notes, interrupts = [*ready.notes, *updater.policy.notes], Interrupts(tracker.say)
    sampler: PolicyEngine | team.Team = engine
    if team.plays_on_all(own, ranks):
        each, several = own.engine_gpus, ranks.world
        sampler = all_ranks = team.Team(ranks, engine, stages, each, interrupts)
        plays: dict[team.Role, Play] = {role: partial(all_ranks.play_all, role) for role in stages}
        notes.append(f"rollouts run on {several // each} engines, each on {each} of {several} ranks")
    else:
        activity = None if ranks.is_alone else ranks.activity
        plays = {role: stage.on(engine, activity) for role, stage in stages.items()}
    is_long = algorithms.MODES[origin.mode].make_environment is None
    notes += stages["train"].notes(own.model, own.agent.max_turns if is_long else 1)
    if (renderer := stages["train"].renderer) is not None and renderer.dialect != "hermes":
        notes.append(f"tool calls are read as {renderer.dialect} (TOOL_DIALECT)")
    tracker.say("\n".join(f"Note: {note}" for note in notes))
    collectors = {
        role: Collector(plays[role], score, own.agent, origin.mode, origin.run_id)
        for role, score in ready.scores.items()
    }
    mode, algorithm = algorithms.MODES[origin.mode], ready.algorithm
    wanted = make_filter(algorithm, own.algorithm, answers=mode.reward is None and not own.rewards.compares)
    per_step, train = algorithms.questions_per_step(own.training, ranks.world), collectors["train"]
    run = TrainingRun(
        settings=own,
        directory=directory,
        origin=origin,
        state=state,
        policy=updater.policy,
        updater=updater,
        tracker=tracker,
        interrupts=interrupts,
        saved_step=state.step if origin.resumed_from else None,
        mode=mode,
        algorithm=algorithm,
        val=ready.val,
        confirm=ready.confirm,
        bill=ready.bill,
        engine=sampler,
        evaluator=collectors["eval"],
        rollouts=Rollouts(own.training, ready.train, directory, wanted, train, ready.epochs, per_step),
        total_steps=total,
        play_on=stages["train"].on if own.staleness else None,
    )
    if run.ahead is not None:
        stack.enter_context(closing(run.ahead))
    return run


def _check(settings: Settings, mode: algorithms.Mode, ranks: Ranks) -> None:
    """Check what can be wrong before anything is loaded."""
    check_services(settings.tracking)
    check_engine(settings, trainable=True)
    if settings.model.shard == "host":
        check_shardable(settings.model, settings.agent, settings.vllm)
        if ranks.is_alone:
            team.mesh_of("host", ranks)
    check_samples(settings.evaluation.eval_samples, settings.agent.eval_temperature)
    environment = settings.agent.environment
    load_task(environment)
    if environment != MAIL and mode.make_environment is not None:
        what = f"Mode {mode.name} trains on a static email prompt, not in the environment {environment}."
        raise UsageError(what, "Use --mode masked or rollout.")
    if settings.has_servers:
        check_servers(settings.vllm)


def _prepared(settings: Settings, mode: algorithms.Mode, checkpoint: Checkpoint | None, ranks: Ranks) -> Prepared:
    """Find where to start, the questions and the rewards; NothingLeft if the run to resume is complete."""
    start = find_start(settings, checkpoint)
    settings, rate = algorithms.with_rate(start.settings)
    start, training, data = replace(start, settings=settings), settings.training, settings.data
    algorithm, advice = algorithms.resolve(settings), [*rate, *algorithms.advice(settings)]
    # The mode's reward minus the penalty for overlong completions; evaluations are scored without the penalty.
    own, bill = settings.rewards, Bill(settings.rewards.max_cost, "Use --resume latest: the limit begins anew with it.")
    rewards = own, settings.reward_weights, settings.agent
    scorer = build_scorer(*rewards, reward=mode.reward, bill=bill)
    wanted, max_tokens = settings.algorithm, settings.agent.turn_tokens
    buffer = wanted.overlong_buffer
    if buffer is None:
        buffer = round(algorithm.overlong_share * max_tokens)
    penalized = OverlongScorer(scorer, max_tokens, buffer, wanted.overlong_penalty) if buffer else scorer
    paid = MeasuringScorer(scorer) if algorithm.has_teacher else penalized
    measured = build_scorer(*rewards, reward=own.measure, bill=bill)
    scores: dict[team.Role, Score] = {"train": paid.score, "eval": measured.score}
    db, num_val = settings.store.db, data.eval_dataset_size
    database = database_fingerprint(db)
    questions = read_questions(None, data, unanswered=own.compares or algorithm.has_teacher)
    train = questions.of("train", limit=data.train_dataset_size, seed=training.seed)
    val = questions.of("val", limit=len(questions.scenarios), seed=training.seed)
    answered = [scenario for scenario in val.scenarios if scenario.answer]
    chosen, confirm = answered[:num_val], answered[num_val : 2 * num_val]
    notes = list(dict.fromkeys((*train.notes, *val.notes, *coverage_notes(train.scenarios, db))))
    prints = database, fingerprint([*train.scenarios, *chosen])
    notes += [*start.notes, *advice]
    if own.compares or not chosen:
        basis = f"accuracy on {counted(len(chosen), 'validation question')} with answers selects best_model"
        judge = [f"{own.judge_model} scores each group (RULER)"] if own.compares else []
        notes.append("; ".join([*judge, basis if chosen else NOT_EVALUATED]))
    teacher = team.identify_teacher(settings)
    seed_generators(training.seed)
    epochs = training.num_train_epochs if mode.epochs_bound else None
    per_step = algorithms.questions_per_step(training, ranks.world)
    total = algorithms.count_steps(len(train.scenarios), per_step, training.max_steps, epochs)
    state = RunState()
    if checkpoint:
        asked = {"database": prints[0], "questions": prints[1], "source": questions.source}
        notes += (changed := check_agrees(checkpoint, settings, mode.name, **asked, teacher=teacher))
        state = load_state(checkpoint, RunState)
        ended = state.stop_reason(settings.evaluation, total, epochs)
        check_unfinished(checkpoint.path.parent, state, ended, changed, confirms=bool(confirm))
    run_id = checkpoint.metadata.run_id if checkpoint else new_run_id(mode.name)
    resumed_from = checkpoint.reference if checkpoint else None
    origin = Origin(run_id, mode.name, training.algorithm, *prints, start.parent, resumed_from, teacher)
    known = start, origin, state, algorithm
    return Prepared(*known, train.scenarios, chosen, confirm, notes, scores, bill, total, epochs)


def header(
    settings: Settings, *, run_dir: Path, num_train: int, num_eval: int, start: int, total: int, num_ranks: int = 1
) -> str:
    """The header of a run."""
    training, wanted = settings.training, settings.algorithm
    per_step = algorithms.questions_per_step(training, num_ranks)
    epochs = algorithms.num_epochs(total, per_step, num_train)
    sampling = ""
    if settings.has_servers:
        servers = [url for url in settings.vllm.vllm_urls.split(",") if url.strip()]
        steps = settings.staleness
        ahead = f", up to {counted(steps, 'step')} ahead of training" if steps else ""
        sampling = f" | rollouts on {counted(len(servers), 'vLLM server')}{ahead}"
    on_ranks = f" | ranks: {num_ranks}" if num_ranks > 1 else ""
    reference = "the adapter as it was at the start" if wanted.reference == "start" else "the base model"
    return "\n".join(
        (
            RULE,
            f"Resuming at step {start} of {total}" if start else f"Starting training: {counted(total, 'step')}",
            f"Mode: {training.mode} ({algorithms.MODES[training.mode].summary})",
            f"Model: {settings.model.name} | algorithm: {training.algorithm}{sampling}",
            f"Train questions: {num_train} | eval questions: {num_eval}",
            f"Rollouts per question: {training.num_generations} | questions per step: {per_step}{on_ranks}"
            f" | {total} step{'s are' if total != 1 else ' is'} {epochs:.2g} epochs",
            f"Learning rate: {training.learning_rate} ({training.lr_scheduler})",
            f"KL reference: {reference if wanted.beta else 'none (BETA=0)'}",
            f"Target accuracy: {settings.evaluation.target_accuracy:.1%}",
            f"Output: {run_dir}",
            RULE,
        )
    )
