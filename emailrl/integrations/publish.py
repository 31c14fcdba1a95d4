"""Writes the task as a small package for the environment hubs of others: their interface around ``mail_search``, with
mailbox, questions and settings as data. The demo mailbox makes a public environment with exact answers."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, Final, Literal

from sqlalchemy import func, select

import emailrl
from emailrl.agent.task import MAIL
from emailrl.base.disk import new_folder
from emailrl.base.errors import UsageError
from emailrl.integrations.mail_search import DB, scenarios
from emailrl.mail.database import emails, opened
from emailrl.measure.export import template_in
from emailrl.questions import load
from emailrl.settings import Settings
from emailrl.settings.names import by_name

Kind = Literal["verifiers", "openenv"]
TEMPLATES: Final = Path(__file__).with_name("published")
EXACT: Final = ("art_e", "simple")
"""Rewards that need neither a judge nor code of the folder."""
_SECTIONS: Final = ("agent", "reward_weights")


def publish(kind: Kind, out: Path, settings: Settings, db: Path | None) -> dict[str, Any]:
    """Write the package into the new folder ``out``, on the mailbox ``db`` and its questions, or on the demo; returns
    what its card says. UsageError for an ``out`` with files, and for a task or reward that is not emailrl's own."""
    if settings.agent.environment != MAIL or settings.rewards.reward not in EXACT:
        what = "A published environment has the environment mail and the reward art_e or simple."
        raise UsageError(what, "Set EMAILRL_ENVIRONMENT and EMAILRL_REWARD.")
    with new_folder(out) as folder:
        data = folder / "mail_search/data"
        data.mkdir(parents=True)
        if db is None:
            load.write_demo(data / DB, settings=settings.store, seed=settings.training.seed)
        else:
            shutil.copyfile(db, data / DB)
            questions = load.read_questions(None, load.with_questions(settings.data, db)[0]).answered()
            load.write_scenarios(load.questions_file(data / DB), questions.scenarios)
        (data / "emailrl.toml").write_text(_toml(settings), "utf-8")
        told = _card(kind, data) | {"max_turns": settings.agent.max_turns, "reward": settings.rewards.reward}
        for template in sorted((TEMPLATES / kind).rglob("*.jinja")):
            _render(template, folder / template.relative_to(TEMPLATES / kind).with_suffix(""), told)
        _render(TEMPLATES / "README.md.jinja", folder / "README.md", told)
    return told


def _card(kind: Kind, data: Path) -> dict[str, Any]:
    with opened(data / DB) as connection:
        num_emails = connection.scalar(select(func.count()).select_from(emails))
    found = scenarios(None, folder=data)
    return {
        "kind": kind,
        "version": emailrl.__version__,
        "is_demo": load.has_only_demo_email(data / DB),
        "num_emails": num_emails,
        "num_questions": len(found),
        "splits": dict(Counter(scenario.split or "test" for scenario in found)),
        "shares_inbox": any(scenario.shares_inbox for scenario in found),
    }


def _toml(settings: Settings) -> str:
    """The settings of task and reward that are not the default, as emailrl.toml."""
    values: dict[str, Any] = {"reward": settings.rewards.reward}
    for leaf in by_name().values():
        value = leaf.of(settings) if leaf.section in _SECTIONS else leaf.default
        if value != leaf.default and value is not None:
            values[leaf.key] = value
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())


def _render(template: Path, target: Path, told: dict[str, Any]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(template_in(template).render(told), "utf-8")
