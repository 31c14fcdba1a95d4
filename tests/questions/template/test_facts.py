"""Questions on one fact in a mail: refused where it stands in a quotation, the header, or what programs add."""

from __future__ import annotations

from random import Random

import pytest
from questions.template.world import ANA, BO, CY, box, mail

from emailrl.questions.inbox.mail import Mail, own_text
from emailrl.questions.inbox.mailbox import Inbox
from emailrl.questions.template.generate import KINDS

QUOTES = [
    "\n-----Original Message-----\nFrom: Bo\n",
    "\n---------------------- Forwarded by Bo Lind/HOU/ECT on 03/11/2000\n",
    "\n> quoted\n",
    "\nBo Lind\n03/10/2000 03:22 PM\nTo: Ana\n",
    "\nBo Lind\n14/06/2000 19:10\nTo: Ana\n",
    "\nOn Fri, 4 May 2001, Bo Lind wrote:\n",
    "\nbo@x.org wrote:\n",
]


@pytest.mark.parametrize("quote", QUOTES)
def test_what_a_mail_quotes_is_not_its_own(quote: str) -> None:
    own = own_text(f"See you.{quote}at $5\n")
    assert own.startswith("See you.") and "$5" not in own


def test_a_fact_in_the_quotation_is_no_answer_and_rivals_one_in_the_text() -> None:
    kind = next(kind for kind in KINDS if kind.name == "amount")

    def answer(body: str) -> str | None:
        about = mail(1, "05-03 09:00", BO, ANA, "Pier survey results", body)
        finding = kind.find(box(about), about, Random(1))
        return finding.answer if finding else None

    quote = "\n-----Original Message-----\n"
    assert answer(f"It is $7.{quote}How much?") == "$7"
    assert answer(f"Fine.{quote}It is $7.") is None
    assert answer(f"It is $7.{quote}Not $8?") is None
    assert answer("Nothing here") is None


def test_an_address_that_the_header_shows_is_no_fact() -> None:
    kind = next(kind for kind in KINDS if kind.name == "email_address")
    signed = mail(1, "05-03 09:00", BO, ANA, "Pier survey results", f"Bo\n{BO.title()}")
    assert kind.find(box(signed), signed, Random(1)) is None


def answer_of(kind_name: str, about: Mail, *others: Mail) -> str | None:
    kind = next(kind for kind in KINDS if kind.name == kind_name)
    finding = kind.find(box(about, *others), about, Random(1))
    return finding.answer if finding else None


def test_a_manner_of_speaking_is_no_percentage() -> None:
    for body, answer in (("It is 100% done.", None), ("It is 90% done.", "90%")):
        assert answer_of("percentage", mail(1, "05-03 09:00", BO, ANA, "Pier survey results", body)) == answer


def test_what_programs_add_to_mails_is_no_link_of_the_mail() -> None:
    about = mail(1, "05-03 09:00", BO, ANA, "Pier survey results", "Fine. Sent by www.gadget.example")
    assert answer_of("url", about) == "www.gadget.example"
    reply = mail(2, "05-03 10:00", CY, ANA, "Re: Pier survey results", "> Sent by www.gadget.example")
    assert answer_of("url", about, reply) == "www.gadget.example"
    elsewhere = mail(3, "05-01 10:00", CY, ANA, "Lunch", "No. Sent by www.gadget.example")
    assert answer_of("url", about, elsewhere) is None


def test_a_mail_from_a_namesake_of_the_owner_is_not_called_the_owner_s() -> None:
    kind = next(kind for kind in KINDS if kind.name == "amount")
    about = mail(1, "05-03 09:00", "jlokay@home.example", "mia.lokay@x.org", "Pier survey results", "It is $7.")
    inbox = Inbox("mia.lokay@x.org", [about])
    assert not inbox.received(about), "taken for the owner's other address"
    for seed in range(8):
        finding = kind.find(inbox, about, Random(seed))
        assert finding is not None and "jlokay@home.example" in finding.slots["mail"]
