"""The location of a supervised fine-tuning run: a new folder, or a checkpoint to resume from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from emailrl.agent.task import load_task
from emailrl.base.errors import UsageError
from emailrl.base.plain import counted
from emailrl.checkpoints import (
    SFT,
    Checkpoint,
    damage_of,
    list_checkpoints,
    recover,
)
from emailrl.engines.renderer import ChatRenderer
from emailrl.mail import database_fingerprint
from emailrl.model.device import choose_device, choose_dtype
from emailrl.model.load import load_policy, train_whole
from emailrl.model.policy import Policy
from emailrl.settings import Settings, SftSettings
from emailrl.sft import demo, small_model
from emailrl.sft.data import Data, examples, gather, source_of
from emailrl.sft.fit import Fitter
from emailrl.sft.run import PRODUCT, Place, Run, SftResult, State, find_place
from emailrl.training.run.agreement import changed_settings, choosing_questions
from emailrl.training.run.directory import clear_run, held
from emailrl.training.run.interrupts import Interrupts
from emailrl.training.run.printing import RULE
from emailrl.training.run.resume import new_run_id, reading_state, seed_generators
from emailrl.training.run.start import check_resumed, find_start
from emailrl.training.run.tracking import Say, Tracker, check_services


def sft(
    settings: Settings,
    *,
    out: Path | None = None,
    resume: str | None = None,
    workers: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
    results: Callable[[str], None] | None = None,
) -> SftResult:
    """Fine-tune by the settings and return the result; ``progress`` and ``results`` as in ``training.loop``.

    ``out`` and ``resume`` as in ``find_place``; ``workers`` processes play demo worlds (None: one a core). A
    KeyboardInterrupt, or any error between two updates, leaves the last complete step saved. Raises UsageError for
    invalid settings, EmailRLError for a run that cannot continue.
    """
    _check(settings)
    check_services(settings)
    place = find_place(settings, out, resume)
    if place.checkpoint is not None and (ended := _ended(place, place.checkpoint, settings.sft)):
        line, result = ended
        (results or progress)(line)
        return result
    with _open(settings, place, workers, progress) as run, run.interrupts.installed():
        run.tracker.results = results or progress
        try:
            reason = run.train()
            run.interrupts.check()
        except (Exception, KeyboardInterrupt):
            run.rescue()
            raise
        return run.finish(reason)


@contextmanager
def _open(settings: Settings, place: Place, workers: int | None, say: Say) -> Iterator[Run]:
    """Check conversations before loading a model; then start or resume."""
    seed_generators(settings.training.seed)
    found = gather(settings)
    task = load_task(settings.agent.environment, settings.agent)
    database = database_fingerprint(settings.store.db) if source_of(settings) == "questions" else ""
    with held(place.directory, "--out"):
        recover(place.directory)
        if place.checkpoint is None:
            clear_run(place.directory)  # remains of a run that died before its first checkpoint
        start = find_start(settings, place.checkpoint)
        settings = start.settings
        say("Loading the model ...")
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
        with closing(Tracker(place.directory, told, run_id=run_id, step=state.recorded, say=say)) as tracker:
            tracker.say(_header(settings, policy, data, place, state))
            tracker.say("\n".join(f"Note: {note}" for note in (*start.notes, *data.notes, *policy.notes)))
            yield Run(
                settings=settings, policy=policy, data=data, fitter=fitter, tracker=tracker,
                interrupts=Interrupts(tracker.say), place=place, parent=start.parent, run_id=run_id, database=database,
                state=state, saved_step=state.step or None,
            )  # fmt: skip


def _ended(place: Place, checkpoint: Checkpoint, sft: SftSettings) -> tuple[str, SftResult] | None:
    """The line and the result of a run that has nothing left to do; None if it has."""
    with reading_state(checkpoint) as saved:
        state = State(**saved["state"])
    reason, step = state.stop_reason(sft), state.best_step or state.step
    wrote = {item.metadata.step for item in list_checkpoints(place.directory) if item.path.name == PRODUCT}
    if reason is None or state.unrecorded or step not in wrote or damage_of(place.directory / PRODUCT):
        return None
    line = f"Nothing left to do in {place.directory}: it ended after step {state.step}, {reason}."
    return line, state.result(place)


def _check(settings: Settings) -> None:
    if settings.sft.from_scratch and source_of(settings) != "demo":
        raise UsageError("--from-scratch trains on demo worlds only.", "Drop it, or choose a model with --model.")
    if settings.sft.from_scratch and settings.sft.trajectories:
        raise UsageError("--from-scratch trains on demo worlds only.", "Drop --trajectories.")
    if settings.training.adapter is not None and (settings.sft.from_scratch or settings.sft.full_finetuning):
        raise UsageError(
            "Full fine-tuning starts from a model, not from an adapter.", "Merge it: emailrl export --format merged."
        )


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
    notes = train_whole(model, settings.training, "the new model")
    return Policy(model, tokenizer, "", "", device, dtype, trainable=True, notes=notes)


def _restore(checkpoint: Checkpoint, data: Data, fitter: Fitter, settings: Settings) -> State:
    """Restore the run's state and optimizer; UsageError if the checkpoint has other examples or another order."""
    before = checkpoint.metadata
    check_resumed(settings, before.settings)
    recorded = {"seed": before.seed, "sft_batch_size": before.settings["sft"]["sft_batch_size"]}
    for name, old in recorded.items():
        if old != (now := settings.training.seed if name == "seed" else settings.sft.sft_batch_size):
            raise UsageError(f"{checkpoint.path} has {name} {old}, not {now}.", f"Resume with {name.upper()}={old}.")
    if before.questions_fingerprint != data.fingerprint:
        changed = choosing_questions(changed_settings(before, settings))
        cause = "; ".join(changed) or "the questions, the database or the experts have changed"
        raise UsageError(
            f"{checkpoint.path} was trained on other conversations: {cause}.",
            "Resume with the old ones, or start a new run without --resume.",
        )
    with reading_state(checkpoint) as saved:
        fitter.load_state_dict(saved["fitter"])
        return State(**saved["state"])


def _header(settings: Settings, policy: Policy, data: Data, place: Place, state: State) -> str:
    total = settings.sft.sft_steps
    begun = f"Resuming at step {state.step} of {total}" if state.step else f"Fine-tuning: {counted(total, 'step')}"
    what = f"rank-{policy.lora['rank']} adapter" if policy.lora else "all weights"
    size = counted(settings.sft.sft_batch_size, "conversation")
    return "\n".join(
        (
            RULE,
            f"{begun} of {size} | {policy.base_model or 'a new model'} | {what}",
            f"Training data: {data.described}",
            f"Validation data: {data.val_described}",
            f"Output: {place.directory}",
            RULE,
        )
    )


def _window(policy: Policy) -> int:
    return int(policy.model.config.get_text_config().max_position_embeddings)
