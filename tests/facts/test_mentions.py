"""Mentions in a body: found as they stand there, refused where there are two, or a span."""

from __future__ import annotations

import pytest

from emailrl.facts import mentions
from emailrl.facts.mentions import Extractor


@pytest.mark.parametrize(
    ("extractor", "text", "fact"),
    [
        (mentions.PHONE, "Call me at (713) 555-0142 or 713.555.0142.", "(713) 555-0142"),
        (mentions.PHONE, "Call 713-555-0142, fax 713-555-0143", None),
        (mentions.PHONE, "Fax: 713-555-0142", None),
        (mentions.PHONE, "713-555-0142 or x53858", None),
        (mentions.AMOUNT, "It costs $80 \nmillion in all.", "$80 million"),
        (mentions.AMOUNT, "The fee is $8,300 per month.", "$8,300 per month"),
        (mentions.AMOUNT, "either $5 or $6", None),
        (mentions.AMOUNT, "from $3-5 million", None),
        (mentions.AMOUNT, "$5, not 6 dollars", None),
        (mentions.AMOUNT, "Normally $345, it is free now", "$345"),
        (mentions.AMOUNT, "at 155,000/day, though I would say $100,000", None),
        (mentions.AMOUNT, "$500 million of 1.2 Billion", None),
        (mentions.AMOUNT, "$500 for 10,000 MMBtu", "$500"),
        (mentions.PERCENT, "up 4.5% since, yes 4.5 percent", "4.5%"),
        (mentions.PERCENT, "up 5-10%", None),
        (mentions.PERCENT, "Sales moved by -5 % in May.", "-5 %"),
        (mentions.PERCENT, "Sales moved (\u22125%) in May.", "\u22125%"),
        (mentions.PERCENT, "It is -5 % here and 5 % there.", None),
        (mentions.AMOUNT, "The desk made -$5 million.", None),
        (mentions.TIME, "We meet at 4:00PM sharp (4 pm!)", "4:00PM"),
        (mentions.TIME, "at 4:30 P.M with points", "4:30 P.M"),
        (mentions.TIME, "this afternoon", None),
        (mentions.TIME, "by noon please", "noon"),
        (mentions.TIME, "3:30-5:00", None),
        (mentions.TIME, "from 3 to 5 pm", None),
        (mentions.DATE, "on Friday, May 5 then 5/5", "Friday, May 5"),
        (mentions.DATE, "on 11/30 if all goes well", "11/30"),
        (mentions.DATE, "for 12/00 only", None),
        (mentions.DATE, "May 3-5", None),
        (mentions.DATE, "3/13/00-3/17/00", None),
        (mentions.DATE, "tomorrow, May 5", None),
        (mentions.DATE, "on Nov. 14, 15, 16 and 17 only", None),
        (mentions.DATE, "on Nov. 14, 2001 only", "Nov. 14, 2001"),
        (mentions.DATE, "about 1/3 of the board", None),
        (mentions.DATE, "about 1/3 of the board on May 5", None),
        (mentions.DATE, "with October 00's allocation", None),
        (mentions.DATE, "the October 00 allocation of May 5", None),
        (mentions.DATE, "the agenda\n<<minutes Feb 14 2002.doc>>\n", None),
        (mentions.DATE, "the agenda\n - minutes Feb 14 2002.doc\n", None),
        (mentions.DATE, "the agenda (see attached file: Feb 14 2002.doc)", None),
        (mentions.DEADLINE, "send it by noon Monday", "noon Monday"),
        (mentions.DEADLINE, "no later than Friday 11/30 if", "Friday 11/30"),
        (mentions.DEADLINE, "stop by Friday", None),
        (mentions.DEADLINE, "prices by Wednesday were up again", None),
        (mentions.DEADLINE, "the line is to be shut down by noon Wednesday", None),
        (mentions.DEADLINE, "please send comments by Friday; prices by Wednesday were up", None),
        (mentions.DEADLINE, "we need the form\nback by COB June 3.", "COB June 3"),
        (mentions.DEADLINE, "by Monday, and the rest by Tuesday", None),
        (mentions.ROOM, "in Conference Room EB 19C1, ok", "EB 19C1"),
        (mentions.ROOM, "in room 3125b.", "room 3125b"),
        (mentions.ROOM, "in EB1938 (that is EB 1938)", "EB1938"),
        (mentions.ROOM, "in Conference Room Cedar.", "Conference Room Cedar"),
        (mentions.ROOM, "dinner in the Canaletto Room\n520 Cowper Street", None),
        (mentions.ROOM, "there is room for improvement", None),
        (mentions.VENUE, "dinner at the Four Seasons Hotel at", "Four Seasons Hotel"),
        (mentions.VENUE, "Make a Difference Club: no", None),
        (mentions.VENUE, "we met Debra Tower there", None),
        (mentions.URL, "see http://www.x.org/a.html.", "http://www.x.org/a.html"),
        (mentions.EMAIL_ADDRESS, "write to bo@x.org.", "bo@x.org"),
        (mentions.ATTACHMENT, "Thanks\n\n - plan v2.xls \n", "plan v2.xls"),
        (mentions.ATTACHMENT, "<<plan.doc>> and notes.pdf", None),
        (mentions.QUANTITY, "about 238,000mmbtus back", "238,000mmbtus"),
        (mentions.QUANTITY, "5-10 barrels", None),
        (mentions.QUANTITY, "it took 24 hours", None),
        (mentions.QUANTITY, "60 MMcf/d of 146,000", None),
        (mentions.FLIGHT, "on Continental flight CO 1234 at", "CO 1234"),
        (mentions.numbered("deal"), "Deal # 678029.1.", "678029.1"),
        (mentions.numbered("deal"), "deals 12345 and deal 12346", None),
        (mentions.numbered("deal"), "deal 535344 and 535343 of today", None),
        (mentions.numbered("deal"), "deal is 650452. The swap is 650453.", None),
        (mentions.numbered("deal"), "deals 432854.01 and 420529.01", None),
        (mentions.numbered("deal"), "deal 650452 on tag 23795", "650452"),
        (mentions.numbered("meter"), "from Hardy (meter 68) to Flagstaff (meter 1606)", None),
        (mentions.numbered("contract"), "Logistics and Contracts\n1400 Smith", None),
        (mentions.numbered("meter"), "at meter #: 8018 only", "8018"),
    ],
)
def test_the_one_fact_of_a_kind(extractor: Extractor, text: str, fact: str | None) -> None:
    found = extractor.only(text, text)
    assert (found.text if found else None) == fact


@pytest.mark.parametrize(
    ("extractor", "text"),
    [
        (mentions.ROOM, "We meet in room 4.41."),
        (mentions.ROOM, "We meet in room 4/41 today"),
        (mentions.ROOM, "We meet in room 4:41 today"),
        (mentions.ROOM, "The key is for EB 12/3."),
        (mentions.numbered("invoice"), "Invoice no. 2024/118"),
        (mentions.numbered("invoice"), "Invoice 2024,118"),
        (mentions.numbered("invoice"), "Invoice 2024/A is paid"),
        (mentions.PERCENT, "It went up by 23,4 %"),
        (mentions.PERCENT, "a 1,234% rise"),
        (mentions.PERCENT, "the 10%-owned firm"),
        (mentions.AMOUNT, "It costs $23,4 in all"),
        (mentions.AMOUNT, "It costs $1.234,50"),
        (mentions.AMOUNT, "It costs US$5"),
        (mentions.QUANTITY, "It took 23,4 MMBtu"),
        (mentions.QUANTITY, "It took 1.234,5 tons"),
        (mentions.FLIGHT, "on flight CO 1234/5"),
        (mentions.FLIGHT, "on flight CO 1234-A"),
        (mentions.PHONE, "Call 713-555-0142/43"),
        (mentions.PHONE, "Call 713-555-0142,43"),
        (mentions.PHONE, "Call 44.713-555-0142"),
        (mentions.TIME, "at 14:30Z on the dot"),
        (mentions.TIME, "at 4pm/3pm"),
        (mentions.DATE, "on May 5-final"),
        (mentions.DEADLINE, "no later than May 5/6"),
        (mentions.VENUE, "at the Sands Hotel/Casino"),
    ],
)
def test_a_part_of_a_token_is_no_fact(extractor: Extractor, text: str) -> None:
    assert extractor.only(text, text) is None


@pytest.mark.parametrize(
    ("extractor", "text", "fact"),
    [
        (mentions.ROOM, "We meet in room 441, then eat", "room 441"),
        (mentions.ROOM, "We meet (room 441).", "room 441"),
        (mentions.numbered("invoice"), "Invoice no. 2024118.", "2024118"),
        (mentions.PERCENT, "It went up by 23.4 %, they say", "23.4 %"),
        (mentions.AMOUNT, "It costs $1,234.50.", "$1,234.50"),
        (mentions.QUANTITY, "It took 1,234.5 tons - more", "1,234.5 tons"),
        (mentions.FLIGHT, "on flight CO 1234 / seat 5", "CO 1234"),
    ],
)
def test_what_ends_a_sentence_is_no_part_of_a_fact(extractor: Extractor, text: str, fact: str) -> None:
    found = extractor.only(text, text)
    assert found is not None and found.text == fact


def test_two_spellings_of_one_fact_are_one() -> None:
    for extractor, text in (
        (mentions.AMOUNT, "$80 million, that is $80,000,000"),
        (mentions.TIME, "at 4:00 PM (4 pm sharp)"),
        (mentions.URL, "www.x.org/a or http://x.org/a"),
        (mentions.DATE, "on May 3, i.e. 5/3/2001"),
    ):
        assert len({mention.key for mention in extractor.find(text)}) == 1, text
        assert len(extractor.find(text)) >= 1


def test_a_file_name_states_nothing_but_what_is_attached() -> None:
    for text in ("Two files:\n - $500 budget.xls\nBye", "It is here (see ATTACHED file: $500 budget.xls)"):
        assert mentions.AMOUNT.find(text) and mentions.AMOUNT.only(text, text) is None
    text = "Two files:\n - Budget.xls\nBye"
    found = mentions.ATTACHMENT.only(text, text)
    assert found is not None and found.text == "Budget.xls"


def test_a_fact_that_also_stands_in_part_is_not_sure() -> None:
    text = "It is 4 %, and there 23,4 %"
    assert [(fact.key, fact.is_whole) for fact in mentions.PERCENT.find(text)] == [
        (mentions.PERCENT.find("4 %")[0].key, whole) for whole in (True, False)
    ]
    assert mentions.PERCENT.only(text, text) is None


def test_a_number_may_be_another_only_if_it_is_as_long_as_the_first_spelling() -> None:
    text = "Deal 1483-76 is deal 148376; see {}"
    deal = mentions.numbered("deal")
    for other, fact in (("123456", "1483-76"), ("1234567", None)):
        found = deal.only(text.format(other), text.format(other))
        assert (found and found.text) == fact
