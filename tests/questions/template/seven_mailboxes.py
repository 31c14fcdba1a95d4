"""The mail of seven people, full of facts to ask about."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from random import Random

from emailrl.store.sources import RawEmail

NAMES = ["ana.roebuck", "bo.lindqvist", "cy.marshall", "dee.orchard", "eli.novak", "fay.tremaine", "gil.castor"]


THINGS = [
    "anchor",
    "buoy",
    "crane",
    "diver",
    "engine",
    "ferry",
    "gantry",
    "harbour",
    "island",
    "jetty",
    "keel",
    "lantern",
    "mooring",
    "net",
    "oar",
    "pier",
]


MATTERS = ["order", "survey", "budget", "permit", "repair", "invoice", "schedule", "contract", "delivery", "inspection"]


PLACES = ["north", "south", "east", "west", "upper", "lower", "inner", "outer"]


def mails_of_seven() -> list[RawEmail]:
    """Six hundred mails among seven people, each subject used once, some with a fact, some answered."""
    rng = Random(5)
    people = [f"{name}@x.org" for name in NAMES]
    subjects = [f"{place} {thing} {matter}" for place in PLACES for thing in THINGS for matter in MATTERS]
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
