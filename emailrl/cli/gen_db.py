"""Build the searchable email database from a mailbox.

A path may be an email (.eml), a folder tree of emails (CMU's Enron release, Maildir), a tar / tar.gz / tar.xz of one,
an mbox, JSONL or Parquet with ART-E's columns, Kaggle's emails.csv, a folder of these (Thunderbird's mail folder), or a
saved dataset.
Every message is stored, or counted as skipped with a reason. Without --source, an existing database is kept. Without
--db, takeout.mbox becomes data/takeout.db, which later commands find if data/ holds no other database. The demo's
questions are written next to it.

Examples:

\b
  emailrl gen-db --source demo --db data/demo.db
  emailrl gen-db --source enron_mail_20150507.tar.gz --db data/enron_emails.db
  emailrl gen-db --source takeout.mbox.gz --db data/mine.db --verbose
  emailrl gen-db --source more_mail/ --append --json
  emailrl gen-db --source ~/Maildir --db data/mine.db --sync
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from emailrl.base.errors import UsageError
from emailrl.base.plain import counted, one_line
from emailrl.cli.inputs import SHARED, suggest_benchmark
from emailrl.cli.options import Json, Overrides, Overwrite, Trust, setting_options
from emailrl.cli.output import print_json, print_next, progress_console, result_console, say
from emailrl.settings import DEFAULT_DB, PlayingSettings, Settings, StoreSettings, load_settings

if TYPE_CHECKING:
    from rich.console import Console

    from emailrl.mail.build import BuildReport
    from emailrl.mail.build import Progress as Report
    from emailrl.mail.sources import Source

NO_MESSAGES = ("empty", "not_mail", "not_a_file")  # reasons of files without a message, such as indexes
NUM_SHOWN = 5  # number of inboxes in the summary


@setting_options("source db attachment_text")
def gen_db(
    *,
    overrides: Overrides,
    limit: Annotated[int | None, Option(min=1, help="Maximum number of emails to store.")] = None,
    append: Annotated[bool, Option("--append", help="Add emails missing from the database.")] = False,
    sync: Annotated[
        bool, Option("--sync", help="Build anew if the source has changed; say how many emails came and went.")
    ] = False,
    overwrite: Overwrite = False,
    allow_truncated: Annotated[
        bool, Option("--allow-truncated", help="Accept a truncated archive and keep its readable part.")
    ] = False,
    workers: Annotated[
        int | None, Option(min=0, help="Additional parser processes; 0: none. Default: one per core, up to 4.")
    ] = None,
    verbose: Annotated[
        bool, Option("--verbose", "-v", help="List every skipped or repaired message, with the reason, on stderr.")
    ] = False,
    trust: Trust = False,
    json: Json = False,
) -> None:
    from emailrl.mail.build import build_database
    from emailrl.mail.sources import open_source
    from emailrl.questions.load import questions_file, write_demo

    console = result_console(json=json)
    everything = load_settings(overrides, trust=trust, builds_db=True)
    if everything.store.source in ("hf", "demo"):
        everything = _with_db(everything, DEFAULT_DB, append=append or sync)
    settings = everything.store
    how: dict[str, Any] = {"overwrite": overwrite, "append": append, "limit": limit}
    if overrides["source"] is None and not (overwrite or append or sync) and settings.db.is_file():
        if overrides["db"] is None:
            _check_contents(settings)
        report = _existing(settings.db)
        say(f"{settings.db} already holds {counted(report.emails, 'email')}; --overwrite rebuilds it.", console)
    elif settings.source == "demo":
        if sync:
            raise UsageError("The demo mailbox never changes: there is nothing to sync.", "Leave out --sync.")
        report = write_demo(settings.db, settings=settings, seed=everything.training.seed, **how)
        _print_summary(report, settings, console)
        say(f"Questions: {questions_file(report.db)}", console)
    else:
        most = settings.max_message_bytes
        opened = open_source(settings.source, allow_truncated=allow_truncated, max_message_bytes=most)
        if settings.source != "hf":
            own = f"{Path(settings.source).expanduser().resolve().name.lstrip('.').partition('.')[0] or 'mail'}.db"
            db = DEFAULT_DB if opened.is_enron() else DEFAULT_DB.with_name(own)
            everything = _with_db(everything, db, append=append or sync)
            settings = everything.store
        with _progress_bar(opened) as (progress, above):

            def listed(what: str, reason: str, name: str) -> None:
                title = "no mail" if reason in NO_MESSAGES else f"{what} {reason}"
                above.print(one_line(f"{title}: {name or '(no name)'}"), soft_wrap=True)

            shown: dict[str, Any] = {"progress": progress, "listing": listed if verbose else None}
            existed = settings.db.is_file()
            report = build_database(opened, settings.db, settings=settings, workers=workers, sync=sync, **shown, **how)
        _print_summary(report, settings, console)
        if overwrite and (questions := questions_file(report.db)).is_file():
            say(f"Note: {questions} belongs to the replaced database. Remove it, or gen-questions --overwrite.")
        if sync and existed:
            console.print(f"Since the last build: {report.added:,} added, {report.removed:,} removed")
        if existed and (append or sync) and report.added + report.removed:
            say(
                "The database has changed: runs started on it cannot resume, and answers to old questions about the "
                "first, the last or the number of emails may be wrong. Generate new ones with gen-questions."
            )
    _print_next(everything, report.db, console)
    if json:
        print_json(report)


def _with_db(settings: Settings, db: Path, *, append: bool) -> Settings:
    """The settings with ``db`` as the database, unless one is named, or only another exists to append to."""
    store = settings.store
    if "db" in store.model_fields_set or (append and store.db.is_file() and not db.is_file()):
        return settings
    return settings.model_copy(update={"store": store.model_copy(update={"db": db})})


def _check_contents(settings: StoreSettings) -> None:
    """Raise UsageError if the existing database does not hold the email of the configured source, hf or demo."""
    from emailrl.questions.load import has_enron_email, has_only_demo_email

    is_of_source = {"hf": has_enron_email, "demo": has_only_demo_email}.get(str(settings.source), lambda _: True)
    if not is_of_source(settings.db):
        named = "the Enron emails of the Hub" if settings.source == "hf" else "the demo mailbox"
        problem = f"{settings.db} exists and holds other email than {named} (source = {settings.source})."
        raise UsageError(problem, "Name another file with --db, or replace this one with --overwrite.")


def _existing(db: Path) -> BuildReport:
    """The contents of an existing database, as the report of a build that took no time."""
    from sqlalchemy import func, select

    from emailrl.mail.build import BuildReport
    from emailrl.mail.database import emails, opened, recipients

    with opened(db) as connection:
        stored, sent = (connection.scalar(select(func.count()).select_from(each)) or 0 for each in (emails, recipients))
    return BuildReport(stored, sent, {}, 0.0, db.resolve(), {})


@contextmanager
def _progress_bar(source: Source) -> Iterator[tuple[Report, Console]]:
    """A progress bar on stderr for reading, then indexing; and the console for printing above it."""
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TimeRemainingColumn

    columns = ("{task.description}", BarColumn(), TaskProgressColumn(), "{task.fields[told]}", TimeRemainingColumn())
    # No refresh thread: parser processes are forked while the bar is shown.
    bar = Progress(*columns, console=progress_console(), auto_refresh=False)
    tasks: dict[str, TaskID] = {}

    def show(phase: str, messages: int, total: int | None) -> None:
        if phase not in tasks:
            tasks[phase] = bar.add_task(phase, total=None, told="")
            bar.start()  # not before the first message, so that a bad argument prints only its error
        fraction = source.fraction() if total is None else messages / max(total, 1)
        length, told = None if fraction is None else 1.0, f"{messages:,}"  # files without mail, too
        bar.update(tasks[phase], total=length, completed=fraction or 0.0, told=told, refresh=True)

    try:
        yield show, bar.console
    finally:
        if tasks:
            bar.stop()


def _print_summary(report: BuildReport, settings: StoreSettings, console: Console) -> None:
    from emailrl.mail.sieve import KEPT_BY

    others = sum(report.skipped.get(reason, 0) for reason in NO_MESSAGES)
    skipped = sum(report.skipped.values()) - others
    rate = (report.emails + skipped) / max(report.seconds, 1e-9)
    not_mail = f"; {counted(others, 'other file')} without mail" if others else ""
    console.print(
        f"{counted(report.emails, 'email')} stored in {report.db}, {skipped:,} skipped{not_mail}; "
        f"{report.seconds:.1f} s, {rate:,.0f} messages/s",
        soft_wrap=True,
    )
    if report.attachments:
        texts = ", and texts that can be read," if settings.attachment_text else ""
        console.print(f"{counted(report.attachments, 'attached file')}: names{texts} stored")
    for title, counts in (("skipped", report.skipped), ("repaired", report.repaired)):
        for kind, number in sorted(counts.items(), key=lambda item: -item[1]):
            kept_by = f" ({KEPT_BY[kind]} keeps them)" if title == "skipped" and kind in KEPT_BY else ""
            name = "no mail" if kind in NO_MESSAGES else title
            console.print(f"  {name} {number:>9,}  {kind}{kept_by}", soft_wrap=True)


def _print_next(settings: PlayingSettings, db: Path, console: Console) -> None:
    """List the database's mailboxes, largest first, and the next command."""
    from emailrl.mail.database import opened
    from emailrl.questions.inbox import MIN_MAILS, MailReader, largest_owners, listed
    from emailrl.questions.load import questions_file
    from emailrl.questions.splits import FEW

    with opened(db) as connection:
        owners = largest_owners(MailReader(connection), NUM_SHOWN + 1, least=MIN_MAILS // 4, received=1 / 3)
    if owners:
        say(f"Inboxes: {listed(owners[:NUM_SHOWN])}{', …' if len(owners) > NUM_SHOWN else ''}", console)
        print_next(["ask", "--db", str(settings.store.db), "--inbox", owners[0].address])
    named = settings.store.db
    if (questions := questions_file(named)).is_file():
        suggest_benchmark(settings, questions)
        return
    # Questions are only about the first mailbox if others hold only mail exchanged with it, as in one person's archive,
    # or if the archive is too small for gen-questions to choose by itself.
    sizes = [owner.mails for owner in owners] or [0]
    is_named = owners and (sizes[0] < MIN_MAILS or sizes[0] >= 2 * max(sizes[1:], default=0))
    inbox = ["--inbox", owners[0].address] if is_named else []
    shared = [SHARED] if inbox or len(owners) < len(FEW) else []
    print_next(["gen-questions", "--db", str(named), *inbox, *shared])
