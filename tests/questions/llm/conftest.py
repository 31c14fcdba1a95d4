"""A database of six mailboxes, and servers that are closed after the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from questions.llm.chat_stub import Answer, ChatStub, good

from emailrl.mail.build import build_database
from emailrl.mail.sources import RawEmail
from emailrl.settings import GenerationSettings

PEOPLE = [f"{name}@x.org" for name in ("ana.roe", "bo.lind", "cy.marsh", "dee.orr", "eli.nov", "fay.trem")]
FILLING = "The crew checked the northern jetty and wrote down what they saw, as they do every week of the year. " * 2


@pytest.fixture(scope="session")
def mail_db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """240 mails, each between two of six people and with a code of its own; 80 to a mailbox."""
    mails = []
    for number in range(240):
        sender, receiver = PEOPLE[number % 6], PEOPLE[(number // 6 + number + 1) % 6]
        if sender == receiver:
            receiver = PEOPLE[(number + 1) % 6]
        body = f"{FILLING}\nThe code is K-{7000 + number}."
        date = datetime(2001, 1, 1, 8, tzinfo=UTC) + timedelta(hours=7 * number)
        mails.append(
            RawEmail(f"<m{number}@x>", f"survey {number}", sender, [receiver], [], [], date, body, f"{number}.")
        )
    path = tmp_path_factory.mktemp("llm") / "mail.db"
    build_database(mails, path)
    return path


@pytest.fixture
def serve() -> Iterator[Callable[..., ChatStub]]:
    """Starts a server that answers as told; by default it answers well."""

    def start(answer: Answer = good, **how: Any) -> ChatStub:
        return stubs.enter_context(closing(ChatStub(answer, **how)))

    with ExitStack() as stubs:
        yield start


@pytest.fixture
def generation(tmp_path: Path) -> Callable[..., GenerationSettings]:
    """Settings for a server, with a cache of the test's own and one prompt at a time."""

    def make(url: str, **changes: Any) -> GenerationSettings:
        values: dict[str, Any] = {
            "generator_base_url": url, "generator_model": "m", "generator_cache": tmp_path / "cache.sqlite",
            "generator_concurrency": 1,
        }  # fmt: skip
        return GenerationSettings(**values | changes)

    return make
