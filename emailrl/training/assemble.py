"""Assemble a run: everything that can be wrong is found before anything is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from emailrl.agent.play import Collector, Score
from emailrl.agent.task import MAIL, load_task
from emailrl.base.errors import UsageError
from emailrl.base.plain import counted
from emailrl.checkpoints import Checkpoint
from emailrl.engines import build_engine, check_engine
from emailrl.engines.base import PolicyEngine
from emailrl.engines.vllm.servers import check_servers
from emailrl.mail import database_fingerprint
from emailrl.measure.evaluation import check_samples
from emailrl.model.shard import check_shardable
from emailrl.questions.load import fingerprint, missing_ids, read_questions
from emailrl.ranks import Ranks
from emailrl.records.trajectory import Scenario
from emailrl.rewards.scorer import OverlongScorer, build_scorer
from emailrl.runs.folder import check_replaceable, clear_run, give_back_replaced, new_directory
from emailrl.runs.log import RULE, Display, Tracker, check_services
from emailrl.runs.resume import Start, check_agrees, find_start, lost_metrics, resumed, rewind, run_to_resume, with_lora
from emailrl.runs.run import Interrupts, Origin, load_state, new_run_id, seed_generators
from emailrl.settings import Settings, run_root
from emailrl.training import algorithms, team
from emailrl.training.run import TrainingRun, check_unfinished
from emailrl.training.state import Rollouts, RunState, make_filter
from emailrl.training.update import Updater

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is known of a run before its model is loaded."""

    mode: algorithms.Mode
    algorithm: algorithms.Algorithm
    checkpoint: Checkpoint | None  # What to resume from; None for a new run
    start: Start
    origin: Origin
    train: list[Scenario]
    val: list[Scenario]
    confirm: list[Scenario]
    """Other validation questions, unused for selection: they measure the best model without selection bias."""
    notes: list[str]
    scores: dict[team.Role, Score]
    total_steps: int
    epochs: int | None  # Passes over the questions that end the run; None if only ``total_steps`` does


@dataclass(frozen=True, slots=True)
class Assembly:
    """Builds a run: the one place that has all its settings, from which each part gets its own."""

    settings: Settings
    ranks: Ranks
    display: Display

    @contextmanager
    def run(self, *, resume: str | None, overwrite: bool) -> Iterator[TrainingRun]:
        """Check settings, checkpoint, rewards, data, model and engine, in this order; then claim the directory.

        A resumed run is locked before its checkpoint is chosen, so that no other process can advance it in between.
        """
        settings, ranks, display = self.settings, self.ranks, self.display
        output, training = settings.output, settings.training
        mode, algorithm = algorithms.MODES[training.mode], algorithms.resolve(settings)
        base = run_root(output.output_dir, training.mode)
        self._check(mode)
        for note in give_back_replaced(base):
            display.say(f"Note: {note}")
        with ExitStack() as stack:
            directory = checkpoint = None
            changes = []
            if resume is not None:
                any_mode = "mode" not in training.model_fields_set
                directory = run_to_resume(resume, output.output_dir, training.mode, any_mode=any_mode)
                if directory is not None:
                    checkpoint = stack.enter_context(resumed(resume, directory, overwrite=overwrite))
            elif overwrite:
                check_replaceable(base)
            ready = self._prepared(mode, algorithm, checkpoint)
            display.say("Loading the model ...")
            with ranks.at_work():
                start, total = ready.start, ready.total_steps
                if not ranks.is_alone:
                    adapter = team.read_adapter(start.adapter)
                    ranks.broadcast(team.Task(start.settings.without_secrets(), total, adapter))
                mesh = team.mesh_of(start.settings.model.shard, ranks)
                own, engine, updater, state = ranks.agree(lambda: _load(ready, ranks, mesh, stack))
                updater.synchronize()
                ranks.started()
            if directory is None:
                directory = stack.enter_context(new_directory(base, overwrite=overwrite and resume is None))
            elif checkpoint is not None:
                changes = rewind(directory, state) + lost_metrics(directory, state.step)
            else:
                clear_run(directory)
                changes = [f"a run in {directory} died before its first checkpoint; this one replaces it"]
            name = ready.origin.run_id
            tracker = Tracker(
                directory, own, display, run_id=name, mode=mode.name, step=state.step, evaluated=state.evaluated
            )
            stack.enter_context(closing(tracker))
            run = self._assembled(ready, own, directory, state, tracker, engine, updater)
            if run.ahead is not None:
                stack.enter_context(closing(run.ahead))
            sizes = {"num_train": len(ready.train), "num_eval": len(ready.val), "num_ranks": ranks.world}
            tracker.say(header(own, run_dir=directory, start=state.step, total=total, **sizes))
            notes = [*ready.notes, *run.policy.notes]
            if team.plays_on_all(own, ranks):
                each, several = own.engine_gpus, ranks.world
                notes.append(f"rollouts run on {several // each} engines, each on {each} of {several} ranks")
            tracker.say("\n".join(f"Note: {note}" for note in notes + changes))
            display.start(directory, state.step, total)
            yield run

    def _assembled(
        self,
        ready: Prepared,
        settings: Settings,
        directory: Path,
        state: RunState,
        tracker: Tracker,
        engine: PolicyEngine,
        updater: Updater,
    ) -> TrainingRun:
        ranks, mode, origin = self.ranks, ready.mode, ready.origin
        interrupts, stages = Interrupts(tracker.say), team.build_stages(settings, updater.policy)
        sampler: PolicyEngine | team.Team = engine
        if team.plays_on_all(settings, ranks):
            sampler = all_ranks = team.Team(ranks, engine, interrupts, per_engine=settings.engine_gpus)
            plays = {role: all_ranks.player(stage, role) for role, stage in stages.items()}
        else:
            activity = None if ranks.is_alone else ranks.activity
            plays = {role: stage.on(engine, activity) for role, stage in stages.items()}
        collectors = {
            role: Collector(plays[role], score, settings.agent, mode.name, origin.run_id)
            for role, score in ready.scores.items()
        }
        wanted = make_filter(ready.algorithm, settings.algorithm, answers=mode.reward is None)
        per_step, train = algorithms.questions_per_step(settings.training, ranks.world), collectors["train"]
        return TrainingRun(
            settings=settings,
            directory=directory,
            origin=origin,
            state=state,
            policy=updater.policy,
            updater=updater,
            tracker=tracker,
            interrupts=interrupts,
            saved_step=state.step if ready.checkpoint else None,
            mode=mode,
            algorithm=ready.algorithm,
            val=ready.val,
            confirm=ready.confirm,
            engine=sampler,
            evaluator=collectors["eval"],
            rollouts=Rollouts(settings.training, ready.train, directory, wanted, train, ready.epochs, per_step),
            total_steps=ready.total_steps,
            play_on=stages["train"].on if settings.staleness else None,
        )

    def _check(self, mode: algorithms.Mode) -> None:
        """Check what can be wrong before anything is loaded."""
        settings = self.settings
        check_services(settings.tracking)
        check_engine(settings, trainable=True)
        if settings.model.shard == "host":
            check_shardable(settings.model, settings.agent, settings.vllm)
            if self.ranks.is_alone:
                team.mesh_of("host", self.ranks)
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

    def _prepared(
        self, mode: algorithms.Mode, algorithm: algorithms.Algorithm, checkpoint: Checkpoint | None
    ) -> Prepared:
        """Find where to start, the questions and the rewards; NothingLeft if the run to resume is complete."""
        start = find_start(self.settings, checkpoint)
        settings, training, data = start.settings, start.settings.training, start.settings.data
        # The mode's reward minus the penalty for overlong completions; evaluations are scored without the penalty.
        rewards = settings.rewards, settings.reward_weights, settings.agent
        scorer = build_scorer(*rewards, reward=mode.reward)
        wanted, max_tokens = settings.algorithm, settings.agent.max_tokens
        buffer = wanted.overlong_buffer
        if buffer is None:
            buffer = round(algorithm.overlong_share * max_tokens)
        penalized = OverlongScorer(scorer, max_tokens, buffer, wanted.overlong_penalty) if buffer else scorer
        scores: dict[team.Role, Score] = {"train": penalized.score, "eval": build_scorer(*rewards).score}
        db, num_val = settings.store.db, data.eval_dataset_size
        database = database_fingerprint(db)
        questions = read_questions(None, data)
        train = questions.of("train", limit=data.train_dataset_size, seed=training.seed)
        val = questions.of("val", limit=2 * num_val, seed=training.seed)
        chosen, confirm = val.scenarios[:num_val], val.scenarios[num_val:]
        coverage = missing_ids(train.scenarios, db)
        if not coverage.num_answerable:
            raise UsageError(
                f"{db} contains none of the source emails of the questions in {train.source}.",
                "Use the database they were made from (--db) or other questions (--questions).",
            )
        notes = list(dict.fromkeys((*train.notes, *val.notes)))
        if coverage.answerable < 1:
            share = f"{coverage.num_answerable} of {coverage.num_questions}"
            notes.append(
                f"the database can answer only {share} training questions; the others' source emails are missing"
            )
        prints = database, fingerprint([*train.scenarios, *chosen])
        notes += [*start.notes, *algorithms.advice(settings)]
        if checkpoint:
            asked = {"database": prints[0], "questions": prints[1], "source": questions.source}
            notes += check_agrees(checkpoint, settings, mode.name, **asked)
        seed_generators(training.seed)
        epochs = training.num_train_epochs if mode.epochs_bound else None
        per_step = algorithms.questions_per_step(training, self.ranks.world)
        total = algorithms.count_steps(len(train.scenarios), per_step, training.max_steps, epochs)
        if checkpoint:
            state, _ = load_state(checkpoint, RunState, draws=False)
            ended = state.stop_reason(settings.evaluation, total, epochs)
            check_unfinished(checkpoint.path.parent, state, ended, confirms=bool(confirm))
        run_id = checkpoint.metadata.run_id if checkpoint else new_run_id(mode.name)
        reference = checkpoint.reference if checkpoint else None
        origin = Origin(run_id, mode.name, training.algorithm, *prints, start.parent, reference)
        parts = mode, algorithm, checkpoint, start, origin, train.scenarios, chosen, confirm
        return Prepared(*parts, notes, scores, total, epochs)


def _load(
    ready: Prepared, ranks: Ranks, mesh: DeviceMesh | None, stack: ExitStack
) -> tuple[Settings, PolicyEngine, Updater, RunState]:
    """Load the model on this rank; ``stack`` closes the engine. Returns the settings with the adapter's own."""
    settings = ready.start.settings
    policy = team.load_trained(settings, ready.start.adapter, ranks, mesh)
    engine = build_engine(settings, policy)
    stack.callback(team.leave_and_close, ranks, engine)
    own = settings if settings.training.adapter is None else with_lora(settings, policy.lora)
    updater, state = team.build_updater(policy, own, total_steps=ready.total_steps, ranks=ranks), RunState()
    if ready.checkpoint:
        state, moments = load_state(ready.checkpoint, RunState)
        updater.load_state_dict(moments)
    return own, engine, updater, state


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
            f"KL reference: {reference if wanted.beta else 'none (BETA=0)'}",
            f"Target accuracy: {settings.evaluation.target_accuracy:.1%}",
            f"Output: {run_dir}",
            RULE,
        )
    )
