"""A text as facts and words in order; cleaning and stems; what a mail mentions once."""

from __future__ import annotations

from typing import Any

import pytest
from facts.tables import CASES

from emailrl.facts import mentions
from emailrl.facts.dates import Date, Time
from emailrl.facts.mentions import Extractor
from emailrl.facts.quantities import Quantity
from emailrl.facts.reading import MASK, Fact, Literal, agree, contradict, read, same_kind
from emailrl.facts.words import (
    CARDINALS,
    MONTHS,
    OPPOSITES,
    ORDINALS,
    TENS,
    WEEKDAYS,
    clean,
    has_word,
    says_something,
    stem,
)

FIVE = Quantity(5)
CODE = Literal("code", "inv20448")


def test_facts_and_words_stand_in_order_where_they_are_written_and_are_read_once() -> None:
    reading = read("The pump failed on May 3 at 4 pm in EB1450, 2 hours late.")
    assert [(unit.text, unit.fact or unit.stem) for unit in reading.units] == [
        ("pump", "pump"),
        ("failed", "fail"),
        ("May 3", Date(month=5, day=3)),
        ("4 pm", Time(frozenset({960}))),
        ("EB1450", Literal("code", "eb1450")),
        ("2 hours", Quantity(2, "minute", 60)),
        ("late", "late"),
    ]
    assert all(reading.text[unit.start : unit.end] == unit.text for unit in reading.units)
    assert reading.masked == f"The pump failed on {MASK * 5} at {MASK * 4} in {MASK * 6}, {MASK * 7} late."


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("It is at 1 p.m. Bring it.", f"It is at {MASK * 5}. Bring it."),  # the full stop ends its sentence
        ("It is at 1 p.m. sharp", f"It is at {MASK * 6} sharp"),
        ("5 pumps, 6 seals", f"{MASK} pumps, {MASK} seals"),
        ("It took 2 hours and 30 minutes.", f"It took {MASK * 22}."),
    ],
)
def test_facts_are_masked(text: str, masked: str) -> None:
    assert read(text).masked == masked


HOURS = Quantity(2.5, "minute", 60)


@pytest.mark.parametrize(
    ("text", "facts", "stems"),
    [
        ("the seals", [], ["seal"]),
        ("pumps: INV-20448", [CODE], ["pump"]),
        ("a 40-page report", [Quantity(40)], ["page", "report"]),
        ("5lb", [Quantity(5, "gram", 453.59237)], []),  # grown together with its unit, and no code
        ("1/4 of it", [Quantity(25, "percent")], []),
        ("1/3/2001", [Date(2001, 1, 3)], []),
        ("17th and 18th of May", [Date(None, 5, 17), Date(None, 5, 18)], []),
        ("at 9 am on May 3", [Time(frozenset({540})), Date(None, 5, 3)], []),
        ("in 1998", [Quantity(1998, weak=True)], []),
        ("2.10", [Quantity(2.1)], []),
        ("5 , 6", [FIVE, Quantity(6)], []),
        ("half past twenty", [Quantity(50, "percent"), Quantity(20)], ["past"]),
        ("1 3/8 inches", [Quantity(1.375, "metre", 0.0254)], []),  # a share behind a number belongs to it
        ("2-1/2 miles", [Quantity(2.5, "metre", 1609.344)], []),
        ("2 5/20", [Quantity(2), Date(month=5, day=20)], []),
        ("2 hours 30 minutes", [HOURS], []),  # an amount in two units is one
        ("2 hours and 30 minutes", [HOURS], []),
        ("5 kg in 2 hours 30 minutes", [Quantity(5, "gram", 1000), HOURS], []),
        ("3 dollars and 50 cents a day", [Quantity(3.5, "usd", 1, "day")], []),
        ("2 hours or 30 minutes", [Quantity(2, "minute", 60), Quantity(30, "minute")], []),
        ("2 hours, 60 minutes", [Quantity(2, "minute", 60), Quantity(60, "minute")], []),
        ("30 minutes, 2 hours", [Quantity(30, "minute"), Quantity(2, "minute", 60)], []),
        ("2 hours, 0 minutes", [Quantity(2, "minute", 60), Quantity(0, "minute")], []),
        ("2 hours a day and 30 minutes", [Quantity(2, "minute", 60, "day"), Quantity(30, "minute")], []),
        ("2 hours, 30 kg", [Quantity(2, "minute", 60), Quantity(30, "gram", 1000)], []),
        ("1 week, 3 days, and 12 hours", [Quantity(1.5, "minute", 10080)], []),
        ("2, 0.5", [Quantity(2), Quantity(0.5)], []),
    ],
)
def test_facts_and_words(text: str, facts: list[Fact], stems: list[str]) -> None:
    reading = read(text)
    assert reading.facts == facts
    assert reading.stems == stems


INV20, VERSION = Literal("code", "inv20"), Literal("version", "2.1")


@pytest.mark.parametrize(
    ("text", "how", "facts"),
    [
        ("1/3", {"temporal": True}, [Date(None, 1, 3)]),
        ("2 1/4", {"temporal": True}, [Quantity(2.25)]),
        ("in 1998", {"temporal": True}, [Date(year=1998)]),
        ("2.10", {"numbering": True}, [Literal("version", "2.10")]),
        ("section 2.1, on 5 pages", {"numbering": True}, [VERSION, FIVE]),
        ("version 2.1", {"numbering": True}, [VERSION]),
        ("2.1.3", {"numbering": True}, [Literal("version", "2.1.3")]),
        ("$2.10", {"numbering": True}, [Quantity(2.1, "usd")]),
        ("21", {"numbering": True}, [Quantity(21)]),
        ("INV 20 448", {"literals": [INV20, CODE]}, [CODE]),  # the longest first, and before anything else
        ("2.1.3", {"literals": [VERSION]}, [Literal("version", "2.1.3")]),  # no head of a longer one
        ("It is 2.1.", {"literals": [VERSION]}, [VERSION]),
        ("http://x.org/INV-20448-b", {"literals": [CODE]}, [CODE]),
    ],
)
def test_what_is_looked_for_decides_what_is_read(text: str, how: dict[str, Any], facts: list[Fact]) -> None:
    assert read(text, **how).facts == facts


@pytest.mark.parametrize(
    ("one", "other", "same", "agrees", "contradicts"),
    [
        (FIVE, Quantity(5), True, True, False),
        (FIVE, Quantity(6), True, False, True),
        (FIVE, Date(day=5), False, False, False),
        (CODE, Literal("code", "inv20448"), True, True, False),
        (CODE, Literal("code", "inv20449"), True, False, True),
        (CODE, Literal("phone", "inv20448"), False, False, False),
        (CODE, FIVE, False, False, False),
        (Date(day=5), Date(day=6), True, False, True),
    ],
)
def test_facts_are_compared_within_their_kind(
    one: Fact, other: Fact, same: bool, agrees: bool, contradicts: bool
) -> None:
    assert (same_kind(one, other), agree(one, other), contradict(one, other)) == (same, agrees, contradicts)


@pytest.mark.parametrize(("text", "cleaned"), CASES["test_one_spelling"])
def test_one_spelling(text: str, cleaned: str) -> None:
    assert clean(text) == cleaned


def test_a_longer_form_is_the_same_word() -> None:
    assert has_word("meeting", {"meeting"}) and has_word("volatil", {"volatility"})
    assert not has_word("gas", {"gasoline"}) and not has_word("tariff", {"target"})
    assert has_word("pumps", {"pumpset"}) and has_word("pumpset", {"pumps"}) and has_word("pump", {"pump"})
    assert not has_word("pump", {"pumps"}) and not has_word("pumps", {"pump"})  # four letters are too few


def test_grammar_says_nothing() -> None:
    assert not says_something("The") and not says_something("wouldn't")
    assert says_something("Tariff")


STEMS = """
    postpone:delay postponed:delay postpones:delay postponing:delay reservations:reserv nations:nation
    foundation:found ration:ration shipments:shipment statements:stat payment:payment shipment:shipment
    formations:format formation:format portions:portion portion:portion rings:ring oddly:oddly equipment:equip
    meeting:meet king:king ring:ring evenings:even relation:relat region:region motions:motion replied:reply
    studies:study tied:tied ties:tie added:add bed:bed quickly:quick early:early gas:gas dogs:dog boss:boss
    stopped:stop odd:odd webb:web egg:egg called:call passed:pass buzzed:buzz page:page prices:pric price:pric
    Moss's:moss lost:lose women:woman growing:rise refused:refus declines:refus
"""
"""A word and its stem; a suffix stays where too little would be left."""
SPELLINGS = """
    colour:color favourable:favorable organised:organized organisation:organization analysing:analyzing
    centres:centers fibre:fiber catalogues:catalogs defence:defense cancelled:canceled enrolment:enrollment
    grey:gray programmes:programs cheque:check
"""
"""British and American."""
OTHERS = "four:for hour:horse basis:bazaar advice:advise sell:sel"


def test_stems() -> None:
    stems, spellings, others = ([pair.split(":") for pair in text.split()] for text in (STEMS, SPELLINGS, OTHERS))
    assert [(word, stem(word)) for word, _ in stems] == [(word, stemmed) for word, stemmed in stems]
    assert [(one, other) for one, other in spellings if stem(one) != stem(other)] == []
    assert [(one, other) for one, other in others if stem(one) == stem(other)] == []


def test_opposites_are_mutual() -> None:
    assert stem("closed") in OPPOSITES[stem("open")] and stem("opens") in OPPOSITES[stem("close")]
    assert OPPOSITES[stem("rises")] == {stem("fall"), stem("cut"), stem("reduce")}


def test_numbers_by_their_names() -> None:
    assert list(dict.fromkeys(CARDINALS.values())) == list(range(20))
    assert (CARDINALS["once"], CARDINALS["twice"], CARDINALS["nine"], CARDINALS["nineteen"]) == (1, 2, 9, 19)
    assert list(TENS.values()) == [20, 30, 40, 50, 60, 70, 80, 90]
    assert (ORDINALS["first"], ORDINALS["twelfth"]) == (1, 12)
    assert (MONTHS["january"], MONTHS["jan"], MONTHS["december"]) == (1, 1, 12)
    assert (WEEKDAYS["monday"], WEEKDAYS["tues"], WEEKDAYS["sun"]) == (0, 1, 6)


def extractor_of(kind: str) -> Extractor:
    _, is_numbered, noun = kind.partition("numbered ")
    return mentions.numbered(noun) if is_numbered else getattr(mentions, kind)


@pytest.mark.parametrize(
    ("kind", "text", "fact"),
    [
        ("ROOM", "We meet (room 441).", "room 441"),
        ("numbered invoice", "Invoice no. 2024118.", "2024118"),
        ("PERCENT", "It went up by 23.4 %, they say", "23.4 %"),
        ("AMOUNT", "It costs $1,234.50.", "$1,234.50"),
        ("FLIGHT", "on flight CO 1234 / seat 5", "CO 1234"),
        *CASES["test_the_one_fact_of_a_kind"],
        *((kind, text, None) for kind, text in CASES["test_a_part_of_a_token_is_no_fact"]),
    ],
)
def test_the_one_fact_of_a_kind(kind: str, text: str, fact: str | None) -> None:
    found = extractor_of(kind).only(text, text)
    assert (found.text if found else None) == fact


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
