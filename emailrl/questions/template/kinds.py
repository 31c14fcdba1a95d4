"""Defines a kind of question: its name, its wordings, and a search for one provable answer in an email."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from random import Random

from emailrl.facts.mentions import Extractor
from emailrl.questions.inbox.mailbox import Inbox, Mail

THEIR_MAIL = (
    '{persons} mail about "{topic}"',
    'the mail "{topic}" from {person}',
    'the message {person} sent about "{topic}"',
    "{persons} message on {topic}",
)
"""References to somebody else's email; ``{persons}`` is the possessive."""
MY_MAIL = ('my mail about "{topic}"', 'the mail "{topic}" that I sent', "the message I wrote on {topic}")
"""References to an email by the mailbox's owner."""


@dataclass(slots=True)
class Finding:
    """An answer from one email, verified against its mailbox before ``ask_day``."""

    answer: str
    ask_day: date
    slots: dict[str, str] = field(default_factory=dict)
    """Values for the ``{names}`` in the wordings, besides the email's ``topic`` and its sender as ``person``."""
    sources: list[Mail] = field(default_factory=list)
    """The emails that hold the answer, if it is not only the one email."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of question; ``find`` returns None if the email does not have exactly one answer."""

    name: str
    realism: float
    """How likely a person is to ask this, 0 to 1, before the email itself is considered."""
    wordings: tuple[str, ...]
    find: Callable[[Inbox, Mail, Random], Finding | None]
    needs_all: bool = False
    """Whether the answer needs all sources; such a question is kept however many there are."""
    answerable: bool = True
    """False for a kind whose questions provably have no answer in the mailbox."""
    fact: Extractor | None = None
    """Extracts the answer if it is a fact in the email's text."""


def kind(
    realism: float, *wordings: str, needs_all: bool = False, answerable: bool = True
) -> Callable[[Callable[[Inbox, Mail, Random], Finding | None]], Kind]:
    """Make a function that searches an email the kind of question with its name."""
    return lambda find: Kind(find.__name__, realism, wordings, find, needs_all, answerable)


def refer_to(box: Inbox, mail: Mail, rng: Random) -> str:
    """Return a phrase for one email by its sender and topic, as the mailbox's owner would say it."""
    if mail.sender == box.me:
        return rng.choice(MY_MAIL).format(topic=mail.topic.text)
    person = box.people.called(mail.sender)
    return rng.choice(THEIR_MAIL).format(persons=possessive(person), person=person, topic=mail.topic.text)


def possessive(name: str) -> str:
    """Return the possessive of a name: ``Lynn Blair's``, ``Chris Williams'``."""
    return f"{name}'" if name.endswith("s") else f"{name}'s"
