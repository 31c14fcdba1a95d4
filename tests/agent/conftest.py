"""A real database of five mails, two of them of other people; an engine that says what a script tells it to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from mail_calls import INBOX
from transformers import PreTrainedTokenizerFast

from emailrl.agent import MailEnvironment
from emailrl.engines.base import Advance, Completion, Request
from emailrl.engines.renderer import ChatRenderer
from emailrl.mail import open_mailbox
from emailrl.mail.build import build_database
from emailrl.mail.sources import RawEmail
from emailrl.records.trajectory import Scenario
from emailrl.settings import AgentSettings
from emailrl.sft.small_model import train_tokenizer


def mail(number: int, sender: str, to: list[str], day: int, subject: str, body: str) -> RawEmail:
    date = datetime(2002, 5, day, 9, 30, tzinfo=UTC)
    return RawEmail(f"<{number}@x>", subject, sender, to, ["cc@corvane.test"], [], date, body, f"{number}.")


@pytest.fixture(scope="session")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mail") / "mail.db"
    mails = [
        mail(1, "otto@corvane.test", [INBOX], 2, "Pump order", "The pump order is due on May 20."),
        mail(2, INBOX, ["otto@corvane.test"], 3, "Re: Pump order", "Thanks for the pump date."),
        mail(3, "otto@corvane.test", ["rita@corvane.test"], 4, "Pump secret", "The pump costs 900 dollars."),
        mail(4, "otto@corvane.test", [INBOX], 20, "Pump later", "The pump came."),
        mail(5, "rita@corvane.test", [INBOX], 6, "Lunch", "Noodles today."),
    ]
    build_database(mails, path)
    return path


@pytest.fixture
def scenario() -> Scenario:
    return Scenario("7", "When is the pump order due?", "May 20", ["<1@x>"], INBOX, "2002-05-10")


@pytest.fixture
def play(db: Path, scenario: Scenario) -> Iterator[Callable[..., MailEnvironment]]:
    """A started environment on the scenario, or on a changed one."""
    with ExitStack() as opened:

        def start(max_turns: int = 10, **changes: Any) -> MailEnvironment:
            mailbox = opened.enter_context(open_mailbox(db, scenario.inbox_address, until=scenario.query_date))
            environment = MailEnvironment(replace(scenario, **changes), mailbox, AgentSettings(max_turns=max_turns))
            environment.start()
            return environment

        yield start


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """The small policy's tokenizer recipe and chat template."""
    return train_tokenizer(["When is the pump order due? On May 20."])


@pytest.fixture
def renderer(tokenizer: PreTrainedTokenizerFast) -> ChatRenderer:
    return ChatRenderer(tokenizer)


@dataclass
class ScriptedEngine:
    """Answers each request with the next text of its trajectory's script, ids and log-probabilities included.

    Log-probabilities count down from -0.5 by 0.25, so that each position can be told from the others.
    """

    renderer: ChatRenderer
    scripts: Callable[[str], Sequence[str]]
    finish: str = "stop"
    version: str = "v1"
    requests: list[Request] = field(default_factory=list)

    def generate(self, requests: Sequence[Request], advance: Advance | None = None) -> list[Completion]:
        waiting, done, turns = list(requests), list[Completion](), Counter[str]()
        for request in waiting:
            self.requests.append(request)
            done.append(self.complete(request, self.scripts(request.trajectory_id)[turns[request.trajectory_id]]))
            turns[request.trajectory_id] += 1
            follow_up = advance(done[-1]) if advance else None
            waiting += [follow_up] if follow_up else []
        return done

    def complete(self, request: Request, text: str) -> Completion:
        ids = self.renderer.tokenize(text) + ([min(self.renderer.stop_ids)] if self.finish == "stop" else [])
        logprobs = [-0.5 - 0.25 * i for i in range(len(ids))]
        told = {"policy_version": self.version, "adapter_sha256": "ab12", "prompt_tokens": len(request.prompt_ids)}
        return Completion(request.trajectory_id, ids, logprobs, self.finish, **told)

    def close(self) -> None: ...


@pytest.fixture
def scripted(renderer: ChatRenderer) -> Callable[..., ScriptedEngine]:
    """``scripted(texts)``: an engine that says these texts in every trajectory; a function says them by its id."""

    def make(texts: Sequence[str] | Callable[[str], Sequence[str]], **changes: Any) -> ScriptedEngine:
        parts = {"renderer": renderer, "scripts": texts if callable(texts) else lambda _: texts}
        return ScriptedEngine(**parts | changes)

    return make
