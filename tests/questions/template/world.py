"""Mail for the tests of template questions: Ana Roe's few of 2001, written by hand, and that of seven busy people."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import product
from random import Random

from emailrl.mail.sources import RawEmail
from emailrl.questions.inbox import Inbox, Mail

ANA, BO, CY, DEE = "ana.roe@x.org", "bo.lind@x.org", "cy.marsh@y.net", "dee.orr@x.org"
SEVEN = "ana.roebuck bo.lindqvist cy.marshall dee.orchard eli.novak fay.tremaine gil.castor"
THINGS = "anchor buoy crane diver engine ferry gantry harbour island jetty keel lantern mooring net oar pier"
MATTERS = "order survey budget permit repair invoice schedule contract delivery inspection"
PLACES = "north south east west upper lower inner outer"


def mail(
    number: int,
    sent_at: str,
    sender: str,
    to: str | list[str],
    subject: str,
    body: str = "",
    cc: str | list[str] = (),  # type: ignore[assignment]
    bcc: str | list[str] = (),  # type: ignore[assignment]
) -> Mail:
    """Mail ``<number@x>``; ``sent_at`` is ``MM-DD HH:MM`` of 2001."""
    people = [[field] if isinstance(field, str) else list(field) for field in (to, cc, bcc)]
    return Mail(f"<{number}@x>", subject, sender, f"2001-{sent_at}:00", body, *people)


def box(*mails: Mail) -> Inbox:
    """Ana's mailbox of these mails."""
    return Inbox(ANA, mails)


def mails_of_seven() -> list[RawEmail]:
    """Six hundred mails among seven people, each subject used once, some with a fact, some answered."""
    rng = Random(5)
    people = [f"{name}@x.org" for name in SEVEN.split()]
    subjects = list(map(" ".join, product(PLACES.split(), THINGS.split(), MATTERS.split())))
    mails: list[RawEmail] = []
    for number, subject in enumerate(rng.sample(subjects, 450)):
        sender, *others = rng.sample(people, 4)
        sent_at = datetime(2001, 1, 1, 8, tzinfo=UTC) + timedelta(hours=11 * number)
        body = rng.choice(
            [
                f"The price is ${rng.randint(10, 99)},000.",
                f"Call 713-555-{rng.randint(1000, 9999)}.",
                f"We meet at {rng.randint(1, 11)} pm.",
                f"It is set for March {rng.randint(1, 28)}.",
                f"We are {rng.randint(2, 90)}% done.",
                "No news.",
            ]
        )
        to, cc = others[: rng.randint(1, 2)], others[2:] if rng.random() < 0.4 else []
        mails.append(RawEmail(f"<{number}@x.org>", subject, sender, to, cc, [], sent_at, body))
        if rng.random() < 0.33:
            later = sent_at + timedelta(hours=rng.randint(1, 50))
            mails.append(RawEmail(f"<r{number}@x.org>", f"Re: {subject}", to[0], [sender], [], [], later, "Thanks."))
    return mails
