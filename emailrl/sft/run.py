"""``emailrl sft``: supervised fine-tuning on what experts or better policies said; a run may be stopped anywhere.

A run's folder holds ``best_model/`` (of the lowest validation loss; without validation, the last), ``checkpoint-N/``,
``metrics.jsonl`` and ``training.log``. The examples of each step follow from the seed and the step alone, so that a
resumed run equals the uninterrupted one, bit for bit on a CPU.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from emailrl.checkpoints import SFT, Checkpoint, Metadata, created_after, prune, recover, write_checkpoint
from emailrl.engines.renderer import ChatRenderer
from emailrl.environment.custom import load_task
from emailrl.errors import EmailRLError, UsageError
from emailrl.policy.device import choose_device, choose_dtype
from emailrl.policy.load import Policy, load_policy, train_whole
from emailrl.policy.tensors import writing_tensors
from emailrl.settings import Settings
from emailrl.sft import demo, small_model
from emailrl.sft.data import Data, examples, gather, source_of
from emailrl.sft.fit import Fitter
from emailrl.sft.place import PRODUCT, Place, find_place
from emailrl.store import database_fingerprint
from emailrl.training.run.directory import clear_run, held
from emailrl.training.run.interrupts import Interrupts
from emailrl.training.run.metrics import Clock, Pace
from emailrl.training.run.provenance import git_commit, versions
from emailrl.training.run.resume import STATE_FILE, new_run_id, seed_generators
from emailrl.training.run.start import check_resumed, find_start
from emailrl.training.run.tracking import RULE, Say, Tracker, check_services, duration


@dataclass(frozen=True, slots=True)
class SftResult:
    """What a run came to."""

    out: Path
    """The folder to train on from: an adapter, or with all weights trained a model."""
    steps: int
    """Steps done, those before a resume included."""
    loss: float
    """Training loss of the last step, in nats a token."""
    val_loss: float | None
    """Of the weights in ``out``; None where nothing was held out."""


@dataclass(slots=True)
class State:
    """All that changes from step to step beside weights and optimizer."""

    step: int = 0
    loss: float = float("nan")
    val_loss: float | None = None
    """The last."""
    best: float | None = None
    best_step: int = 0
    without_better: int = 0
    """Validation losses since the lowest."""


@dataclass
class Run:
    """Everything one run holds."""

    settings: Settings
    policy: Policy
    data: Data
    fitter: Fitter
    tracker: Tracker
    interrupts: Interrupts
    place: Place
    parent: str | None
    run_id: str
    database: str
    state: State = field(default_factory=State)
    saved_step: int | None = None
    whole: bool = True
    """The weights are those of ``state.step``."""

    def train(self) -> str:
        """Go through the steps to the end, and return why it ended."""
        state, sft = self.state, self.settings.sft
        pace, droppable = Pace(state.step), self.interrupts.droppable
        with closing(_generator(self.data.batches(state.step))) as batches:
            if state.step == 0:
                with droppable():
                    self.validate()
            while state.step < sft.sft_steps and state.without_better < sft.sft_patience:
                clock = Clock()
                with droppable(), clock.phase("data"):
                    batch = next(batches)
                self.whole = False
                with clock.phase("update"):
                    metrics = self.fitter.step(batch, step=state.step + 1)
                state.step, state.loss, self.whole = state.step + 1, metrics["loss"], True
                due = state.step % sft.sft_eval_steps == 0 or state.step == sft.sft_steps
                val_loss = None
                if due:
                    with droppable(), clock.phase("evaluation"):
                        val_loss = self.validate()
                line = {"step": state.step} | metrics | {"val_loss": val_loss, "seconds": clock.seconds()}
                self.tracker.step(line, self._line(metrics, val_loss, pace))
                if due:
                    self.save()
        return "all steps done" if state.step == sft.sft_steps else "the validation loss no longer falls"

    def validate(self) -> float | None:
        """Measure the validation loss, and keep the weights where it is the lowest so far."""
        state, val = self.state, self.data.val
        if not val:
            return None
        state.val_loss = loss = self.fitter.loss(val)
        if state.best is None or loss < state.best:
            state.best, state.best_step, state.without_better = loss, state.step, 0
            if state.step:
                self.write_product()
        else:
            state.without_better += 1
        return loss

    def finish(self, reason: str) -> SftResult:
        """Say why the run ended and what it came to."""
        state, out = self.state, self.place.directory / PRODUCT
        if not self.data.val or not state.best_step:
            self.write_product()
        val_loss = state.best if state.best_step else state.val_loss
        said = "" if val_loss is None else f" Validation loss {val_loss:.4f} at step {state.best_step or state.step}."
        self.tracker.say(f"Done after step {state.step}: {reason}.{said} Wrote {out}.")
        return SftResult(out.absolute(), state.step, state.loss, val_loss)

    def save(self) -> None:
        """Write ``checkpoint-N``, with all that the next step needs, and remove the oldest."""

        def fill(folder: Path) -> None:
            self._write_weights(folder)
            with writing_tensors(folder / STATE_FILE):
                torch.save({"state": asdict(self.state), "fitter": self.fitter.state_dict()}, folder / STATE_FILE)

        write_checkpoint(self.place.directory / f"checkpoint-{self.state.step}", self._metadata("checkpoint"), fill)
        self.saved_step = self.state.step
        prune(self.place.directory, self.settings.output.save_total_limit)

    def rescue(self) -> None:
        """Save the last whole step of a run that ends before its end."""
        step = self.state.step
        if self.whole and not self.interrupts.impatient and step and self.saved_step != step:
            self.save()
        saved = (
            f"saved up to step {self.saved_step}; --resume latest goes on" if self.saved_step else "nothing is saved"
        )
        self.tracker.say(f"Stopped after step {step}: {saved}.")

    def write_product(self) -> None:
        """Write the weights as they are to ``best_model``; a new model in bf16, as it is to be shipped."""
        new = self.settings.sft.from_scratch
        policy = replace(self.policy, model=copy.deepcopy(self.policy.model).to(torch.bfloat16)) if new else self.policy
        path = self.place.directory / PRODUCT
        write_checkpoint(path, self._metadata(SFT), lambda folder: _write_weights(policy, folder))

    def _write_weights(self, folder: Path) -> None:
        _write_weights(self.policy, folder)

    def _line(self, metrics: dict[str, float], val_loss: float | None, pace: Pace) -> str:
        state, total = self.state, self.settings.sft.sft_steps
        parts = [f"step {state.step}/{total}", f"loss {metrics['loss']:.4f}"]
        parts += [] if val_loss is None else [f"val_loss {val_loss:.4f}"]
        parts += [f"lr {metrics['learning_rate']:.2e}", f"{duration(pace.seconds_left(state.step, total))} left"]
        return " | ".join(parts + (["update skipped: not finite"] if metrics["updates_skipped"] else []))

    def _metadata(self, kind: str) -> Metadata:
        state, training = self.state, self.settings.training
        checkpoint = self.place.checkpoint
        return Metadata(
            run_id=self.run_id,
            kind=kind,
            step=state.step,
            mode=SFT,
            algorithm=SFT,
            base_model=self.policy.base_model,
            lora=self.policy.lora,
            metrics={"loss": state.loss, "val_loss": state.val_loss},
            settings=self.settings.public(),
            parent=self.parent,
            resumed_from=f"{checkpoint.metadata.run_id}:{checkpoint.metadata.step}" if checkpoint else None,
            seed=training.seed,
            versions=versions(),
            database_fingerprint=self.database,
            questions_fingerprint=self.data.fingerprint,
            git_commit=git_commit(),
            created_at=created_after([self.place.directory]),
        )


def sft(
    settings: Settings,
    *,
    out: Path | None = None,
    resume: str | None = None,
    workers: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> SftResult:
    """Fine-tune as the settings say and return what came of it; ``progress`` gets each line meant for the console.

    ``out`` and ``resume`` as in ``find_place``; ``workers`` processes play demo worlds (None: one a core). A
    KeyboardInterrupt, or any error between two updates, leaves the last whole step saved. Raises UsageError for what
    the user must change, EmailRLError for a run that cannot go on.
    """
    with _open(settings, out, resume, workers, progress) as run, run.interrupts.installed():
        try:
            reason = run.train()
            run.interrupts.check()
        except (Exception, KeyboardInterrupt):
            run.rescue()
            raise
        return run.finish(reason)


@contextmanager
def _open(settings: Settings, out: Path | None, resume: str | None, workers: int | None, say: Say) -> Iterator[Run]:
    """Check settings, place and conversations before a model is loaded; then begin, or go on."""
    _check(settings)
    check_services(settings)
    seed_generators(settings.training.seed)
    place = find_place(settings, out, resume)
    found = gather(settings)
    task = load_task(settings.agent.environment, settings.agent)
    database = database_fingerprint(settings.store.db) if source_of(settings) == "questions" else ""
    with held(place.directory):
        recover(place.directory)
        if place.checkpoint is None:
            clear_run(place.directory)  # what died in it before its first checkpoint
        start = find_start(settings, place.checkpoint)
        settings = start.settings
        policy = _policy(settings, start.adapter, place.checkpoint)
        renderer = ChatRenderer(policy.tokenizer, task.tools)
        longest = min(_window(policy), settings.model.max_model_len or _window(policy))
        data = examples(found, settings, renderer, longest=longest, workers=workers)
        fitter = Fitter(policy, settings)
        state = _restore(place.checkpoint, data, fitter, settings) if place.checkpoint else State()
        run_id = place.checkpoint.metadata.run_id if place.checkpoint else new_run_id(SFT)
        tracking = settings.tracking
        named = tracking.model_copy(update={"wandb_name": tracking.wandb_name.replace("{mode}", SFT)})
        told = settings.model_copy(update={"tracking": named})
        with closing(Tracker(place.directory, told, run_id=run_id, step=state.step, say=say)) as tracker:
            tracker.say(_header(settings, policy, data, place, state))
            tracker.say("\n".join(f"Note: {note}" for note in (*start.notes, *data.notes, *policy.notes)))
            yield Run(
                settings=settings, policy=policy, data=data, fitter=fitter, tracker=tracker,
                interrupts=Interrupts(tracker.say), place=place, parent=start.parent, run_id=run_id, database=database,
                state=state, saved_step=state.step or None,
            )  # fmt: skip


def _check(settings: Settings) -> None:
    if settings.sft.from_scratch and source_of(settings) != "demo":
        raise UsageError("A model made from nothing learns from demo worlds.", "Name the one to teach with --model.")
    if settings.sft.from_scratch and settings.sft.trajectories:
        raise UsageError("A model made from nothing learns from demo worlds.", "Leave --trajectories out.")
    if settings.training.adapter is not None and (settings.sft.from_scratch or settings.sft.full_finetuning):
        raise UsageError("All weights are trained from a model, not from an adapter.", "Merge it: emailrl export.")


def _policy(settings: Settings, adapter: Path | None, checkpoint: Checkpoint | None) -> Policy:
    """The policy to train: a new model, the base's own weights, or an adapter; with a checkpoint's weights."""
    full = settings.sft.full_finetuning or settings.sft.from_scratch
    if not full:
        return load_policy(settings, adapter=adapter, trainable=True)
    if checkpoint is None and settings.sft.from_scratch:
        return _new_policy(settings)
    if checkpoint is None:
        return load_policy(settings, trainable=True, full=True)
    model = settings.model.model_copy(update={"name": str(checkpoint.path)})
    policy = load_policy(settings.model_copy(update={"model": model}), trainable=True, full=True)
    return replace(policy, base_model=checkpoint.metadata.base_model)


def _new_policy(settings: Settings) -> Policy:
    seed = settings.training.seed
    tokenizer = small_model.train_tokenizer(demo.corpus(demo.CORPUS_WORLDS, seed=seed))
    device = choose_device(settings.model.device)
    dtype = choose_dtype(settings.model.dtype, device)
    model: Any = small_model.new_model(tokenizer, seed)
    model.to(device, dtype).eval()
    notes = train_whole(model, settings)
    return Policy(model, tokenizer, "", "", device, dtype, trainable=True, notes=notes)


def _restore(checkpoint: Checkpoint, data: Data, fitter: Fitter, settings: Settings) -> State:
    """The run's state, its optimizer's too; UsageError where the checkpoint is of other examples or another order."""
    before = checkpoint.metadata
    check_resumed(settings, before.settings)
    if before.questions_fingerprint != data.fingerprint:
        raise UsageError(f"{checkpoint.path} was trained on other conversations.", "Give the same, or begin a new run.")
    recorded = {"seed": before.seed, "sft_batch_size": before.settings["sft"]["sft_batch_size"]}
    for name, old in recorded.items():
        if old != (now := settings.training.seed if name == "seed" else settings.sft.sft_batch_size):
            raise UsageError(f"{checkpoint.path} has {name} {old}, not {now}.", f"Resume with {name.upper()}={old}.")
    path = checkpoint.path / STATE_FILE
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        fitter.load_state_dict(saved["fitter"])
        return State(**saved["state"])
    except (KeyError, TypeError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise EmailRLError(f"{path} cannot be read ({reason}).", "Begin a new run without --resume.") from None


def _header(settings: Settings, policy: Policy, data: Data, place: Place, state: State) -> str:
    total = settings.sft.sft_steps
    begun = f"Resuming at step {state.step} of {total}" if state.step else f"Fine-tuning: {total} steps"
    what = f"adapter of rank {policy.lora['rank']}" if policy.lora else "all weights"
    inboxes = len({example.inbox for example in data.val})
    return "\n".join(
        (
            RULE,
            f"{begun} of {settings.sft.sft_batch_size} conversations | {policy.base_model or 'a new model'} | {what}",
            f"Learned from: {data.told}",
            f"Validated on: {len(data.val)} conversations of {inboxes} other inboxes",
            f"Output: {place.directory}",
            RULE,
        )
    )


def _window(policy: Policy) -> int:
    return int(policy.model.config.get_text_config().max_position_embeddings)


def _write_weights(policy: Policy, folder: Path) -> None:
    (policy.save_adapter if policy.lora else policy.save_model)(folder)


def _generator(batches: Iterator[Any]) -> Any:
    """As a generator, which can be closed: processes that play demo worlds end with it."""
    yield from batches
