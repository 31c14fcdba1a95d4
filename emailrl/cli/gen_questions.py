"""Generate questions with known answers from any database built by gen-db.

Without --inbox, questions are about the largest mailboxes. Splits share no inbox and no source email. Of two or three
mailboxes, the one with the most questions is for training; a single mailbox is all test. --allow-shared-inbox splits
one or two mailboxes by subject instead, for both training and testing; the question file records it for later commands.

The template generator needs no model and proves every answer. The llm generator sends emails, 20 per prompt, to the
server at GENERATOR_BASE_URL, after a cost estimate. Replies are kept, so an interrupted run continues where it
stopped.

Examples:

\b
  emailrl gen-questions
  emailrl gen-questions --db data/mail.db --inbox me@example.org --limit 500
  emailrl gen-questions --inbox me@example.org --allow-shared-inbox
  emailrl gen-questions --out questions.jsonl --overwrite --json
  emailrl gen-questions --generator llm --dry-run
  emailrl gen-questions --generator llm --limit 200 --max-cost 2
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from emailrl.base.errors import UsageError
from emailrl.base.plain import counted
from emailrl.cli.next_step import suggest_benchmark
from emailrl.cli.options import Json, Overrides, Overwrite, Trust, inboxes, path_option, setting_options
from emailrl.cli.output import print_json, progress_console, result_console
from emailrl.cli.tables import questions_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn

    from emailrl.questions.llm import QuestionPlan, QuestionWriter, Spending
    from emailrl.records.trajectory import Scenario
    from emailrl.settings import GenerationSettings, Settings

ASK_ABOVE = 1.0
"""Dollars above which a run needs confirmation, as it does if the price is unknown."""


Inboxes = Annotated[
    list[str] | None,
    typer.Option("--inbox", metavar="<str>", help="Ask about this mailbox; repeatable.", autocompletion=inboxes),
]


@setting_options("db seed allow_shared_inbox generator_model generator_base_url")
def gen_questions(
    *,
    out: Annotated[Path | None, path_option("--out", help="Output JSONL file. Default: next to the database.")] = None,
    generator: Annotated[
        Literal["template", "llm"], typer.Option(help="template: provable answers, no model; llm: written by a model.")
    ] = "template",
    kinds: Annotated[
        Literal["usual", "hard"],
        typer.Option(help="template: hard asks multi-email, count, thread and unanswerable questions."),
    ] = "usual",
    inbox: Inboxes = None,
    overrides: Overrides,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Maximum number of questions.")] = None,
    overwrite: Overwrite = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="llm: estimate tokens and cost without sending anything.")
    ] = False,
    max_cost: Annotated[float | None, typer.Option(min=0, help="llm: maximum cost in US dollars.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="llm: skip the cost confirmation.")] = False,
    trust: Trust = False,
    json: Json = False,
) -> None:
    import time
    from dataclasses import replace

    from emailrl.base.disk import check_out, check_own, check_place
    from emailrl.questions import write_scenarios
    from emailrl.questions.beside import questions_file
    from emailrl.questions.splits import FEW, split_notes
    from emailrl.settings import load_settings

    asks = (overrides["generator_model"], overrides["generator_base_url"], dry_run, yes, max_cost is not None)
    if generator == "template" and any(asks):
        raise UsageError("The template generator uses no model.", "Add --generator llm, or drop those options.")
    settings = load_settings(overrides, trust=trust, builds_db=True)
    db, shares = settings.store.db, bool(settings.data.allow_shared_inbox)
    target = out or questions_file(db)
    if out is None:
        check_place(db, "--db")
        check_own(target, "--out")
    check_out(target, may_exist=overwrite or dry_run)
    chosen = _choose_inboxes(db, inbox or [])
    if dry_run:
        plan = _plan(settings, chosen, limit, result_console(json=json))
        if json:
            print_json({"db": db, "generator": "llm", **_estimate(plan, settings.generation)})
        return
    started, more = time.perf_counter(), dict[str, Any]()
    if generator == "template":
        scenarios = _by_template(settings, kinds, chosen, limit)
    else:
        plan = _plan(settings, chosen, limit, progress_console())
        scenarios, more = _by_llm(plan, settings, max_cost, is_confirmed=yes)
    if shares and len(chosen) < len(FEW):
        scenarios = [replace(scenario, shares_inbox=True) for scenario in scenarios]
    write_scenarios(target, scenarios)
    seconds = round(time.perf_counter() - started, 2)
    console = result_console(json=json)
    console.print(questions_table(scenarios))
    console.print(f"{counted(len(scenarios), 'question')} in {seconds} s: {target}", soft_wrap=True)
    is_limited = limit is not None and (generator == "llm" or len(scenarios) == limit)
    for note in split_notes(scenarios, len(chosen), is_limited=is_limited, allow_shared=shares):
        progress_console().print(f"Note: {note}", style="yellow", soft_wrap=True)
    if any(scenario.split in (None, "test") for scenario in scenarios):
        suggest_benchmark(settings, target)
    if json:
        print_json(_result(scenarios, target, db) | {"generator": generator, "seconds": seconds, **more})


def _choose_inboxes(db: Path, named: list[str]) -> list[str]:
    """The mailboxes to ask about."""
    from emailrl.mail.connection import opened
    from emailrl.questions.inbox.mailbox import MailReader
    from emailrl.questions.inbox.owners import choose_inboxes

    with opened(db) as connection:
        return choose_inboxes(MailReader(connection), named)


def _result(scenarios: list[Scenario], target: Path, database: Path) -> dict[str, Any]:
    from collections import Counter

    return {
        "out": target,
        "db": database,
        "questions": len(scenarios),
        "inboxes": len({scenario.inbox_address for scenario in scenarios}),
        "splits": Counter(scenario.split for scenario in scenarios),
        "kinds": Counter(scenario.kind for scenario in scenarios),
    }


def _by_template(settings: Settings, kinds: str, inboxes: list[str], limit: int | None) -> list[Scenario]:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

    from emailrl.questions.template import HARD_KINDS, KINDS, generate

    with _progress_bar(TextColumn("mailboxes"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()) as bar:
        task = bar.add_task("mailboxes", total=None)
        return generate(
            settings.store.db,
            inboxes=inboxes,
            limit=limit,
            seed=settings.training.seed,
            allow_shared=bool(settings.data.allow_shared_inbox),
            max_source_mails=settings.data.max_source_mails,
            kinds=HARD_KINDS if kinds == "hard" else KINDS,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def _plan(settings: Settings, inboxes: list[str], limit: int | None, console: Console) -> QuestionPlan:
    """The prompts of an llm run; prints their estimate on ``console``."""
    from emailrl.questions.llm import plan_questions

    generation = settings.generation
    plan = plan_questions(
        settings.store.db,
        generation,
        inboxes=inboxes,
        limit=limit,
        seed=settings.training.seed,
        allow_shared=bool(settings.data.allow_shared_inbox),
    )
    estimate = _estimate(plan, settings.generation)
    cost = _dollars(plan.cost, "unknown (set GENERATOR_INPUT_PRICE and GENERATOR_OUTPUT_PRICE)")
    console.print(
        f"{estimate['prompts']} prompts for up to {plan.limit} questions, {plan.num_cached} already answered; "
        f"{plan.num_to_send} to send to {generation.generator_model} at {estimate['server']}: about "
        f"{plan.tokens_in:,} tokens in, {plan.tokens_out:,} out; cost {cost}.",
        soft_wrap=True,
    )
    return plan


def _estimate(plan: QuestionPlan, generation: GenerationSettings) -> dict[str, Any]:
    from emailrl.base.credentials import without_credentials

    return {
        "model": generation.generator_model,
        "server": without_credentials(generation.generator_base_url),
        "prompts": len(plan.batches),
        "cached": plan.num_cached,
        "tokens_in": plan.tokens_in,
        "tokens_out": plan.tokens_out,
        "cost": plan.cost,
    }


def _by_llm(
    plan: QuestionPlan, settings: Settings, max_cost: float | None, *, is_confirmed: bool
) -> tuple[list[Scenario], dict[str, Any]]:
    """The questions, and facts about their generation for ``--json``."""
    from emailrl.questions.llm import QuestionWriter, harvest

    generation = settings.generation
    writer = QuestionWriter(
        generation,
        openrouter_api_key=settings.rewards.openrouter_api_key,
        timeout=settings.rewards.litellm_timeout,
        max_cost=max_cost,
    )
    if max_cost is not None and plan.cost is not None and plan.cost > max_cost:
        raise UsageError(
            f"The estimated cost of {_dollars(plan.cost, '')} exceeds --max-cost.", "Ask for fewer questions (--limit)."
        )
    if plan.num_to_send and not is_confirmed:
        _confirm(plan.cost)
    spending = _ask(writer, plan)
    seed, most = settings.training.seed, settings.data.max_source_mails
    result = harvest(plan, settings.store.db, generation, seed=seed, max_source_mails=most)
    console = progress_console()
    for reason, number in result.dropped.items():
        console.print(f"  dropped {number:>6,}  {reason}")
    console.print(
        f"{spending.tokens_in:,} tokens in, {spending.tokens_out:,} out; cost {_dollars(spending.cost, 'unknown')}",
    )
    spent = {"tokens_in": spending.tokens_in, "tokens_out": spending.tokens_out, "cost": spending.cost}
    return result.scenarios, _estimate(plan, settings.generation) | spent | {"dropped": result.dropped}


def _confirm(cost: float | None) -> None:
    """Confirm a cost that is high or unknown; UsageError without a terminal."""
    import sys

    if cost is not None and cost <= ASK_ABOVE:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"The cost ({_dollars(cost, 'unknown')}) needs confirmation.", "Add --yes.")
    typer.confirm("Send the emails and spend this?", abort=True, err=True)


def _ask(writer: QuestionWriter, plan: QuestionPlan) -> Spending:
    """Send the prompts, with a progress bar of rate, time left and cost."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    numbers = TextColumn("{task.fields[rate]:.1f}/s"), TimeRemainingColumn(), TextColumn("{task.fields[cost]}")
    with _progress_bar(TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), *numbers) as bar:
        task = bar.add_task("prompts", total=plan.num_to_send, rate=0.0, cost="")

        def show(spending: Spending) -> None:
            done = spending.num_answered + spending.num_refused
            rate = done / max(bar.tasks[0].elapsed or 0.0, 1e-9)
            bar.update(task, completed=done, rate=rate, cost=_dollars(spending.cost, ""))

        return writer.ask(plan, show)


def _progress_bar(*columns: ProgressColumn) -> Progress:
    """A bar on stderr; nothing where that is not a terminal."""
    from rich.progress import Progress

    console = progress_console()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _dollars(cost: float | None, unknown: str) -> str:
    return unknown if cost is None else f"${cost:.2f}"
