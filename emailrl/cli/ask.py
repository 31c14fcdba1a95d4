"""Ask a mailbox a question; the agent searches, reads, answers and cites its source emails.

Without a question, questions are read from the terminal or from stdin, one per line: Ctrl-C ends the current
question, Ctrl-D the session. Steps are shown on stderr, the answer on stdout.

Without --checkpoint or --model, the newest best checkpoint answers, but one of nano only in the demo mailbox, the only
mail that nano knows; otherwise MODEL_NAME if it is set; otherwise smol if it or its base model is on this machine and
the mailbox is not the demo's; otherwise nano. --inbox may be left out if the database holds a single mailbox. Emails
stay on this machine unless the model runs on a server, which is then named.

Examples:

\b
  emailrl ask "When does the lease end?" --db data/mail.db
  emailrl ask "Who sent the March invoice?" --inbox ann@example.com
  emailrl ask --db data/mail.db
  emailrl ask "Where is lunch?" --engine openai --model openai/gpt-4.1
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.process import INTERRUPTED
from emailrl.cli.answer import Steps, render_answer, why_not
from emailrl.cli.inputs import note_adapters, note_runs_without_best
from emailrl.cli.options import Checkpoint, Json, Overrides, Trust, inboxes, setting_options
from emailrl.cli.output import print_json, progress_console, result_console, say, say_loading

if TYPE_CHECKING:
    from rich.console import Console

    from emailrl.agent.email_agent import Answer, EmailAgent
    from emailrl.settings import Settings

PROMPT = "ask> "
_SMOL_SHOWN = "smol (for simple questions; its limits: docs/evidence/smol.md)"


def _day(value: str) -> str:
    try:
        return datetime.strptime(value, "%Y-%m-%d").date().isoformat()
    except ValueError:
        raise typer.BadParameter(f"{value!r} is not a date like 2001-05-14.") from None


@setting_options("model_name engine db")
def ask(
    *,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="question", help="The question, quoted or not. Default: read questions from stdin."),
    ] = None,
    inbox: Annotated[
        str | None,
        typer.Option("--inbox", help="Mailbox address. Default: the database's only mailbox.", autocompletion=inboxes),
    ] = None,
    date: Annotated[
        str | None,
        typer.Option(
            "--date",
            parser=_day,
            metavar="YYYY-MM-DD",
            help="The agent's today; it sees only earlier emails. Default: all emails, and today's date or that of the "
            "newest email, whichever is earlier.",
        ),
    ] = None,
    checkpoint: Checkpoint = None,
    overrides: Overrides,
    trust: Trust = False,
    json: Json = False,
) -> None:
    from emailrl.mail.connection import no_database
    from emailrl.questions.inbox.owners import find_inbox
    from emailrl.settings import load_settings

    settings = load_settings(overrides, trust=trust)
    question = " ".join(words) if words else None
    if question is None and json:
        raise UsageError("--json needs a question.", 'For example: emailrl ask "When does the lease end?" --json')
    question = None if question is None else _checked(question)
    if not settings.store.db.is_file():
        raise no_database(settings.store.db)
    inbox = find_inbox(settings.store.db, inbox)
    model, base, name = _policy(settings, checkpoint, overrides["model_name"])
    say(f"Mailbox: {inbox}; model: {name}")
    note_adapters([model] if isinstance(model, Path) else [], settings, asks=True)
    _warn_if_empty(settings.store.db, inbox, date)
    session = _Session(_open(model, base, settings), inbox, date)
    with closing(session.agent):
        if question is None:
            _converse(session)
            return
        answer = session.ask(question, None if json else result_console())
    if json:
        print_json(_record(answer))


def _warn_if_empty(db: Path, inbox: str, date: str | None) -> None:
    """Print a note that the agent will see no email if its date is not after the first one."""
    from emailrl.mail.connection import first_day

    if date is not None and (first := first_day(db, inbox)) is not None and date <= first:
        say(f"Note: the mailbox begins on {first}; with --date {date} the agent sees no email.")


def _open(model: str | Path, base: str, settings: Settings) -> EmailAgent:

    if not settings.is_chat:
        say_loading(settings, base)
    from emailrl.agent.email_agent import EmailAgent

    return EmailAgent(model, config=settings)


class _Session:
    """A session of questions to one agent about one mailbox."""

    def __init__(self, agent: EmailAgent, inbox: str, date: str | None) -> None:
        self.agent, self.inbox, self.date = agent, inbox, date

    def ask(self, question: str, results: Console | None) -> Answer:
        """Answer one question: the answer goes to ``results``, if any, and each step to stderr as it ends."""
        console = progress_console()
        with Steps(console) as steps:
            answer = self.agent.answer(question, self.inbox, query_date=self.date, report=steps.show)
        if reason := why_not(answer, self.agent.settings.agent):
            console.print(reason, style="yellow", soft_wrap=True)
        if results is not None:
            results.print(render_answer(answer))
        return answer


def _converse(session: _Session) -> None:
    """Answer questions until there are no more; an error or Ctrl-C ends only the current question."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(INTERRUPTED))
    results = result_console()
    for number, question in enumerate(_questions()):
        try:
            if not sys.stdin.isatty():  # on a terminal it stands where it was typed
                results.print("\n" * (number > 0), end="")
                say(f"Question: {question}", results)
            session.ask(_checked(question), results)
        except KeyboardInterrupt:
            say("interrupted")
        except EmailRLError as error:
            say(f"error: {error}")


def _questions() -> Iterator[str]:
    """The non-blank lines of stdin; on a terminal with a prompt, line editing and this session's history."""
    if sys.stdin is None:  # closed by the caller
        return
    on_terminal = sys.stdin.isatty()
    if on_terminal:
        with suppress(ImportError):  # Python without it: input() works, without editing
            import readline  # noqa: F401
    sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
    while True:
        try:
            line = input(PROMPT if on_terminal else "")
        except EOFError:
            if on_terminal:
                print()
            return
        except KeyboardInterrupt:
            print()
            continue
        if line.strip():
            yield line


def _checked(question: str) -> str:
    """The question without surrounding whitespace; UsageError if it is empty or not valid text."""
    question = question.strip()
    if not question:
        raise UsageError("The question is empty.", 'For example: emailrl ask "When does the lease end?"')
    try:
        question.encode()
    except UnicodeEncodeError:
        raise UsageError("The question is not valid UTF-8.", "Check the terminal's encoding.") from None
    return question


def _policy(settings: Settings, checkpoint: str | None, model: str | None) -> tuple[str | Path, str, str]:
    """The model that answers, or its adapter's folder; the base model's name; and a display name."""
    from emailrl.checkpoints import checkpoint_of, find_runs
    from emailrl.model.adapter import find_adapter
    from emailrl.model.resolve import NANO
    from emailrl.model.smol_base import INSTALL, SMOL, is_at_hand
    from emailrl.questions.beside import has_only_demo_email

    if checkpoint is not None and model is not None:
        raise UsageError("--model and --checkpoint are mutually exclusive.", "Choose one.")
    if checkpoint is not None and settings.is_chat:
        raise UsageError("The openai engine cannot run a checkpoint.", "Name the server's model with --model.")
    configured = settings.model.name
    shown = _SMOL_SHOWN if configured == SMOL else configured
    if settings.is_chat:
        return configured, configured, configured
    if model is not None:
        return configured, configured, shown
    output_dir, is_demo = settings.output.output_dir, has_only_demo_email(settings.store.db)
    if checkpoint in (None, "best"):
        note_runs_without_best(output_dir)
    bests = [checkpoint_of(run, "best") for run in find_runs(output_dir, which="best")]
    fitting = [best for best in bests if is_demo or best.metadata.base_model != NANO]
    if checkpoint is not None or fitting:
        adapter = find_adapter(checkpoint or fitting[-1].path, output_dir)
        why = "" if checkpoint else " (the newest best checkpoint)"
        return adapter.path, adapter.base_model, f"{adapter.path} on {adapter.base_model}{why}"
    passed_over = f"; {bests[-1].path} is passed over, because {NANO} knows the demo mailbox only" if bests else ""
    if "name" in settings.model.model_fields_set:
        return configured, configured, f"{shown} (MODEL_NAME){passed_over}"
    if not is_demo and is_at_hand(SMOL, settings.model.smol_base):
        return SMOL, SMOL, f"{_SMOL_SHOWN}{passed_over or '; no run has a best checkpoint'}"
    return NANO, NANO, f"{NANO} (it knows the demo mailbox only; for other email: {INSTALL})"


def _record(answer: Answer) -> dict[str, object]:
    trajectory = answer.trajectory
    return {
        "answer": answer.answer,
        "sources": answer.sources,
        "turns": len(trajectory.turns),
        "seconds": trajectory.seconds,
        "stop_reason": answer.stop_reason,
        "inbox": trajectory.scenario.inbox_address,
        "date": trajectory.scenario.query_date,
    }
