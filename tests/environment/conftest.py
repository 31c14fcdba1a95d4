"""A real database of five mails, two of them of other people."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from mail_calls import INBOX

from emailrl.environment import MailEnvironment
from emailrl.mail import open_mailbox
from emailrl.mail.build import build_database
from emailrl.mail.sources import RawEmail
from emailrl.records.trajectory import Scenario


def mail(number: int, sender: str, to: list[str], day: int, subject: str, body: str) -> RawEmail:
    date = datetime(2002, 5, day, 9, 30, tzinfo=UTC)
    return RawEmail(f"<{number}@x>", subject, sender, to, ["cc@corvane.test"], [], date, body, f"{number}.")


@pytest.fixture(scope="session")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mail") / "mail.db"
    build_database(
        [
            mail(1, "otto@corvane.test", [INBOX], 2, "Pump order", "The pump order is due on May 20."),
            mail(
                2,
                INBOX,
                ["otto@corvane.test"],
                3,
                "Re: Pump order",
                "Thanks for the pump date.",
            ),
            mail(3, "otto@corvane.test", ["rita@corvane.test"], 4, "Pump secret", "The pump costs 900 dollars."),
            mail(4, "otto@corvane.test", [INBOX], 20, "Pump later", "The pump came."),
            mail(5, "rita@corvane.test", [INBOX], 6, "Lunch", "Noodles today."),
        ],
        path,
    )
    return path


@pytest.fixture
def scenario() -> Scenario:
    return Scenario("7", "When is the pump order due?", "May 20", ["<1@x>"], INBOX, "2002-05-10")


@pytest.fixture
def play(db: Path, scenario: Scenario) -> Iterator[Callable[..., MailEnvironment]]:
    """A started environment on the scenario, or on a changed one."""
    opened = []

    def start(max_turns: int = 10, **changes: object) -> MailEnvironment:
        for name, value in changes.items():
            setattr(scenario, name, value)
        mailbox = open_mailbox(db, scenario.inbox_address, until=scenario.query_date)
        opened.append(mailbox)
        environment = MailEnvironment(scenario, mailbox, max_turns=max_turns)
        environment.start()
        return environment

    yield start
    for mailbox in opened:
        mailbox.close()
