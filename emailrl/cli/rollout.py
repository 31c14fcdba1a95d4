"""Answer questions with a policy, score the answers, and write every trajectory with its tokens.

Without --checkpoint or --model, the newest best checkpoint answers, else the model itself. --checkpoint runs a
checkpoint or exported adapter on its own base model. Each trajectory is saved as soon as it ends. After Ctrl-C or a
crash, --resume with the same options runs the rest of --out, or of the newest file in outputs/rollouts/.

Examples:

\b
  emailrl rollout --model nano --limit 50
  emailrl rollout --checkpoint best
  emailrl rollout --model nano --num-generations 6 --split train
  emailrl rollout --questions questions.jsonl --db mail.db --out mine.jsonl
"""

from __future__ import annotations

import shlex
import time
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.cli.inputs import note_adapters, note_runs_without_best, with_inputs
from emailrl.cli.live import Tally
from emailrl.cli.options import (
    Checkpoint,
    Json,
    Overrides,
    Overwrite,
    Resume,
    Trust,
    one_of,
    path_option,
    setting_options,
)
from emailrl.cli.output import print_json, print_next, progress_console, result_console, say_loading
from emailrl.cli.tables import rollout_table

CONDITIONS = ".conditions.json"
"""Replaces .jsonl in the name of the file that records how the trajectories were made."""

if TYPE_CHECKING:
    from emailrl.measure.benchmark import Subject
    from emailrl.measure.evaluation import Evaluation
    from emailrl.measure.journal import Conditions, Journal
    from emailrl.model.adapter import Adapter
    from emailrl.records.trajectory import Scenario, Trajectory
    from emailrl.settings import Settings


@setting_options(
    "model_name engine reward environment questions db temperature seed verbose show_trajectory_details",
    verbose="Print a line per rollout.",
)
def rollout(
    *,
    checkpoint: Checkpoint = None,
    overrides: Overrides,
    limit: Annotated[int, typer.Option(min=1, help="Number of questions.")] = 20,
    num_generations: Annotated[int, typer.Option(min=1, help="Rollouts per question.")] = 1,
    split: Annotated[
        str,
        typer.Option(help="Split: train, val, test or all.", autocompletion=one_of("train", "val", "test", "all")),
    ] = "test",
    out: Annotated[
        Path | None, path_option("--out", help="Output JSONL file. Default: the next in outputs/rollouts/.")
    ] = None,
    overwrite: Overwrite = False,
    resume: Resume = False,
    trust: Trust = False,
    json: Json = False,
) -> None:
    from emailrl.cli.trajectory import show_trajectories
    from emailrl.engines import check_player
    from emailrl.measure.evaluation import Evaluation, reason
    from emailrl.measure.journal import Journal
    from emailrl.settings import load_settings

    settings = with_inputs(load_settings(overrides, trust=trust))
    check_player(settings)
    subject = _subject(settings, checkpoint, overrides["model_name"])
    settings, adapter = settings.with_model(subject.model_name), subject.adapter
    note_adapters([adapter.path] if adapter else [], settings)
    folder = settings.output.output_dir.parent / "rollouts"
    if resume and overwrite:
        raise UsageError("--resume and --overwrite are mutually exclusive.", "Choose one.")
    out = _begun(folder, out) if resume else out
    _target(out, folder, may_exist=overwrite or resume)  # reject a bad path before anything is read
    scenarios = _scenarios(settings, split, limit)
    now = _all_conditions(settings, scenarios, adapter, num_generations=num_generations, split=split)
    target, conditions = _claim(out, folder, now, overwrite=overwrite, resume=resume)
    with conditions or nullcontext():
        journal = Journal(target, conditions, resume=resume)
        num_before = len(journal.trajectories)
        seconds = _play(subject, settings, scenarios, num_generations, split, journal)
    ended = list(journal.trajectories.values())
    result = Evaluation(ended)
    show_trajectories(target, ended, settings, progress_console())
    result_console(json=json).print(rollout_table(result, len(ended) - num_before, seconds, settings, adapter, target))
    if result.exceptions == len(ended):
        raise EmailRLError(f"Every rollout failed. First error: {reason(ended[0].exception)}")
    if json:
        print_json(_record(result, target, seconds))
    elif target.is_file():
        print_next(["inspect-trajectory", str(target)])


def _record(result: Evaluation, target: Path, seconds: float) -> dict[str, object]:
    from emailrl.measure.evaluation import total_cost

    return {
        "out": target,
        "num_trajectories": len(result.trajectories),
        "mean_reward": result.reward,
        "accuracy": result.accuracy,
        "unjudged": result.unjudged,
        "exceptions": result.exceptions,
        "cost": total_cost(result.trajectories),
        "seconds": round(seconds, 3),
    }


def _begun(folder: Path, out: Path | None) -> Path:
    """What to resume: ``out``, or the newest rollout in the folder with recorded conditions."""
    from emailrl.measure.journal import is_complete, nothing_to_resume

    if out is not None:
        noted = out.with_suffix(CONDITIONS)
        if not noted.is_file():
            raise nothing_to_resume(noted)
        return out
    newest = max(folder.glob(f"rollout-*{CONDITIONS}"), default=None)
    if newest is None:
        raise UsageError(
            f"Nothing to resume: no rollout in {folder}.", "Name its file with --out.", "nothing-to-resume"
        )
    out = newest.with_name(newest.name.removesuffix(CONDITIONS) + ".jsonl")
    if is_complete(out, newest):
        raise UsageError(
            f"Nothing left to resume: {out} is complete.", "Name another file with --out, or drop --resume."
        )
    return out


def _claim(
    out: Path | None, folder: Path, now: dict[str, object], *, overwrite: bool, resume: bool
) -> tuple[Path, Conditions | None]:
    """The file to write with its conditions, locked against other processes; a non-file (a pipe) has none."""
    from emailrl.measure.journal import Busy, Conditions

    may_exist = overwrite or resume
    while True:
        target = _target(out, folder, may_exist=may_exist)
        if target.exists() and not target.is_file():
            return target, None
        try:
            conditions = Conditions(target.with_suffix(CONDITIONS), now, resume=resume)
        except Busy:
            if out is not None:
                raise
            continue
        if may_exist or not target.exists():
            return target, conditions
        conditions.close()  # another process has written it since the check


def _all_conditions(
    settings: Settings, scenarios: list[Scenario], adapter: Adapter | None, *, num_generations: int, split: str
) -> dict[str, object]:
    """Conditions that a resumed rollout must share with the original."""
    from emailrl.engines.local.weights import adapter_sha256
    from emailrl.measure.journal import playing_conditions

    policy = {"model": settings.model.name, "adapter_sha256": adapter and adapter_sha256(adapter.path)}
    shared = playing_conditions(settings, scenarios, temperature=settings.agent.temperature)
    return policy | {"split": split, "num_generations": num_generations} | shared


def _target(out: Path | None, folder: Path, *, may_exist: bool) -> Path:
    """The file to write, in a writable place; nothing is created yet, or replaced unless requested."""
    import os

    from emailrl.base.disk import check_out, check_own
    from emailrl.records.index import index_path

    if out is None:
        number = 1
        while any((folder / f"rollout-{number:03d}{ending}").exists() for ending in (".jsonl", CONDITIONS)):
            number += 1
        out = folder / f"rollout-{number:03d}.jsonl"
    check_out(out, may_exist=may_exist)
    if out.is_file() or not out.exists():  # nothing lies beside a pipe
        for file in (out, out.with_suffix(CONDITIONS), index_path(out)):
            check_own(file, "--out")
    place = next(parent for parent in out.absolute().parents if parent.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise UsageError(f"{place} is not writable.", "Choose another --out.")
    return out


def _scenarios(settings: Settings, split: str, limit: int) -> list[Scenario]:
    """The questions, with their notes printed. Nothing is compared, so splits may share inboxes."""
    from emailrl.questions import coverage_notes, load_scenario_set

    if split not in ("train", "val", "test", "all"):
        raise UsageError(f"No such split: {split!r}.", "Use train, val, test or all.")
    chosen = load_scenario_set(
        None,
        None if split == "all" else split,  # type: ignore[arg-type]
        limit=limit,
        seed=settings.training.seed,
        data=settings.data,
        check_inboxes=False,
    )
    console = progress_console()
    for note in (*chosen.notes, *coverage_notes(chosen.scenarios, settings.store.db)):
        console.print(note, style="yellow", soft_wrap=True)
    return chosen.scenarios


def _subject(settings: Settings, checkpoint: str | None, model: str | None) -> Subject:
    """The policy: the named checkpoint, on its own base model, which ``model`` must not contradict; else that model.

    Without both, it is chosen as in ``benchmark``: the newest best checkpoint, else the configured model.
    """
    from emailrl.measure.benchmark import choose_subjects
    from emailrl.model.resolve import same_base

    if checkpoint == "best" or (checkpoint is None and model is None and not settings.is_chat):
        note_runs_without_best(settings.output.output_dir)
    if checkpoint is None:
        [subject] = choose_subjects([], [] if model is None else [model], settings, settings.output.output_dir)
        return subject
    [subject] = choose_subjects([checkpoint], [], settings, settings.output.output_dir)
    if model is not None and not same_base(model, subject.model_name):
        raise UsageError(f"{subject.label} was trained from {subject.model_name}, not from {model}.", "Drop --model.")
    return subject


def _play(
    subject: Subject, settings: Settings, scenarios: list[Scenario], num_generations: int, split: str, journal: Journal
) -> float:
    """Run rollouts and save them; when interrupted, still score the finished ones. Returns the seconds."""
    from emailrl.measure.benchmark import players

    if not settings.is_chat:
        say_loading(settings, subject.model_name)
    total, played = len(scenarios) * num_generations, dict(journal.trajectories)
    with closing(players([subject], settings)) as playing:
        _, collector = next(playing)
        started = time.perf_counter()
        try:
            with Tally() as tally:
                tally.begin("rollout", total, len(played))

                def note(trajectory: Trajectory) -> None:
                    journal.append(trajectory)
                    tally.advance("rollout", total)

                groups = collector.collect(
                    scenarios, num_generations, step=0, seed=settings.training.seed, split_label=split, progress=note,
                    played=played,
                )  # fmt: skip
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                collector.score(journal.unscored)
                journal.finish()
            if journal.trajectories:
                kept = f"{len(journal.trajectories)} finished trajectories saved in {journal.path}"
                more = f"; to finish, rerun the same command with --resume --out {shlex.quote(str(journal.path))}"
                progress_console().print(kept + more, soft_wrap=True)
            raise
        seconds = time.perf_counter() - started
    place = {trajectory.id: n for n, trajectory in enumerate(t for group in groups for t in group.trajectories)}
    journal.finish(lambda trajectory: place[trajectory.id])
    return seconds
