"""Facts in a body: found with their canonical form, refused where there are two, a span, or only in a quotation."""

from __future__ import annotations

from random import Random

import pytest
from scenarios.template.world import ANA, BO, box, mail

from emailrl.scenarios.inbox import facts
from emailrl.scenarios.inbox.bodies import own_text
from emailrl.scenarios.inbox.facts import Extractor
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
        (facts.DEADLINE, "send it by noon Monday", "noon Monday"),
        (facts.DEADLINE, "no later than Friday 11/30 if", "Friday 11/30"),
        (facts.DEADLINE, "stop by Friday", None),
        (facts.DEADLINE, "by Monday, and the rest by Tuesday", None),
        (facts.ROOM, "in Conference Room EB 19C1, ok", "EB 19C1"),
        (facts.ROOM, "in room 3125b.", "room 3125b"),
        (facts.ROOM, "in EB1938 (that is EB 1938)", "EB1938"),
        (facts.ROOM, "in Conference Room Cedar.", "Conference Room Cedar"),
        (facts.ROOM, "there is room for improvement", None),
        (facts.VENUE, "dinner at the Four Seasons Hotel at", "Four Seasons Hotel"),
        (facts.VENUE, "we met Debra Tower there", None),
        (facts.URL, "see http://www.x.org/a.html.", "http://www.x.org/a.html"),
        (facts.EMAIL_ADDRESS, "write to bo@x.org.", "bo@x.org"),
        (facts.ATTACHMENT, "Thanks\n\n - plan v2.xls \n", "plan v2.xls"),
        (facts.ATTACHMENT, "<<plan.doc>> and notes.pdf", None),
        (facts.QUANTITY, "about 238,000mmbtus back", "238,000mmbtus"),
        (facts.QUANTITY, "5-10 barrels", None),
        (facts.FLIGHT, "on Continental flight CO 1234 at", "CO 1234"),
        (facts.numbered("deal"), "Deal # 678029.1.", "678029.1"),
        (facts.numbered("deal"), "deals 12345 and deal 12346", None),
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
