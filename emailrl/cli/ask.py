"""Ask a mailbox a question; the agent searches, reads, answers and cites its source emails.

Without a question, questions are read from the terminal or from stdin, one per line: Ctrl-C ends the current
question, Ctrl-D the session. Steps are shown on stderr, the answer on stdout. --json needs a question. If a question
got no answer, the exit code is 1; "I don't know" is one.

Without --checkpoint or --model, the newest best checkpoint of OUTPUT_DIR answers, but one of nano only in the demo
mailbox, the only mail that nano knows; otherwise MODEL_NAME if it is set; otherwise smol if it or its base model is on
this machine and the mailbox is not the demo's; otherwise nano. --inbox may be left out if the database holds a single
mailbox. Emails stay on this machine unless the model runs on a server, which is then named.

Examples:

\b
  emailrl ask "When does the lease end?" --db data/mail.db
  emailrl ask "Who sent the March invoice?" --inbox ann@example.com
  emailrl ask --continue "And the one for April?" --inbox ann@example.com
  emailrl ask --db data/mail.db
  emailrl ask "Where is lunch?" --engine openai --model openai/gpt-4.1
"""

from __future__ import annotations

import json as jsonlib
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext, suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text
from typer import Argument, Exit, Option

from emailrl.agent import StepResult
from emailrl.agent.email_agent import Answer, EmailAgent
from emailrl.base.disk import check_own, replace_bytes
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.http import CostReached
from emailrl.base.plain import counted, cut, one_line
from emailrl.base.process import INTERRUPTED
from emailrl.cli.inputs import note_policies, note_runs_without_best
from emailrl.cli.options import Checkpoint, Inbox, Json, Overrides, Trust, setting_options
from emailrl.cli.output import LONGEST_ID, print_json, progress_console, result_console, say, say_loading, warn
from emailrl.records.trajectory import StopReason
from emailrl.settings import Settings, load_settings

PROMPT: Final = "ask> "
CONVERSATION: Final = "ask.json"  # beside OUTPUT_DIR
MAX_TURNS: Final = 20  # of a conversation that are kept
I_DONT_KNOW: Final = "I don't know."
NUM_HITS: Final = 3  # search hits shown per search
_SMOL_SHOWN: Final = "smol (right on half of free questions; its limits: docs/evidence/smol.md)"
_FILTERS: Final = {"from_addr": "from", "to_addr": "to", "sent_after": "since", "sent_before": "before"}
_WHY: Final = {
    StopReason.RAN_OUT_OF_TURNS: "The model gave no answer within {turns} turns. Ask more exactly, or raise MAX_TURNS.",
    StopReason.CANT_PARSE_TOOL_CALL: "The model wrote a tool call that cannot be parsed.",
    StopReason.BAD_TOOL_CALL_NAME: "The model called a tool that does not exist.",
    StopReason.BAD_TOOL_CALL_ARGS: "The model's tool call was missing or had invalid arguments.",
    StopReason.TRUNCATED: "The model's turn reached the token limit (MAX_TOKENS) or the context window.",
}


@setting_options("model_name engine thinking chat_template_kwargs db max_cost")
def ask(
    *,
    words: Annotated[
        list[str] | None,
        Argument(metavar="question", help="The question, quoted or not. Default: read questions from stdin."),
    ] = None,
    inbox: Inbox = None,
    date: Annotated[
        datetime | None,
        Option(
            "--date",
            formats=["%Y-%m-%d"],
            metavar="YYYY-MM-DD",
            help="The agent's today; it sees only earlier emails. Default: all emails, and today's date or that of the "
            "newest email, whichever is earlier.",
        ),
    ] = None,
    continues: Annotated[
        bool, Option("--continue", help="Go on with the last conversation: its questions and answers are remembered.")
    ] = False,
    checkpoint: Checkpoint = None,
    overrides: Overrides,
    trust: Trust = False,
    json: Json = False,
) -> None:
    from emailrl.mail.database import first_day
    from emailrl.questions.inbox import find_inbox

    settings = load_settings(overrides, trust=trust)
    if words is None and json:
        raise UsageError("--json needs a question.", 'For example: emailrl ask "When does the lease end?" --json')
    question = None if words is None else _checked(" ".join(words))
    inbox = find_inbox(settings.store.db, inbox)
    day = None if date is None else date.date().isoformat()
    if day is not None and (first := first_day(settings.store.db, inbox)) is not None and day <= first:
        say(f"Note: the mailbox begins on {first}; with --date {day} the agent sees no email.")
    place = settings.output.output_dir.parent / CONVERSATION
    conversation = _Conversation(place, inbox, continues)
    with closing(open_agent(settings, inbox, checkpoint, overrides["model_name"], continues)) as agent:
        if question is None:
            raise Exit(_converse(agent, conversation, day))
        answer = _ask(agent, conversation, day, question, None if json else result_console())
    if json:
        scenario = answer.trajectory.scenario
        facts = {"stop_reason": answer.stop_reason, "inbox": scenario.inbox_address, "date": scenario.query_date}
        spent = {"turns": len(answer.trajectory.turns), "seconds": answer.trajectory.seconds, "model": agent.name}
        doubts = {"not_in_sources": answer.unsupported, "newer_in_thread": answer.newer}
        print_json({"answer": answer.answer, "sources": answer.sources} | doubts | _looked_at(answer) | spent | facts)
    if answer.answer is None:
        raise Exit(1)


class _Conversation:
    """Questions and answers about one mailbox, kept in a file that only this user can read. Without ``continues`` each
    question stands alone. UsageError if there is no conversation to go on with."""

    def __init__(self, place: Path, inbox: str, continues: bool) -> None:
        self._place, self.inbox, self._continues = place, inbox, continues
        self.earlier: list[tuple[str, str]] = []
        check_own(place, "OUTPUT_DIR")
        if not continues:
            return
        try:
            kept = jsonlib.loads(place.read_bytes())
            self.earlier = [(str(question), str(answer)) for question, answer in kept["turns"]]
        except (OSError, ValueError, TypeError, KeyError):
            raise UsageError(f"{place} holds no conversation to go on with.", "Ask without --continue first.") from None
        if kept.get("inbox") != inbox:
            raise UsageError("The last conversation was about another mailbox.", "Ask without --continue first.")

    def add(self, question: str, answer: str) -> None:
        turns = [*self.earlier, (question, answer)][-MAX_TURNS:]
        self.earlier = turns if self._continues else []
        self._place.parent.mkdir(parents=True, exist_ok=True)
        replace_bytes(self._place, jsonlib.dumps({"inbox": self.inbox, "turns": turns}).encode(), mode=0o600)


def _ask(
    agent: EmailAgent, conversation: _Conversation, date: str | None, question: str, results: Console | None
) -> Answer:
    """Answer one question: the answer goes to ``results``, if any, and each step to stderr as it ends."""
    console, looked = progress_console(), list[Text]()

    def show(step: StepResult) -> None:
        lines = list(_lines(step))
        for line in lines:
            console.print(line, no_wrap=True, overflow="ellipsis" if console.is_terminal else "ignore", crop=False)
        looked.extend(lines[:1])

    with console.status("thinking") if console.is_terminal else nullcontext():
        answer = agent.answer(question, conversation.inbox, query_date=date, earlier=conversation.earlier, report=show)
    conversation.add(question, answer.answer or I_DONT_KNOW)
    if answer.answer is None and (reason := answer.stop_reason) is not None:
        warn(_WHY.get(reason, f"No answer ({reason}).").format(turns=agent.settings.agent.max_turns))
    if results is not None:
        results.print(render_answer(answer, [] if results.is_terminal else looked))
    return answer


def _looked_at(answer: Answer) -> dict[str, list[Any]]:
    """The searches, each with its number of hits, and the ids of the emails read."""
    searches, read = list[dict[str, Any]](), dict[str, None]()
    for turn in answer.trajectory.turns:
        found = jsonlib.loads(turn.tool_result or "[]")
        if turn.tool_name == "search_emails" and isinstance(found, list):
            searches.append((turn.tool_args or {}) | {"hits": len(found)})
        elif "error" not in found:
            read |= dict.fromkeys(email["message_id"] for email in (found if isinstance(found, list) else [found]))
    return {"searches": searches, "read": list(read)}


def _converse(agent: EmailAgent, conversation: _Conversation, date: str | None) -> int:
    """Answer questions until there are no more; an error or Ctrl-C ends only the current question. Returns the exit
    code: 1 if one got no answer, unless they were typed on a terminal."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(INTERRUPTED))
    results, is_answered = result_console(), True
    for number, question in enumerate(_questions()):
        answer = None
        try:
            if not sys.stdin.isatty():  # on a terminal it stands where it was typed
                results.print("\n" * (number > 0), end="")
                say(f"Question: {question}", results)
            answer = _ask(agent, conversation, date, _checked(question), results).answer
        except KeyboardInterrupt:
            say("interrupted")
        except CostReached:
            raise
        except EmailRLError as error:
            say(f"error: {error}")
        is_answered &= answer is not None
    return int(not (is_answered or sys.stdin.isatty()))


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
            print("\n" * on_terminal, end="")
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
    if question != question.encode(errors="replace").decode():
        raise UsageError("The question is not valid UTF-8.", "Check the terminal's encoding.")
    return question


def choose_policy(settings: Settings, checkpoint: str | None, model: str | None) -> tuple[str | Path, str, str]:
    """The model that answers, or its adapter's folder; the base model's name; and a display name."""
    from emailrl.checkpoints import checkpoint_of, find_runs
    from emailrl.model.resolve import NANO, SMOL, find_adapter, how_to_install, is_at_hand
    from emailrl.questions.load import has_only_demo_email

    if checkpoint is not None and model is not None:
        raise UsageError("--model and --checkpoint are mutually exclusive.", "Choose one.")
    if checkpoint is not None and settings.is_chat:
        raise UsageError("The openai engine cannot run a checkpoint.", "Name the server's model with --model.")
    configured, output_dir = settings.model.name, settings.output.output_dir
    shown = _SMOL_SHOWN if configured == SMOL and not settings.is_chat else configured
    if settings.is_chat or model is not None:
        return configured, configured, shown
    is_demo = has_only_demo_email(settings.store.db)
    if checkpoint in (None, "best"):
        note_runs_without_best(output_dir)
    bests = [checkpoint_of(run, "best") for run in find_runs(output_dir, which="best")]
    fitting = [best for best in bests if is_demo or best.metadata.base_model != NANO]
    if checkpoint is not None or fitting:
        adapter = find_adapter(checkpoint or fitting[-1].path, output_dir)
        why = "" if checkpoint else " (the newest best checkpoint of OUTPUT_DIR)"
        return adapter.path, adapter.base_model, f"{adapter.path} on {adapter.base_model}{why}"
    passed_over = f"; {bests[-1].path} is passed over, because {NANO} knows the demo mailbox only" if bests else ""
    if "name" in settings.model.model_fields_set:
        return configured, configured, f"{shown} (MODEL_NAME){passed_over}"
    if not is_demo and is_at_hand(SMOL, settings.model.smol_base):
        return SMOL, SMOL, f"{_SMOL_SHOWN}{passed_over or '; no run has a best checkpoint'}"
    return NANO, NANO, f"{NANO} (it knows the demo mailbox only; for other email: {how_to_install()})"


def open_agent(
    settings: Settings, inbox: str, checkpoint: str | None, model: str | None, continues: bool = False
) -> EmailAgent:
    """The agent that ``ask`` would choose; prints the choice, and if it ``continues``, whether it remembers."""
    chosen, base, name = choose_policy(settings, checkpoint, model)
    say(f"Mailbox: {inbox}; model: {name}")
    note_policies([chosen], settings, asks=True)
    say_loading(settings, base)
    agent = EmailAgent(chosen, config=settings)
    if continues and not agent.remembers:
        say(f"Note: {base} learned single questions: it is not shown earlier ones of the conversation.")
    return agent


def render_answer(answer: Answer, looked: Sequence[Text] = ()) -> RenderableType:
    """Lay out the answer, what speaks against it, and its source emails: subject, sender, date and the passage that
    bears it. "I don't know" is followed by the lines of what was ``looked`` at."""
    from emailrl.facts.support import passage
    from emailrl.facts.words import is_i_dont_know

    if answer.answer is None or is_i_dont_know(answer.answer):
        return Group(Text(I_DONT_KNOW), *looked)
    parts: list[RenderableType] = [Text(answer.answer.strip(), style="bold")]
    held = {email.message_id: email for email in answer.emails}
    if held and (lacking := answer.unsupported):
        parts.append(Text(f"Not in the cited email: {one_line(', '.join(lacking))}", style="yellow"))
    for message_id in answer.sources:
        if (email := held.get(message_id)) is None:
            gone = f"Source {cut(one_line(message_id), LONGEST_ID)}: not in this mailbox."
            parts += [Text(), Text(gone, style="yellow")]
            continue
        sender = f"{one_line(email.named(email.from_address))}, {(email.date or 'no date')[:10]}"
        subject = f"Source: {one_line(email.subject) or '(no subject)'}"
        parts += [Text(), Text(subject, style="bold cyan"), Text(sender, style="cyan")]
        quoted = passage(answer.answer, answer.trajectory.scenario.question, email.body)
        parts += [Padding(Text(f"> {one_line(line)}"), (0, 0, 0, 2), expand=False) for line in quoted]
        if later := answer.newer[message_id]:
            parts.append(Text(f"{counted(len(later), 'newer email')} in this thread", style="yellow"))
    return Group(*parts, *([] if answer.sources else [Text("No source cited.", style="yellow")]))


def _lines(step: StepResult) -> Iterator[Text]:
    def line(name: str, text: str, style: str) -> Text:
        return Text.assemble((f"{name:<8}", "cyan"), (one_line(text), style))

    told = step.messages[0].content if step.messages else step.tool_result  # as shown, a hit may have date and sender
    result: Any = None if told is None else jsonlib.loads(told)
    arguments = step.tool_args or {}
    if isinstance(result, dict) and "error" in result:
        yield line("refused" if step.done else "failed", f"{step.tool_name or 'turn'}: {result['error']}", "yellow")
    elif step.tool_name == "search_emails":
        hits = result["emails"] if isinstance(result, dict) else result
        words = [jsonlib.dumps(word, ensure_ascii=False) for word in arguments["keywords"]]
        words += [f"{word} {arguments[name]}" for name, word in _FILTERS.items() if arguments.get(name)]
        yield line("search", f"{' '.join(words)}: {counted(len(hits), 'hit')}", "bold")
        for hit in hits[:NUM_HITS]:
            known = hit.get("date"), hit.get("from"), re.sub("</?b>", "", hit["snippet"])
            yield line("", " ".join(filter(None, known)), "dim")
        if (others := len(hits) - NUM_HITS) > 0:
            yield line("", f"… and {others} more", "dim")
    elif step.tool_name in ("read_email", "read_thread") and isinstance(result, list | dict):
        for each in result if isinstance(result, list) else [result]:
            yield line("read", f"{(each['date'] or 'no date')[:10]} {each['subject']}, {each['from_address']}", "bold")
