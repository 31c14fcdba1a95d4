"""Supervised fine-tuning: the loop, and the run that it works on. The examples of each step depend only on the seed and
the step, so that a resumed run equals an uninterrupted one, bit for bit on a CPU."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from emailrl.agent.play import check_template
from emailrl.agent.task import load_task
from emailrl.base.errors import UsageError
from emailrl.base.plain import counted, duration
from emailrl.checkpoints import SFT, Checkpoint, damage_of, list_checkpoints, recover, run_root
from emailrl.engines.renderer import ChatRenderer
from emailrl.engines.thoughts import template_notes
from emailrl.mail import database_fingerprint
from emailrl.model.lora import checksum
from emailrl.model.policy import Policy, choose_device, choose_dtype, load_policy, prepare_training
from emailrl.model.resolve import find_adapter, with_own_settings
from emailrl.model.template import with_arguments
from emailrl.ranks import RankGroup, Ranks, joined
from emailrl.runs.folder import clear_run, free_directory
from emailrl.runs.log import RULE, Clock, Display, Say, Tracker, check_services, pace, silent
from emailrl.runs.resume import check_agrees, checkpoint_to_resume, find_start, nothing_left, resumed, run_to_resume
from emailrl.runs.run import (
    NAMES,
    Interrupts,
    Origin,
    Run,
    State,
    load_state,
    new_run_id,
    restore,
    seed_generators,
    write_weights,
)
from emailrl.settings import Settings, SftSettings, TrainingSettings
from emailrl.sft import demo, small_model
from emailrl.sft.data import Data, examples, gather, source_of
from emailrl.sft.fit import Fitter
from emailrl.training import team

Task = tuple[Settings, Path | None, Checkpoint | None]  # What a run trains, with which adapter, and where it goes on


@dataclass(frozen=True, slots=True)
class SftResult:
    """The result of a run."""

    out: Path  # An adapter, or a model after full fine-tuning
    steps: int  # Including those before a resume
    loss: float  # Training loss of the last step, in nats per token
    val_loss: float | None  # That of the weights in ``out``; None without held-out data


@dataclass(slots=True)
class SftState(State):
    """What changes from step to step, besides weights and optimizer."""

    loss: float = math.nan
    val_loss: float | None = None  # The last
    best: float | None = None  # The lowest

    def stop_reason(self, sft: SftSettings) -> str | None:
        """Why the run ends here, or None if it continues."""
        if self.step >= sft.sft_steps:
            return "all steps done"
        return "the validation loss stopped falling" if self.evaluations_without_better >= sft.sft_patience else None

    def result(self, product: Path) -> SftResult:
        """The result of a run that ends here."""
        return SftResult(product.absolute(), self.step, self.loss, self.best if self.best_step else self.val_loss)


@dataclass(kw_only=True)
class SftRun(Run[SftState]):
    """Everything one run holds."""

    updater: Fitter
    data: Data

    def loop(self) -> str:
        """Repeat: train on a batch, validate, log, checkpoint; return why it ended."""
        state, sft = self.state, self.settings.sft
        if self.validate_if_due() is not None:
            self.end_step()
        seconds_to = pace(state.step)
        with closing(self.data.batches(state.step)) as batches:  # ends the processes that play
            while (reason := state.stop_reason(sft)) is None:
                clock = Clock()
                with self.interrupts.droppable(), clock.phase("data"):
                    batch = next(batches)
                with clock.phase("update"):
                    self.half_done = True
                    metrics = self.updater.step(batch, step=state.step + 1)
                    if broken := {k: metrics[k] for k in ("loss", "grad_norm") if not math.isfinite(metrics[k])}:
                        hint = "Lower --learning-rate, or inspect the conversations."
                        self.check_skipped(broken, state.step + 1, hint)
                    state.step, state.loss = state.step + 1, metrics["loss"]
                val_loss = None
                try:
                    with clock.phase("evaluation"):
                        val_loss = self.validate_if_due()
                finally:  # a validation cut short does not cost the step: it is saved, and the resumed run validates it
                    parts = [f"Step {state.step}/{sft.sft_steps}", f"loss {metrics['loss']:.4f}"]
                    parts += [] if val_loss is None else [f"val_loss {val_loss:.4f}"]
                    left = seconds_to(state.step, sft.sft_steps)
                    parts += [f"lr {metrics['learning_rate']:.2e}", f"{duration(left)} left"]
                    parts += ["update skipped: non-finite"] if metrics["updates_skipped"] else []
                    record = {"step": state.step} | metrics | {"val_loss": val_loss, "seconds": clock.seconds()}
                    self.tracker.step(record, " | ".join(parts), left)
                    self.complete_step()
                self.end_step()
        return reason

    @property
    def is_due(self) -> bool:
        """Whether to validate and save: at step 0, every SFT_EVAL_STEPS and after the last step."""
        sft, step = self.settings.sft, self.state.step
        return step % sft.sft_eval_steps == 0 or step == sft.sft_steps

    def validate_if_due(self) -> float | None:
        """The validation loss of a step that is due, unless already measured."""
        state = self.state
        if not self.data.val or not self.is_due or state.last_evaluated == state.step:
            return None
        state.val_loss = loss = self.updater.loss(self.data.val, self.interrupts.droppable)
        is_best = state.best is None or loss < state.best
        state.best = loss if is_best else state.best
        state.count_evaluation(is_best=is_best)
        return loss

    def end_step(self) -> None:
        """Complete the step, and save what is due."""
        state = self.state
        state.last_metrics = {"loss": state.loss, "val_loss": state.val_loss}
        self.complete_step()
        if state.step and state.best_step == state.step:
            self.write(SFT)
        if state.step and self.is_due:
            self.write("checkpoint")

    def fill(self, folder: Path, kind: str) -> None:
        """Write a checkpoint's files; the product is the weights alone, those of a new model in bf16."""
        if kind != SFT:
            super().fill(folder, kind)
            return
        new, policy = self.settings.sft.from_scratch, self.policy
        write_weights(replace(policy, model=copy.deepcopy(policy.model).to(torch.bfloat16)) if new else policy, folder)


def sft(
    settings: Settings,
    *,
    out: Path | None = None,
    resume: str | None = None,
    workers: int | None = None,
    progress: Say = silent,
    display: Display | None = None,
) -> SftResult:
    """Fine-tune by the settings; ``progress`` and ``display`` as in ``training.loop``, ``out`` and ``resume`` as in
    ``find_run``. ``workers`` processes play demo worlds (None: one a core). A KeyboardInterrupt, or any error between
    two updates, leaves the last complete step saved. Under torchrun, this is rank 0; the other ranks call ``follow``.
    Raises UsageError for invalid settings, EmailRLError for a run that cannot continue."""
    display = display or Display(progress)
    with joined(settings.training, device=settings.model.device) as ranks:
        wanted, source = settings.sft, source_of(settings)
        if wanted.from_scratch and (wanted.trajectories or source != "demo"):
            hint = "Drop --trajectories." if source == "demo" else "Drop it, or choose a model with --model."
            raise UsageError("--from-scratch trains on demo worlds only.", hint)
        if settings.training.adapter is not None and (wanted.from_scratch or wanted.full_finetuning):
            hint = "Merge it: emailrl export --format merged."
            raise UsageError("Full fine-tuning starts from a model, not from an adapter.", hint)
        check_services(settings.tracking)
        directory, checkpoint = find_run(settings.output.output_dir, out, resume)
        product = directory / NAMES[SFT]
        if checkpoint is not None:
            state = load_state(checkpoint, SftState)
            written = {item.path: item.metadata.step for item in list_checkpoints(directory)}.get(product)
            is_validated = state.last_evaluated in (None, state.step)  # else the validation was cut short
            is_whole = is_validated and written == (state.best_step or state.step) and not damage_of(product)
            if (reason := state.stop_reason(wanted)) and is_whole:
                was, now = checkpoint.metadata, find_start(settings, checkpoint).settings
                same = {"database": was.database_fingerprint, "questions": was.questions_fingerprint, "source": ""}
                display.result(nothing_left(directory, state.step, reason, check_agrees(checkpoint, now, SFT, **same)))
                return state.result(product)
        else:  # experts play as the adapter or the model does
            adapter = settings.training.adapter
            start = find_adapter(adapter, settings.output.output_dir).path if adapter else settings.model.name
            settings, _ = with_own_settings(settings, start, given_wins=True)
        with _open(settings, directory, resume, workers, display, ranks) as run, run.interrupts.installed():
            ranks.stop_with(run.interrupts.request)
            with run.rescued():
                run.tracker.display.start(directory, run.state.step, wanted.sft_steps)
                reason = run.loop()
                run.tracker.display.ended(reason)
                run.interrupts.check()  # an interrupt during the last step also stops what follows
            state = run.state
            if not state.best_step:
                run.write(SFT)
            result, step = state.result(product), state.best_step or state.step
            said = "" if result.val_loss is None else f" Validation loss {result.val_loss:.4f} at step {step}."
            run.tracker.say(f"Done after step {state.step}: {reason}.{said} Wrote {product}.", is_result=True)
            return result


def find_run(output_dir: Path, out: Path | None, resume: str | None) -> tuple[Path, Checkpoint | None]:
    """Where to train: in ``out``, by default the free folder ``<output_dir>_sft``, or in the run ``resume`` selects,
    from its last checkpoint. ``auto`` resumes the run in ``out`` (by default the newest) if there is one, ``latest``
    requires it, a path names the run or its last checkpoint. UsageError for other folders, and a missing run."""
    directory = None
    if resume is not None:
        is_named = out is not None and resume in ("auto", "latest")
        directory = out if is_named else run_to_resume(resume, output_dir, SFT)
    elif out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        hint = "Choose another folder with --out, or continue it with --resume latest."
        raise UsageError(f"{out} already exists.", hint)
    if directory is None:
        return out or free_directory(run_root(output_dir, SFT)), None
    checkpoint = checkpoint_to_resume(directory, resume or "auto")
    if checkpoint is not None and checkpoint.metadata.mode != SFT:
        raise UsageError(f"{directory} is a run of mode {checkpoint.metadata.mode}.", "Continue it with emailrl train.")
    return directory, checkpoint


@contextmanager
def _open(
    settings: Settings, directory: Path, resume: str | None, workers: int | None, display: Display, ranks: Ranks
) -> Iterator[SftRun]:
    """Check conversations before loading a model; then start or resume."""
    seed_generators(settings.training.seed)
    train, val, found = gather(settings)
    task = load_task(settings.agent.environment, settings)
    database = database_fingerprint(settings.store.db) if source_of(settings) == "questions" else ""
    with ExitStack() as stack:
        remedy = "Resume the latest, or copy the checkpoint elsewhere."
        checkpoint = stack.enter_context(resumed(resume or "auto", directory, remedy=remedy))
        recover(directory)
        if checkpoint is None:
            clear_run(directory)  # remains of a run that died before its first checkpoint
        start = find_start(settings, checkpoint)
        settings, sft = start.settings, start.settings.sft
        display.say("Loading the model ...")
        with ranks.at_work():
            fitter = _load(ranks.broadcast((settings.without_secrets(), start.adapter, checkpoint)), ranks)
        policy = fitter.policy
        window = int(policy.model.config.get_text_config().max_position_embeddings)
        longest = min(window, settings.model.max_model_len or window)
        renderer = ChatRenderer(policy.tokenizer, task.tools, settings.model.tool_dialect)
        data = examples(train, val, settings, renderer, longest=longest, workers=workers)
        state, notes = SftState(), [*start.notes, *found, *data.notes, *policy.notes]
        notes += template_notes(renderer, settings.model)
        origin = Origin(new_run_id(SFT), SFT, SFT, database, data.fingerprint, start.parent)
        if checkpoint is not None:
            notes += check_agrees(
                checkpoint, settings, SFT,
                database=database, questions=data.fingerprint, source="the experts' conversations",
                fixed=("seed", "sft_batch_size"),
            )  # fmt: skip
            state = load_state(checkpoint, SftState)
            origin = replace(origin, run_id=checkpoint.metadata.run_id, resumed_from=checkpoint.reference)
        step = state.step
        tracker = Tracker(directory, settings, display, run_id=origin.run_id, mode=SFT, step=step, evaluated=step)
        stack.enter_context(closing(tracker))
        what = f"rank-{policy.lora['rank']} adapter" if policy.lora else "all weights"
        begun = f"Fine-tuning: {counted(sft.sft_steps, 'step')}"
        begun = f"Resuming at step {state.step} of {sft.sft_steps}" if state.step else begun
        size = counted(sft.sft_batch_size, "conversation") + f" on {ranks.world} ranks" * (not ranks.is_alone)
        begun += f" of {size} | {policy.base_model or 'a new model'} | {what}"
        described = f"Training data: {data.described}", f"Validation data: {data.val_described}"
        tracker.say("\n".join((RULE, begun, *described, f"Output: {directory}", RULE)))
        tracker.say("\n".join(f"Note: {note}" for note in notes))
        yield SftRun(
            settings=settings, directory=directory, state=state, policy=policy, updater=fitter, data=data,
            origin=origin, tracker=tracker, interrupts=Interrupts(tracker.say),
            saved_step=state.step if checkpoint else None,
        )  # fmt: skip


def follow(training: TrainingSettings, device: str) -> None:
    """Run as a rank that trains for rank 0, until rank 0 ends."""

    def join(ranks: RankGroup, stack: ExitStack) -> team.Work:
        task: Any = None
        fitter = _load(ranks.broadcast(task), ranks)
        return lambda: fitter.take(ranks.scatter(None))

    team.follow(training, device, join)


def _load(task: Task, ranks: Ranks) -> Fitter:
    """On every rank, from the same files: the policy and its optimizer, with a checkpoint's state."""

    def work() -> Fitter:
        settings, _, checkpoint = task
        fitter = Fitter(_policy(*task), settings.training, settings.sft, settings.agent.temperature, ranks)
        if checkpoint is not None:
            restore(checkpoint, fitter)
        return fitter

    fitter = ranks.agree(work)
    if not ranks.is_alone:
        ranks.check_same("The model", checksum(fitter.weights))
    ranks.started()
    return fitter


def _policy(settings: Settings, adapter: Path | None, checkpoint: Checkpoint | None) -> Policy:
    """The policy to train: a new model, the base's own weights, or an adapter; with a checkpoint's weights."""
    load = partial(load_policy, trainable=True, check=partial(check_template, settings))
    if not (settings.sft.full_finetuning or settings.sft.from_scratch):
        return load(settings, adapter=adapter)
    if checkpoint is not None:
        policy = load(settings.with_model(str(checkpoint.path)), full=True)
        return replace(policy, base_model=checkpoint.metadata.base_model)
    if not settings.sft.from_scratch:
        return load(settings, full=True)
    seed, device = settings.training.seed, choose_device(settings.model.device)
    tokenizer = small_model.train_tokenizer(demo.corpus(demo.CORPUS_WORLDS, seed=seed))
    tokenizer = with_arguments(tokenizer, settings.model)
    dtype = choose_dtype(settings.model.dtype, device)
    model: Any = small_model.new_model(tokenizer, seed)
    model.to(device, dtype).eval()
    notes = prepare_training(model, settings.training, "the new model", device, full=True)
    return Policy(model, tokenizer, "", "", device, dtype, trainable=True, notes=notes)
