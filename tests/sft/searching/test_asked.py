"""A template question taken apart again, by its words alone."""

from __future__ import annotations

from datetime import date

import pytest

from emailrl.questions.template import HARD_KINDS, KINDS
from emailrl.questions.template.usual import MY_MAIL, THEIR_MAIL, possessive
from emailrl.sft.searching.asked import read_question

SLOTS = {"person": "Chris Williams", "topic": "Re-hedging: who, when?", "date": "May 3, 2001", "month": "May 2001"}


@pytest.mark.parametrize("kind", [*KINDS, *(k for k in HARD_KINDS if k.answerable)], ids=lambda kind: kind.name)
def test_every_wording_of_every_kind_is_read_back(kind) -> None:  # type: ignore[no-untyped-def]
    for wording in kind.wordings:
        for form in (*THEIR_MAIL, *MY_MAIL) if "{mail}" in wording else ("",):
            mail = form.format(persons=possessive(SLOTS["person"]), **SLOTS)
            asked = read_question(wording.format(mail=mail, **SLOTS))
            assert asked is not None and asked.kind == kind.name and asked.fact is kind.fact
            text = wording.replace("{mail}", form)
            assert asked.person == ("Chris Williams" if "{person" in text else None)
            assert asked.topic == (SLOTS["topic"] if "{topic}" in text else None)
            assert asked.day == (date(2001, 5, 3) if "{date}" in text else None)
            assert asked.month == (date(2001, 5, 1) if "{month}" in text else None)
            if form:
                assert asked.is_mine == (form in MY_MAIL)


def test_a_weekday_before_the_date_is_passed_over() -> None:
    asked = read_question("Who wrote to me on Thursday, May 3, 2001?")
    assert asked is not None and (asked.kind, asked.day) == ("only_sender_of_day", date(2001, 5, 3))


def test_other_words_are_no_template_question() -> None:
    assert read_question("When does the lease end?") is None
