"""Check the database, the questions and the accounts named in settings."""

from __future__ import annotations

import netrc
import os
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from emailrl.doctor.check import Check
from emailrl.questions.beside import has_enron_email, questions_file
from emailrl.questions.rows import HUB_QUESTIONS
from emailrl.settings import Settings
from emailrl.store.connection import how_to_get


def examine_data(settings: Settings) -> Iterable[Check]:
    """Open the mail database and count the questions."""
    database = _database(settings.store.db)
    yield database
    beside = questions_file(settings.store.db)
    questions = settings.data.questions or (beside if beside.is_file() else None)
    if questions is None and database.status == "ok" and has_enron_email(settings.store.db):
        yield Check("data", "questions", "ok", f"{HUB_QUESTIONS}, from the hub")
    elif questions is None:
        remedy = "Generate some (emailrl gen-questions), or name a file with --questions."
        yield Check("data", "questions", "note", f"none named, and none next to the database: {beside}", remedy)
    elif questions.is_file():
        with questions.open("rb") as file:
            lines = sum(1 for line in file if line.strip())
        yield Check("data", "questions", "ok", f"{questions}, {lines:,} questions")
    else:
        yield Check(
            "data", "questions", "missing", f"no such file: {questions}", "Generate some: emailrl gen-questions"
        )


def _database(db: Path) -> Check:
    if not db.is_file():
        return Check("data", "database", "missing", f"no such file: {db}", how_to_get(db))
    size = db.stat().st_size / 1024**2
    try:
        with closing(sqlite3.connect(f"{db.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            emails = connection.execute("SELECT count(*) FROM emails").fetchone()[0]
            connection.execute("SELECT rowid FROM emails_fts LIMIT 1").fetchall()
    except sqlite3.Error as error:
        return Check("data", "database", "broken", f"{db}: {error}", "Rebuild it: emailrl gen-db --overwrite")
    return Check("data", "database", "ok", f"{db}, {emails:,} emails, {size:,.1f} MiB")


def examine_accounts(settings: Settings) -> Iterable[Check]:
    """Whether W&B and the judge have the keys they need; no key is used or shown."""
    if settings.tracking.wandb_mode != "online":
        yield Check("accounts", "wandb", "ok", f"WANDB_MODE={settings.tracking.wandb_mode}")
    elif _logged_in_to_wandb():
        yield Check("accounts", "wandb", "ok", "logged in")
    else:
        remedy = "Log in (wandb login), or set WANDB_MODE=disabled."
        yield Check("accounts", "wandb", "note", "not logged in: runs are logged offline", remedy)
    if settings.rewards.openrouter_api_key:
        yield Check(
            "accounts", "OPENROUTER_API_KEY", "ok", f"set: answers are judged by {settings.rewards.judge_model}"
        )
    else:
        remedy = "Set it to have a language model judge answers (a key in .env counts once the folder is trusted)."
        yield Check("accounts", "OPENROUTER_API_KEY", "note", "not set: answers are matched offline", remedy)


def _logged_in_to_wandb() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].strip("/")
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
