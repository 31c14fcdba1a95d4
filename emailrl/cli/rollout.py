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

import os
import time
from collections import Counter
from contextlib import closing, nullcontext
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from emailrl.base.disk import check_out, check_own
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.checkpoints import WEIGHTS, sha256_of
from emailrl.cli.inputs import choose_subjects, with_inputs
from emailrl.cli.options import Checkpoint, Json, Overrides, Overwrite, Resume, Trust, path_option, setting_options
from emailrl.cli.output import print_json, print_next, progress_console, result_console, say_again, say_loading, warn
from emailrl.measure.evaluation import Evaluation, reason, total_cost, verdict
from emailrl.records.index import index_path
from emailrl.settings import PolicySettings, Settings, load_settings

if TYPE_CHECKING:
    from rich.console import RenderableType

    from emailrl.measure.benchmark import Subject
    from emailrl.measure.journal import Conditions, Journal
    from emailrl.model.resolve import Adapter
    from emailrl.records import Record
    from emailrl.records.trajectory import Scenario

CONDITIONS = ".conditions.json"  # replaces .jsonl in the name of the file that says how the trajectories were made


@setting_options(
    "model_name engine reward environment thinking chat_template_kwargs",
    "questions db temperature seed max_cost verbose show_trajectory_details",
    verbose="Print a line per rollout.",
)
def rollout(
    *,
    checkpoint: Checkpoint = None,
    overrides: Overrides,
    limit: Annotated[int, Option(min=1, help="Number of questions.")] = 20,
    num_generations: Annotated[int, Option(min=1, help="Rollouts per question.")] = 1,
    split: Annotated[Literal["train", "val", "test", "all"], Option(help="Split of the questions.")] = "test",
    out: Annotated[Path | None, path_option(help="Output JSONL file. Default: the next in outputs/rollouts/.")] = None,
    overwrite: Overwrite = False,
    resume: Resume = False,
    trust: Trust = False,
    json: Json = False,
) -> None:
    from emailrl.cli.trajectory import show_trajectories
    from emailrl.engines import check_player
    from emailrl.measure.benchmark import own_settings
    from emailrl.measure.journal import Journal, playing_conditions
    from emailrl.model.resolve import same_base
    from emailrl.questions.load import coverage_notes, read_questions

    settings = with_inputs(load_settings(overrides, trust=trust))
    check_player(settings)
    compares = settings.rewards.compares
    if compares and num_generations == 1:
        problem = "--reward ruler compares the rollouts of one question: --num-generations 1 leaves nothing to compare."
        raise UsageError(problem, "Use 2 or more, or another --reward.")
    model = overrides["model_name"]  # with a checkpoint, it must not contradict the checkpoint's own base model
    checkpoints = [checkpoint] if checkpoint else []
    [subject] = choose_subjects(checkpoints, [model] if model and not checkpoint else [], settings)
    if checkpoint and model and not same_base(model, subject.model_name):
        raise UsageError(f"{subject.label} was trained from {subject.model_name}, not from {model}.", "Drop --model.")
    adapter, settings = subject.adapter, own_settings(subject, settings)
    folder = settings.output.output_dir.parent / "rollouts"
    if resume and overwrite:
        raise UsageError("--resume and --overwrite are mutually exclusive.", "Choose one.")
    out = _begun(folder, out) if resume else out
    _target(out, folder, may_exist=overwrite or resume)  # reject a bad path before anything is read
    part, seed = None if split == "all" else split, settings.training.seed
    # Nothing is compared, so splits may share inboxes.
    every = read_questions(None, settings.data, unanswered=compares)
    chosen = every.of(part, limit=limit, seed=seed, check_inboxes=False)
    scenarios = chosen.scenarios
    warn(*chosen.notes, *coverage_notes(scenarios, settings.store.db))
    policy = {"model": settings.model.name, "adapter_sha256": adapter and sha256_of(adapter.path / WEIGHTS)}
    shared = playing_conditions(settings, scenarios, temperature=settings.agent.temperature)
    now = policy | {"split": split, "num_generations": num_generations} | shared
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
        measured = {name: getattr(result, name) for name in ("accuracy", "unjudged", "exceptions")}
        spent = {"cost": total_cost(ended), "seconds": round(seconds, 3)}
        print_json({"out": target, "num_trajectories": len(ended), "mean_reward": result.reward} | measured | spent)
    elif target.is_file():
        print_next(["inspect-trajectory", str(target)])


def _begun(folder: Path, out: Path | None) -> Path:
    """What to resume: ``out``, or the newest rollout in the folder with recorded conditions."""
    from emailrl.measure.journal import is_complete, nothing_to_resume

    noted = max(folder.glob(f"rollout-*{CONDITIONS}"), default=None) if out is None else out.with_suffix(CONDITIONS)
    if noted is None:
        problem = f"Nothing to resume: no rollout in {folder}."
        raise UsageError(problem, "Name its file with --out.", "nothing-to-resume")
    begun = out or noted.with_name(noted.name.removesuffix(CONDITIONS) + ".jsonl")
    for file in (begun, noted):
        check_own(file, "--out")
    if not noted.is_file():
        raise nothing_to_resume(noted)
    if out is None and is_complete(begun, noted):
        hint = "Name another file with --out, or drop --resume."
        raise UsageError(f"Nothing left to resume: {begun} is complete.", hint)
    return begun


def _target(out: Path | None, folder: Path, *, may_exist: bool) -> Path:
    """The file to write, in a writable place; nothing is created yet, or replaced unless requested."""
    if out is None:
        names = (folder / f"rollout-{number:03d}.jsonl" for number in count(1))
        out = next(name for name in names if not name.exists() and not name.with_suffix(CONDITIONS).exists())
    check_out(out, may_exist=may_exist)
    if out.is_file() or not out.exists():  # nothing lies beside a pipe
        for file in (out, out.with_suffix(CONDITIONS), index_path(out)):
            check_own(file, "--out")
    place = next(parent for parent in out.absolute().parents if parent.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise UsageError(f"{place} is not writable.", "Choose another --out.")
    return out


def _claim(
    out: Path | None, folder: Path, now: Record, *, overwrite: bool, resume: bool
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


def _play(
    subject: Subject, settings: Settings, scenarios: list[Scenario], num_generations: int, split: str, journal: Journal
) -> float:
    """Run rollouts and save them; when interrupted, still score the finished ones. Returns the seconds."""
    from emailrl.cli.live import Tally
    from emailrl.measure.benchmark import players

    say_loading(settings, subject.model_name)
    total = len(scenarios) * num_generations
    how: Record = {"seed": settings.training.seed, "temperature": settings.agent.temperature, "split_label": split}
    with closing(players([subject], settings, lambda note: warn(f"Note: {note}"))) as playing:
        _, collector = next(playing)
        started = time.perf_counter()
        try:
            with Tally() as tally:
                how["progress"] = lambda _: tally.advance("rollout", total)
                tally.begin("rollout", total, len(journal.trajectories))
                journal.play(collector, [scenarios], num_generations, **how)
        except BaseException:
            if journal.trajectories:
                kept = f"{len(journal.trajectories)} finished trajectories saved in {journal.path}"
                say_again(kept, "finish")
            raise
        return time.perf_counter() - started


def rollout_table(
    result: Evaluation, num_new: int, seconds: float, settings: PolicySettings, adapter: Adapter | None, target: Path
) -> RenderableType:
    """A summary of rollouts, ``num_new`` of them in these seconds; external names are printed as plain text."""
    from rich.table import Table

    trajectories, rubric = result.trajectories, result.rubric
    resumed = "" if num_new == len(trajectories) else f", {num_new} of them new,"
    low, high = result.interval
    policy = f"{settings.model.name} with {adapter.path}" if adapter else settings.model.name
    sources = [rubric.get(name) for name in ("ever_found_right_email", "ever_read_right_email")]
    verdicts = [verdict(trajectory) for trajectory in trajectories]
    counts = Counter(verdicts)
    silent = [each.stop_reason for each, what in zip(trajectories, verdicts, strict=True) if what == "no answer"]
    reasons = Counter(str(each).replace("_", " ") for each in silent).most_common()
    endings = {
        "answered": counts["correct"] + counts["wrong"] + counts["not judged"],
        "did not know": counts["did not know"],
        f"no answer ({', '.join(f'{reason} {count}' for reason, count in reasons)})": counts["no answer"],
        "failed": counts["crashed"],
    }
    thoughts = f", {rubric['thinking_tokens']:.0f} in thoughts" if rubric.get("thinking_tokens") else ""
    rows = {
        "policy": f"{policy}, temperature {settings.agent.temperature:g}",
        "trajectories": f"{len(trajectories)}{resumed} in {seconds:.1f} s ({num_new / seconds:.2f} per second)",
        "accuracy": f"{result.accuracy:.1%} (95%: {low:.1%} to {high:.1%})",
        "mean reward": "-" if result.reward is None else f"{result.reward:.3f}",
        "turns": f"{rubric['num_turns']:.3f}" if "num_turns" in rubric else "-",
        "tokens": "-" if result.tokens is None else f"{result.tokens:.0f}{thoughts}",
        "found / read source": " / ".join("-" if share is None else f"{share:.1%}" for share in sources),
        "ended": ", ".join(f"{name} {count}" for name, count in endings.items() if count),
        "exceptions": str(result.exceptions),
        "written": str(target),
    }
    # The template renders earlier turns differently from how they were sampled: docs/decisions/0004
    if broken := sum(max(len(trajectory.samples) - 1, 0) for trajectory in trajectories):
        rows["broken prefixes"] = str(broken)
    table = Table(show_header=False, box=None)
    for name, value in rows.items():
        table.add_row(name, value)
    return table
