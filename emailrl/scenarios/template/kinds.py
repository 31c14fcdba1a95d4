"""What a kind of question is: a name, its wordings, and a search for one provable answer in one mail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from random import Random

from emailrl.facts.mentions import Extractor
from emailrl.scenarios.inbox.mailbox import Inbox, Mail

THEIR_MAIL = (
    '{persons} mail about "{topic}"',
    'the mail "{topic}" from {person}',
    'the message {person} sent about "{topic}"',
    "{persons} message on {topic}",
)
"""How a mail of someone else's is called; ``{persons}`` is the possessive."""
MY_MAIL = ('my mail about "{topic}"', 'the mail "{topic}" that I sent', "the message I wrote on {topic}")
"""How a mail of the mailbox's owner is called."""


@dataclass(slots=True)
class Finding:
    """An answer that holds for one mail, proved against its mailbox before ``ask_day``."""

    answer: str
    ask_day: date
    slots: dict[str, str]
    """What fills the wordings' ``{names}``."""
    sources: list[Mail] = field(default_factory=list)
    """The mails that hold the answer, where it is not the one mail alone."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of question; ``find`` returns None where the mail does not carry exactly one answer."""

    name: str
    realism: float
    """How likely a person asks such a thing, 0 to 1, before the mail itself is looked at."""
    wordings: tuple[str, ...]
    find: Callable[[Inbox, Mail, Random], Finding | None]
    needs_all: bool = False
    """Whether the answer takes all of the sources; such a question is kept however many they are."""
    answerable: bool = True
    """False for a kind whose findings are proved to have no answer in the mailbox."""
    fact: Extractor | None = None
    """What finds the answer in the mail's text, where a fact of the text answers."""


def refer_to(box: Inbox, mail: Mail, rng: Random) -> str:
    """Words that mean one mail by its sender and topic, as its mailbox's owner would say them."""
    if mail.sender == box.me:
        return rng.choice(MY_MAIL).format(topic=mail.topic.text)
    person = box.people.called(mail.sender)
    return rng.choice(THEIR_MAIL).format(persons=possessive(person), person=person, topic=mail.topic.text)


def possessive(name: str) -> str:
    """``Lynn Blair's``, ``Chris Williams'``."""
    return f"{name}'" if name.endswith("s") else f"{name}'s"
