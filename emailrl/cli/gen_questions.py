"""``emailrl gen-questions``: questions with exact answers out of a mail database."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from emailrl.cli.options import Db, Json, Limit, Overwrite, Seed
from emailrl.cli.output import print_json, progress_console
from emailrl.errors import UsageError

if TYPE_CHECKING:
    from emailrl.trajectory import Scenario


def gen_questions(
    db: Db = None,
    out: Annotated[Path | None, typer.Option(help="JSONL to write; default: beside the database.")] = None,
    generator: Annotated[Literal["template"], typer.Option(help="How questions are made.")] = "template",
    inbox: Annotated[list[str] | None, typer.Option(help="Ask about this mailbox; may be repeated.")] = None,
    limit: Limit = None,
    seed: Seed = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Make questions with one provable answer each, without a model, from any database that gen-db built.

    Without --inbox, the largest mailboxes are asked about. Splits share no inbox and no source mail.

    Examples:

    \b
      emailrl gen-questions
      emailrl gen-questions --db data/mail.db --inbox me@example.org --limit 500
      emailrl gen-questions --out questions.jsonl --overwrite --json
    """
    import time
    from collections import Counter

    from emailrl.scenarios import write_scenarios
    from emailrl.settings import load_settings

    settings = load_settings({"db": db, "seed": seed})
    database = settings.store.db
    target = out or database.with_name(f"{database.stem}_questions.jsonl")
    if target.exists() and not overwrite:
        raise UsageError(f"{target} exists.", "Give another --out, or --overwrite.")
    started = time.perf_counter()
    scenarios = _generate(database, inbox or [], limit, settings.training.seed)
    write_scenarios(target, scenarios)
    seconds = round(time.perf_counter() - started, 2)
    _print_summary(scenarios, target, seconds)
    if json:
        print_json(
            {
                "out": target,
                "db": database,
                "generator": generator,
                "questions": len(scenarios),
                "inboxes": len({scenario.inbox_address for scenario in scenarios}),
                "splits": Counter(scenario.split for scenario in scenarios),
                "kinds": Counter(scenario.kind for scenario in scenarios),
                "seconds": seconds,
            }
        )


def _generate(db: Path, inboxes: list[str], limit: int | None, seed: int) -> list[Scenario]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from emailrl.scenarios.template import generate

    columns = (TextColumn("mailboxes"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = progress_console()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("mailboxes", total=None)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        return generate(db, inboxes=inboxes, limit=limit, seed=seed, progress=show)


def _print_summary(scenarios: list[Scenario], target: Path, seconds: float) -> None:
    """How many questions of each kind went to each split."""
    from collections import Counter

    from rich.box import SIMPLE
    from rich.table import Table

    from emailrl.scenarios.splits import SPLITS

    counts = Counter((scenario.kind, scenario.split) for scenario in scenarios)
    table = Table("kind", *SPLITS, box=SIMPLE)
    for kind in sorted({str(scenario.kind) for scenario in scenarios}):
        table.add_row(kind, *(str(counts[kind, split]) for split in SPLITS))
    table.add_section()
    table.add_row("all", *(str(sum(s.split == split for s in scenarios)) for split in SPLITS))
    console = progress_console()
    console.print(table)
    console.print(f"{len(scenarios)} questions in {seconds} s: {target}", markup=False)
