"""``emailrl rollout``: let a policy play questions on a mailbox and keep what it did."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from emailrl.cli.options import (
    Checkpoint,
    Db,
    Engine,
    Environment,
    Json,
    Model,
    Overwrite,
    Questions,
    Reward,
    Seed,
    Trust,
    path_option,
)
from emailrl.cli.output import out_file, print_json, progress_console, say_loading
from emailrl.errors import EmailRLError, UsageError

if TYPE_CHECKING:
    from emailrl.evaluation import Evaluation
    from emailrl.policy.adapter import Adapter
    from emailrl.rollout.collect import Collector
    from emailrl.settings import Settings
    from emailrl.trajectory import Scenario, Trajectory


def rollout(
    model: Model = None,
    checkpoint: Checkpoint = None,
    engine: Engine = None,
    reward: Reward = None,
    environment: Environment = None,
    num_scenarios: Annotated[int, typer.Option(min=1, help="Questions to play.")] = 20,
    group_size: Annotated[int, typer.Option(min=1, help="Rollouts of each question.")] = 1,
    split: Annotated[str, typer.Option(help="train, val, test or all.")] = "test",
    out: Annotated[
        Path | None, path_option("--out", help="JSONL to write; none: the next in outputs/rollouts/.")
    ] = None,
    questions: Questions = None,
    db: Db = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy; default TEMPERATURE.")] = None,
    seed: Seed = None,
    overwrite: Overwrite = False,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Play questions with a policy, score the answers, and write every trajectory with its tokens.

    --checkpoint plays a checkpoint, or an exported adapter, on its own base model. Ctrl-C keeps the trajectories that
    have ended.

    Examples:

    \b
      emailrl rollout --model nano --num-scenarios 50
      emailrl rollout --checkpoint best
      emailrl rollout --model nano --group-size 6 --temperature 1 --split train
      emailrl rollout --questions questions.jsonl --db data/mail.db --out mine.jsonl
    """
    from emailrl.evaluation import Evaluation
    from emailrl.settings import load_settings

    settings = load_settings({
        "model_name": model, "engine": engine, "reward": reward, "environment": environment, "db": db,
        "questions": questions, "temperature": temperature, "seed": seed,
    }, trust=trust)  # fmt: skip
    adapter = None
    if checkpoint is not None:
        settings, adapter = _with_adapter(settings, checkpoint, model)
    target = _target(out, settings.output.output_dir.parent / "rollouts", overwrite=overwrite)
    scenarios = _scenarios(settings, split, num_scenarios)
    collector = _collector(settings, adapter)
    with closing(collector.engine):
        ended, seconds = _play(collector, scenarios, group_size, split, target)
    result = Evaluation.of(ended)
    _print_summary(result, seconds, settings, adapter, target)
    if result.exceptions == len(ended):
        raise EmailRLError(f"Every rollout raised. The first: {ended[0].exception}")
    if json:
        print_json(_record(result, target, seconds))


def _record(result: Evaluation, target: Path, seconds: float) -> dict[str, object]:
    from emailrl.evaluation import total_cost

    return {
        "out": target,
        "num_trajectories": len(result.trajectories),
        "mean_reward": result.reward,
        "accuracy": result.accuracy,
        "unjudged": result.unjudged,
        "exceptions": result.exceptions,
        "cost": total_cost(result.trajectories),
        "seconds": seconds,
    }


def _target(out: Path | None, folder: Path, *, overwrite: bool) -> Path:
    """The file to write, in a place open to writing; nothing is made yet, nor replaced unless asked for."""
    import os

    if out is None:
        number = 1
        while (folder / f"rollout-{number:03d}.jsonl").exists():
            number += 1
        out = folder / f"rollout-{number:03d}.jsonl"
    out = out_file(out, may_exist=overwrite)
    place = next(parent for parent in out.absolute().parents if parent.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise UsageError(f"{place} cannot be written to.", "Give another --out.")
    return out


def _scenarios(settings: Settings, split: str, limit: int) -> list[Scenario]:
    """The questions; what a table made from them must say is told. Nothing is compared, so inboxes may be shared."""
    from emailrl.scenarios import coverage_notes, load_scenario_set

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
        console.print(note, style="yellow", markup=False, soft_wrap=True)
    return chosen.scenarios


def _with_adapter(settings: Settings, checkpoint: str, model: str | None) -> tuple[Settings, Adapter]:
    """The adapter named, and the settings with its own base model."""
    from emailrl.policy.adapter import find_adapter
    from emailrl.policy.resolve import same_base

    if settings.agent.engine == "openai":
        raise UsageError("The engine openai plays no checkpoint.", "Name the server's model with --model.")
    adapter = find_adapter(checkpoint, settings.output.output_dir)
    if model is not None and not same_base(model, adapter.base_model):
        raise UsageError(f"{adapter.path} was trained from {adapter.base_model}, not from {model}.", "Omit --model.")
    base = settings.model.model_copy(update={"name": adapter.base_model})
    return settings.model_copy(update={"model": base}), adapter


def _collector(settings: Settings, adapter: Adapter | None) -> Collector:
    """Policy, engine and collector for the settings; a chat server needs no policy."""
    from emailrl.engines import build_engine, is_chat
    from emailrl.environment.custom import load_task
    from emailrl.rewards.build import build_scorer
    from emailrl.rollout.collect import build_chat_collector, build_collector

    if is_chat(settings):
        return build_chat_collector(settings)
    load_task(settings.agent.environment)  # what the user wrote is found wrong before a model is loaded
    say_loading()
    from emailrl.policy.load import load_policy
    from emailrl.policy.resolve import with_token_limit

    scorer = build_scorer(settings)
    policy = load_policy(settings)
    settings = with_token_limit(settings, policy.model)
    engine = build_engine(settings, policy)
    if adapter is None:
        engine.load_adapter(None, policy.base_model)
    else:
        engine.load_adapter(adapter.path, str(adapter.path.absolute()))
    return build_collector(settings, policy, engine, scorer=scorer, run_id=adapter.run_id if adapter else "")


def _play(
    collector: Collector, scenarios: list[Scenario], group_size: int, split: str, target: Path
) -> tuple[list[Trajectory], float]:
    """Roll out and write; when interrupted, the trajectories that ended are scored and written all the same."""
    import time

    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from emailrl.recording import write_trajectories

    ended: list[Trajectory] = []
    columns = (TextColumn("rollout"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    started = time.perf_counter()
    with Progress(*columns, console=progress_console()) as bar:
        task = bar.add_task("", total=len(scenarios) * group_size)

        def note(trajectory: Trajectory) -> None:
            ended.append(trajectory)
            bar.advance(task)

        try:
            groups = collector.collect(
                scenarios, group_size, step=0, seed=collector.settings.training.seed, split_label=split, progress=note
            )
        except KeyboardInterrupt:
            if not ended:  # a file that was to be replaced stays
                raise
            collector.scorer.score(ended)
            write_trajectories(target, ended)
            bar.console.print(f"{len(ended)} ended trajectories kept in {target}", markup=False, soft_wrap=True)
            raise
    ended = [trajectory for group in groups for trajectory in group.trajectories]
    write_trajectories(target, ended)
    return ended, time.perf_counter() - started


def _print_summary(
    result: Evaluation, seconds: float, settings: Settings, adapter: Adapter | None, target: Path
) -> None:
    """The table on stderr; names from outside are printed as plain text."""
    from collections import Counter

    from rich.table import Table
    from rich.text import Text

    trajectories = result.trajectories
    reasons = Counter(str(t.stop_reason or "none") for t in trajectories)
    broken = sum(max(len(t.samples) - 1, 0) for t in trajectories)
    low, high = result.interval
    # Rollouts of one question are not independent: an interval over them would be too narrow.
    repeated = len({t.group_id for t in trajectories}) < len(trajectories)
    policy = f"{settings.model.name} with {adapter.path}" if adapter else settings.model.name
    rows = {
        "policy": f"{policy}, temperature {settings.agent.temperature:g}",
        "trajectories": f"{len(trajectories)} in {seconds:.1f} s ({len(trajectories) / seconds:.2f} a second)",
        "accuracy": f"{result.accuracy:.1%}" + ("" if repeated else f" (95 %: {low:.1%} to {high:.1%})"),
        "mean reward": _number(result.reward),
        "turns": _number(result.rubric.get("num_turns")),
        "tokens": _number(result.tokens, 0),
        "found / read source": " / ".join(
            f"{result.rubric.get(name, 0):.1%}" for name in ("ever_found_right_email", "ever_read_right_email")
        ),
        "ended": ", ".join(f"{reason} {count}" for reason, count in reasons.most_common()),
        "exceptions": str(result.exceptions),
        "written": str(target),
    }
    if broken:  # the template told earlier turns otherwise than they were sampled: docs/decisions/0004
        rows["broken prefixes"] = str(broken)
    table = Table(show_header=False, box=None)
    for name, value in rows.items():
        table.add_row(name, Text(value))
    progress_console().print(table)


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
