"""Mentions in a body: found as they stand there, refused where there are two, or a span."""

from __future__ import annotations

import pytest
from facts.tables import CASES

from emailrl.facts import mentions
from emailrl.facts.mentions import Extractor


def extractor_of(kind: str) -> Extractor:
    _, is_numbered, noun = kind.partition("numbered ")
    return mentions.numbered(noun) if is_numbered else getattr(mentions, kind)


@pytest.mark.parametrize(("kind", "text", "fact"), CASES["test_the_one_fact_of_a_kind"])
def test_the_one_fact_of_a_kind(kind: str, text: str, fact: str | None) -> None:
    found = extractor_of(kind).only(text, text)
    assert (found.text if found else None) == fact


@pytest.mark.parametrize(("kind", "text"), CASES["test_a_part_of_a_token_is_no_fact"])
def test_a_part_of_a_token_is_no_fact(kind: str, text: str) -> None:
    assert extractor_of(kind).only(text, text) is None


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
