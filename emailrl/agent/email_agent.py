"""The agent as a library: answers one question at a time from a mailbox, with the rollout loop of training.

agent = emailrl.EmailAgent("nano", config={"db": "mail.db"})
print(agent.answer("When does the lease end?", inbox="ann@example.com"))
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from emailrl.base.errors import EmailRLError, ToolError, UsageError
from emailrl.base.http import Bill
from emailrl.facts.support import unstated
from emailrl.records.trajectory import Message, Scenario, StopReason, Trajectory
from emailrl.settings import PlayingSettings, load_settings

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from emailrl.agent import StepResult
    from emailrl.engines import PolicyEngine
    from emailrl.mail import Email
    from emailrl.model.policy import Policy


GO_ON = "Ask again in a new session, or with a higher limit."


@dataclass(frozen=True, slots=True)
class Answer:
    """The agent's answer; ``trajectory`` holds every turn and token."""

    answer: str | None
    """None without an answer: it ran out of turns, or made an invalid tool call (see ``stop_reason``)."""
    sources: list[str]  # Ids of the cited emails
    emails: list[Email]  # The cited emails that exist in the mailbox
    stop_reason: StopReason | None
    trajectory: Trajectory
    newer: dict[str, list[str]]  # Ids of the later emails of its thread, oldest first, by the id of each cited email

    @property
    def unsupported(self) -> list[str]:
        """The numbers, dates, codes and names that the answer states, and neither the question nor a cited email."""
        if self.answer is None or self.trajectory.rubric["returned_i_dont_know"]:
            return []
        return unstated(self.answer, "\n".join([self.trajectory.scenario.question, *map(_text_of, self.emails)]))

    def __str__(self) -> str:
        return self.answer if self.answer is not None else f"no answer ({self.stop_reason})"


def _text_of(email: Email) -> str:
    """All that an email says: subject, body, date, people and attachments."""
    people = email.from_address, *email.to_addresses, *email.cc_addresses, *email.bcc_addresses
    return "\n".join([email.subject, email.body, email.date or "", *map(email.named, people), *email.attachments])


class EmailAgent:
    """Answers questions from mailboxes with one policy. ``model`` is a causal language model, bare or with a PEFT
    adapter, which then needs its ``tokenizer``; or a name: ``nano``, a folder, a hub name, or the folder of an adapter,
    which is loaded on its base model; with the engine ``openai``, the name of a model on the chat server. ``config`` is
    a ``Settings``, or a mapping of setting names (``db``, ``max_turns``, ``eval_temperature``) that override the
    environment and ``emailrl.toml``. Decoding is that of evaluation. The weights are read once, here: later changes
    have no effect. Import emailrl before torch, which reads ``OMP_WAIT_POLICY`` as it loads: on a busy CPU, answers are
    then several times as fast. It ``remembers`` a conversation unless the model is ``nano``, ``smol`` or trained from
    one of them, merged or not: these learned single questions, and repeat an earlier answer that they are shown."""

    def __init__(
        self,
        model: nn.Module | str | Path,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: PlayingSettings | Mapping[str, Any] | None = None,
    ) -> None:
        from emailrl.agent import tool_schemas
        from emailrl.checkpoints import METADATA, read_checkpoint
        from emailrl.engines import Engine
        from emailrl.engines.openai import OpenAIEngine
        from emailrl.engines.renderer import ChatRenderer
        from emailrl.model.resolve import PACKAGED

        settings = config if isinstance(config, PlayingSettings) else load_settings(config)
        self.name = str(model) if isinstance(model, str | Path) else settings.model.name
        self._renderer: ChatRenderer | None = None
        self.remembers = True
        if settings.is_chat:
            if not isinstance(model, str) or (Path(model) / "adapter_config.json").is_file():
                raise UsageError("The openai engine cannot play a checkpoint.", "Name the server's model with --model.")
            self.settings = settings.with_model(model)
            self._engine: Engine = OpenAIEngine(
                self.settings, tool_schemas(settings.agent), Bill(settings.rewards.max_cost, GO_ON)
            )
            return
        self.settings, policy, self._engine = _opened(model, tokenizer, settings)
        named = Path(self.settings.model.name)  # merged weights record the base that they were trained from
        base = read_checkpoint(named).metadata.base_model if (named / METADATA).is_file() else str(named)
        self.remembers = not isinstance(model, str | Path) or base not in PACKAGED
        self._renderer = ChatRenderer(
            policy.tokenizer, tool_schemas(self.settings.agent), self.settings.model.tool_dialect
        )

    def answer(
        self,
        question: str,
        inbox: str,
        *,
        query_date: str | None = None,
        earlier: Sequence[tuple[str, str]] = (),
        seed: int = 0,
        report: Callable[[StepResult], None] = lambda result: None,
    ) -> Answer:
        """Search ``inbox`` for the answer to ``question``. ``query_date`` (``YYYY-MM-DD``, UTC) is the agent's current
        date, and hides email of that day and later; without it the agent sees all email, and its date is today, or that
        of the newest email if the database ends before. ``earlier`` questions of the conversation and their answers
        stand before the question, if the policy ``remembers``. ``report`` is called after each step.
        Raises UsageError for an inbox that no email in the database names, EmailRLError for a missing database or a
        failed rollout."""
        from emailrl.agent.play import run
        from emailrl.agent.task import MailEnvironment, agent_mailbox
        from emailrl.engines import SamplingParams
        from emailrl.mail.database import last_day, opened
        from emailrl.questions.inbox import MailReader, unknown_inbox

        agent, db, today = self.settings.agent, self.settings.store.db, datetime.now(UTC).date().isoformat()
        date = query_date or min(today, last_day(db) or today)
        scenario = Scenario("question", question, "", [], inbox.lower(), date)
        sampling = SamplingParams.of(agent, agent.eval_temperature)
        with agent_mailbox(agent, db, inbox, query_date) as mailbox:
            if not mailbox.known:
                with opened(db) as connection:
                    raise unknown_inbox(MailReader(connection), inbox)
            told = [(Message("user", asked), Message("assistant", said)) for asked, said in earlier if self.remembers]
            environment = MailEnvironment(scenario, mailbox, agent, report=report, earlier=[*chain.from_iterable(told)])
            [trajectory] = run([environment], self._engine, self._renderer, sampling, seeds=[seed])
            if trajectory.exception is not None:
                raise EmailRLError(f"The rollout failed: {trajectory.exception}")
            cited: dict[str, Email | None] = {}
            for message_id in trajectory.final_sources:
                email = None
                with suppress(ToolError):  # a model may cite what is no id
                    email = mailbox.read(message_id)
                cited[email.message_id if email else message_id] = email
            emails = [*filter(None, cited.values())]
            threads = {email.message_id: mailbox.thread(email) for email in emails}
        newer = {own: thread[thread.index(own) + 1 :] for own, thread in threads.items()}
        return Answer(trajectory.final_answer, [*cited], emails, trajectory.stop_reason, trajectory, newer)

    def close(self) -> None:
        self._engine.close()


def _opened(
    model: nn.Module | str | Path, tokenizer: PreTrainedTokenizerBase | None, settings: PlayingSettings
) -> tuple[PlayingSettings, Policy, PolicyEngine]:
    """A model by name, an adapter's folder on its base model, or a model as given, including its active adapter."""
    from emailrl.checkpoints import CONFIG
    from emailrl.engines import build_engine, open_policy
    from emailrl.model.policy import Policy
    from emailrl.model.resolve import find_adapter, with_own_settings, with_token_limit
    from emailrl.model.template import with_arguments

    if isinstance(model, str | Path):
        if not (Path(model) / CONFIG).is_file():
            return open_policy(with_own_settings(settings.with_model(str(model)), str(model))[0])
        found = find_adapter(Path(model), Path())
        settings, _ = with_own_settings(settings.with_model(found.base_model), found.path)
        return open_policy(settings, found.path)
    if tokenizer is None:
        raise UsageError("EmailAgent needs the model's tokenizer.", "Pass one, or give the model by name.")
    from peft import PeftModel

    changes: dict[str, Any] = {"agent": with_token_limit(settings.agent, model)}
    if "unsloth" in sys.modules:  # its forward only takes its own cache: engines sample from a twin of its model
        changes["model"] = settings.model.model_copy(update={"backend": "unsloth"})
    settings = settings.model_copy(update=changes)
    parameter, name = next(model.parameters()), str(getattr(model, "name_or_path", ""))
    told = with_arguments(tokenizer, settings.model)
    policy = Policy(model, told, name, name, parameter.device, parameter.dtype)
    engine = build_engine(settings, policy)
    if isinstance(model, PeftModel):
        # Engines load adapters only from folders, so that the hash on every trajectory is a file's.
        adapter = model.active_adapter
        with TemporaryDirectory() as folder:
            model.save_pretrained(folder, selected_adapters=[adapter], save_embedding_layers=False)
            engine.load_adapter(Path(folder) / (adapter if adapter != "default" else ""), adapter)
    return settings, policy, engine
