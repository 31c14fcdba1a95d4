"""Facts in a body: found with their canonical form, refused where there are two, a span, or only in a quotation."""

from __future__ import annotations

from random import Random

import pytest
from scenarios.template.world import ANA, BO, CY, box, mail

from emailrl.scenarios.inbox import facts
from emailrl.scenarios.inbox.bodies import own_text
from emailrl.scenarios.inbox.facts import Extractor
from emailrl.scenarios.inbox.mailbox import Mail, Mailbox
from emailrl.scenarios.template.generate import KINDS


@pytest.mark.parametrize(
    ("extractor", "text", "fact"),
    [
        (facts.PHONE, "Call me at (713) 555-0142 or 713.555.0142.", "(713) 555-0142"),
        (facts.PHONE, "Call 713-555-0142, fax 713-555-0143", None),
        (facts.PHONE, "Fax: 713-555-0142", None),
        (facts.PHONE, "713-555-0142 or x53858", None),
        (facts.AMOUNT, "It costs $80 \nmillion in all.", "$80 million"),
        (facts.AMOUNT, "The fee is $8,300 per month.", "$8,300 per month"),
        (facts.AMOUNT, "either $5 or $6", None),
        (facts.AMOUNT, "from $3-5 million", None),
        (facts.AMOUNT, "$5, not 6 dollars", None),
        (facts.AMOUNT, "Normally $345, it is free now", "$345"),
        (facts.AMOUNT, "at 155,000/day, though I would say $100,000", None),
        (facts.AMOUNT, "$500 million of 1.2 Billion", None),
        (facts.AMOUNT, "$500 for 10,000 MMBtu", "$500"),
        (facts.PERCENT, "up 4.5% since, yes 4.5 percent", "4.5%"),
        (facts.PERCENT, "up 5-10%", None),
        (facts.TIME, "We meet at 4:00PM sharp (4 pm!)", "4:00PM"),
        (facts.TIME, "at 4:30 P.M with points", "4:30 P.M"),
        (facts.TIME, "this afternoon", None),
        (facts.TIME, "by noon please", "noon"),
        (facts.TIME, "3:30-5:00", None),
        (facts.TIME, "from 3 to 5 pm", None),
        (facts.DATE, "on Friday, May 5 then 5/5", "Friday, May 5"),
        (facts.DATE, "on 11/30 if all goes well", "11/30"),
        (facts.DATE, "for 12/00 only", None),
        (facts.DATE, "May 3-5", None),
        (facts.DATE, "3/13/00-3/17/00", None),
        (facts.DATE, "tomorrow, May 5", None),
        (facts.DATE, "on Nov. 14, 15, 16 and 17 only", None),
        (facts.DATE, "on Nov. 14, 2001 only", "Nov. 14, 2001"),
        (facts.DATE, "about 1/3 of the board", None),
        (facts.DATE, "about 1/3 of the board on May 5", None),
        (facts.DATE, "with October 00's allocation", None),
        (facts.DATE, "the October 00 allocation of May 5", None),
        (facts.DATE, "the agenda\n<<minutes Feb 14 2002.doc>>\n", None),
        (facts.DEADLINE, "send it by noon Monday", "noon Monday"),
        (facts.DEADLINE, "no later than Friday 11/30 if", "Friday 11/30"),
        (facts.DEADLINE, "stop by Friday", None),
        (facts.DEADLINE, "prices by Wednesday were up again", None),
        (facts.DEADLINE, "the line is to be shut down by noon Wednesday", None),
        (facts.DEADLINE, "please send comments by Friday; prices by Wednesday were up", None),
        (facts.DEADLINE, "we need the form\nback by COB June 3.", "COB June 3"),
        (facts.DEADLINE, "by Monday, and the rest by Tuesday", None),
        (facts.ROOM, "in Conference Room EB 19C1, ok", "EB 19C1"),
        (facts.ROOM, "in room 3125b.", "room 3125b"),
        (facts.ROOM, "in EB1938 (that is EB 1938)", "EB1938"),
        (facts.ROOM, "in Conference Room Cedar.", "Conference Room Cedar"),
        (facts.ROOM, "dinner in the Canaletto Room\n520 Cowper Street", None),
        (facts.ROOM, "there is room for improvement", None),
        (facts.VENUE, "dinner at the Four Seasons Hotel at", "Four Seasons Hotel"),
        (facts.VENUE, "Make a Difference Club: no", None),
        (facts.VENUE, "we met Debra Tower there", None),
        (facts.URL, "see http://www.x.org/a.html.", "http://www.x.org/a.html"),
        (facts.EMAIL_ADDRESS, "write to bo@x.org.", "bo@x.org"),
        (facts.ATTACHMENT, "Thanks\n\n - plan v2.xls \n", "plan v2.xls"),
        (facts.ATTACHMENT, "<<plan.doc>> and notes.pdf", None),
        (facts.QUANTITY, "about 238,000mmbtus back", "238,000mmbtus"),
        (facts.QUANTITY, "5-10 barrels", None),
        (facts.QUANTITY, "it took 24 hours", None),
        (facts.QUANTITY, "60 MMcf/d of 146,000", None),
        (facts.FLIGHT, "on Continental flight CO 1234 at", "CO 1234"),
        (facts.numbered("deal"), "Deal # 678029.1.", "678029.1"),
        (facts.numbered("deal"), "deals 12345 and deal 12346", None),
        (facts.numbered("deal"), "deal 535344 and 535343 of today", None),
        (facts.numbered("deal"), "deal is 650452. The swap is 650453.", None),
        (facts.numbered("deal"), "deals 432854.01 and 420529.01", None),
        (facts.numbered("deal"), "deal 650452 on tag 23795", "650452"),
        (facts.numbered("meter"), "from Hardy (meter 68) to Flagstaff (meter 1606)", None),
        (facts.numbered("contract"), "Logistics and Contracts\n1400 Smith", None),
        (facts.numbered("meter"), "at meter #: 8018 only", "8018"),
    ],
)
def test_the_one_fact_of_a_kind(extractor: Extractor, text: str, fact: str | None) -> None:
    found = extractor.only(text, text)
    assert (found.text if found else None) == fact


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
    inbox = Mailbox("mia.lokay@x.org", [about])
    assert not inbox.received(about), "taken for the owner's other address"
    for seed in range(8):
        finding = kind.find(inbox, about, Random(seed))
        assert finding is not None and "jlokay@home.example" in finding.slots["mail"]
