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

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Option

from emailrl.base.credentials import without_credentials
from emailrl.base.disk import check_out, check_own, check_place
from emailrl.base.errors import UsageError
from emailrl.base.plain import counted
from emailrl.cli.inputs import suggest_benchmark
from emailrl.cli.options import Json, Overrides, Overwrite, Trust, inboxes, path_option, setting_options, several
from emailrl.cli.output import confirm, print_json, progress_console, result_console, say, warn
from emailrl.settings import Settings, load_settings

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from emailrl.questions.llm import QuestionPlan
    from emailrl.records.trajectory import Scenario

ASK_ABOVE = 1.0  # dollars above which a run needs confirmation, as it does if the price is unknown


@setting_options(
    "db seed allow_shared_inbox include_machine_mail generator_model generator_base_url max_cost",
    max_cost="llm: maximum cost in US dollars.",
)
def gen_questions(
    *,
    out: Annotated[Path | None, path_option(help="Output JSONL file. Default: next to the database.")] = None,
    generator: Annotated[
        Literal["template", "llm"], Option(help="template: provable answers, no model; llm: written by a model.")
    ] = "template",
    kinds: Annotated[
        Literal["usual", "hard"],
        Option(help="template: hard asks multi-email, count, thread and unanswerable questions."),
    ] = "usual",
    inbox: Annotated[list[str] | None, several("Ask about this mailbox; repeatable.", inboxes)] = None,
    overrides: Overrides,
    limit: Annotated[int | None, Option(min=1, help="Maximum number of questions.")] = None,
    overwrite: Overwrite = False,
    dry_run: Annotated[bool, Option("--dry-run", help="llm: estimate tokens and cost; send nothing.")] = False,
    yes: Annotated[bool, Option("--yes", "-y", help="llm: skip the cost confirmation.")] = False,
    trust: Trust = False,
    json: Json = False,
) -> None:
    from emailrl.mail.database import opened
    from emailrl.questions.inbox import MailReader, choose_inboxes
    from emailrl.questions.load import questions_file, write_scenarios
    from emailrl.questions.splits import FEW, split_notes

    asks = (overrides[name] for name in ("generator_model", "generator_base_url", "max_cost"))
    if generator == "template" and (dry_run or yes or any(asks)):
        raise UsageError("The template generator uses no model.", "Add --generator llm, or drop those options.")
    settings = load_settings(overrides, trust=trust, builds_db=True)
    db, shares = settings.store.db, bool(settings.data.allow_shared_inbox)
    target = out or questions_file(db)
    if out is None:
        check_place(db, "--db")
        check_own(target, "--out")
    check_out(target, may_exist=overwrite or dry_run)
    with opened(db) as connection:
        chosen = choose_inboxes(MailReader(connection), inbox or [])
        machine_mail = MailReader(connection).machine_mail(chosen)
    console = result_console(json=json)
    if dry_run:
        estimate = _plan(settings, chosen, limit, console)[1]
        if json:
            print_json({"db": db, "generator": "llm", **estimate})
        return
    started, more = time.perf_counter(), dict[str, Any]()
    if generator == "template":
        scenarios = _by_template(settings, kinds, chosen, limit)
    else:
        scenarios, more = _by_llm(settings, chosen, limit, is_confirmed=yes)
    if shares and len(chosen) < len(FEW):
        scenarios = [replace(scenario, shares_inbox=True) for scenario in scenarios]
    write_scenarios(target, scenarios)
    seconds = round(time.perf_counter() - started, 2)
    console.print(_table(scenarios))
    console.print(f"{counted(len(scenarios), 'question')} in {seconds} s: {target}", soft_wrap=True)
    if machine_mail and not settings.data.include_machine_mail:
        kinds_left = ", ".join(f"{number:,} {kind}" for kind, number in sorted(machine_mail.items()))
        say(f"{counted(sum(machine_mail.values()), 'email')} that programs sent left out ({kinds_left}).", console)
    is_limited = limit is not None and (generator == "llm" or len(scenarios) == limit)
    notes = split_notes(scenarios, len(chosen), is_limited=is_limited, allow_shared=shares)
    warn(*(f"Note: {note}" for note in notes))
    if any(scenario.split in (None, "test") for scenario in scenarios):
        suggest_benchmark(settings, target)
    if json:
        fields = {"inboxes": "inbox_address", "splits": "split", "kinds": "kind"}
        counts = {name: Counter(getattr(each, field) for each in scenarios) for name, field in fields.items()}
        numbers = {"questions": len(scenarios)} | counts | {"inboxes": len(counts["inboxes"])}
        more |= {"machine_mail": machine_mail}
        print_json({"out": target, "db": db, **numbers, "generator": generator, "seconds": seconds, **more})


def _table(scenarios: list[Scenario]) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    from emailrl.questions.splits import SPLITS

    counts = Counter((scenario.kind, scenario.split) for scenario in scenarios)
    table = Table("kind", *SPLITS, box=SIMPLE)
    for kind in sorted({str(scenario.kind) for scenario in scenarios}):
        table.add_row(kind, *(str(counts[kind, split]) for split in SPLITS))
    table.add_section()
    table.add_row("all", *(str(sum(s.split == split for s in scenarios)) for split in SPLITS))
    return table


def _by_template(settings: Settings, kinds: str, inboxes: list[str], limit: int | None) -> list[Scenario]:
    from emailrl.cli.live import Tally
    from emailrl.questions.template import HARD_KINDS, KINDS, generate

    with Tally() as tally:
        return generate(
            settings.store.db,
            inboxes=inboxes,
            limit=limit,
            seed=settings.training.seed,
            allow_shared=bool(settings.data.allow_shared_inbox),
            max_source_mails=settings.data.max_source_mails,
            kinds=HARD_KINDS if kinds == "hard" else KINDS,
            names=settings.agent.show_names,
            machine_mail=settings.data.include_machine_mail,
            progress=lambda _, total: tally.advance("mailboxes", total),
        )


def _plan(
    settings: Settings, inboxes: list[str], limit: int | None, console: Console
) -> tuple[QuestionPlan, dict[str, Any]]:
    """The prompts of an llm run, and their estimate, which is printed on ``console``."""
    from emailrl.questions.llm import plan_questions

    generation, shared = settings.generation, bool(settings.data.allow_shared_inbox)
    seed, db = settings.training.seed, settings.store.db
    how = {"names": settings.agent.show_names, "machine_mail": settings.data.include_machine_mail}
    plan = plan_questions(db, generation, inboxes=inboxes, limit=limit, seed=seed, allow_shared=shared, **how)
    server = without_credentials(generation.generator_base_url)
    cost = _dollars(plan.cost, "unknown (set GENERATOR_INPUT_PRICE and GENERATOR_OUTPUT_PRICE)")
    console.print(
        f"{len(plan.batches)} prompts for up to {plan.limit} questions, {plan.num_cached} already answered; "
        f"{plan.num_to_send} to send to {generation.generator_model} at {server}: about "
        f"{plan.tokens_in:,} tokens in, {plan.tokens_out:,} out; cost {cost}.",
        soft_wrap=True,
    )
    asked = {"model": generation.generator_model, "server": server}
    counts = {"prompts": len(plan.batches), "cached": plan.num_cached}
    return plan, asked | counts | {name: getattr(plan, name) for name in ("tokens_in", "tokens_out", "cost")}


def _by_llm(
    settings: Settings, inboxes: list[str], limit: int | None, *, is_confirmed: bool
) -> tuple[list[Scenario], dict[str, Any]]:
    """The questions, and facts about their generation for ``--json``."""
    from emailrl.cli.live import Tally
    from emailrl.questions.llm import QuestionWriter, harvest

    console, generation, rewards = progress_console(), settings.generation, settings.rewards
    plan, estimate = _plan(settings, inboxes, limit, console)
    max_cost = rewards.max_cost
    writer = QuestionWriter(
        generation, openrouter_api_key=rewards.openrouter_api_key, timeout=rewards.litellm_timeout, max_cost=max_cost
    )
    if max_cost is not None and plan.cost is not None and plan.cost > max_cost:
        problem = f"The estimated cost of {_dollars(plan.cost, '')} exceeds --max-cost."
        raise UsageError(problem, "Ask for fewer questions (--limit).")
    is_cheap = plan.cost is not None and plan.cost <= ASK_ABOVE
    what = f"The cost ({_dollars(plan.cost, 'unknown')})"
    if plan.num_to_send and not (is_confirmed or is_cheap or confirm("Send the emails and spend this?", what)):
        raise typer.Abort
    with Tally() as tally:
        total = plan.num_to_send
        spending = writer.ask(plan, lambda spent: tally.advance("prompts", total, _dollars(spent.cost, "")))
    seed, most = settings.training.seed, settings.data.max_source_mails
    result = harvest(plan, settings.store.db, generation, seed=seed, max_source_mails=most)
    for reason, number in result.dropped.items():
        console.print(f"  dropped {number:>6,}  {reason}")
    cost = _dollars(spending.cost, "unknown")
    console.print(f"{spending.tokens_in:,} tokens in, {spending.tokens_out:,} out; cost {cost}")
    spent = {name: getattr(spending, name) for name in ("tokens_in", "tokens_out", "cost")}
    return result.scenarios, estimate | spent | {"dropped": result.dropped}


def _dollars(cost: float | None, unknown: str) -> str:
    return unknown if cost is None else f"${cost:.2f}"
