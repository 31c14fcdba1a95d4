"""A small mailbox made in the test, and its database."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from emailrl.mail.build import build_database
from emailrl.mail.sources import RawEmail


def make_email(
    number: int,
    *,
    subject: str = "",
    body: str = "",
    sender: str = "ann@x.org",
    to: tuple[str, ...] = ("bob@x.org",),
    cc: tuple[str, ...] = (),
    bcc: tuple[str, ...] = (),
    day: str | None = "2001-05-01",
) -> RawEmail:
    date = None if day is None else datetime.fromisoformat(day).replace(tzinfo=UTC)
    head = (f"<{number}@x>", subject or f"Subject {number}", sender, list(to), list(cc), list(bcc), date)
    return RawEmail(*head, body or f"Body number {number}.", f"f/{number}.")


@pytest.fixture(scope="session")
def email() -> Callable[..., RawEmail]:
    """``email(number, subject=…, body=…, sender=…, to=…, cc=…, bcc=…, day=…)``."""
    return make_email


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """Six mails between ann, bob and cy, out of the order of their dates; number 6 has no date."""
    cy = ("cy@x.org",)
    emails = [
        make_email(3, subject="Budget", body="The gas budget is final.", day="2001-05-03"),
        make_email(1, subject="Budget draft", body="A draft of the gas budget.", day="2001-05-01"),
        make_email(2, subject="Lunch", body="Lunch at noon?", sender="bob@x.org", to=cy, day="2001-05-02"),
        make_email(4, subject="Budget", body="Copy of the gas budget.", to=cy, cc=("bob@x.org",), day="2001-05-04"),
        make_email(5, subject="Secret", body="A secret gas budget.", to=("dee@x.org",), bcc=cy, day="2001-05-05"),
        make_email(6, subject="Old", body="An undated gas budget.", day=None),
    ]
    return build_database(emails, tmp_path / "mail.db").db


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a test puts the file it reads."""
    return tmp_path / "mail.bin"
