"""Dates and times of day in the formats people write them."""

from __future__ import annotations

from typing import Any

import pytest
from facts.tables import CASES

from emailrl.facts.dates import DATE, TIME, Date, Time, read_dates, read_time


@pytest.mark.parametrize(("text", "dates"), CASES["test_dates"])
def test_dates(text: str, dates: list[dict[str, Any]]) -> None:
    assert [date for found in DATE.finditer(text) for date in read_dates(found)] == [Date(**one) for one in dates]


@pytest.mark.parametrize(("text", "minutes"), CASES["test_times"])
def test_times(text: str, minutes: list[int]) -> None:
    found = TIME.search(text)
    assert found is not None
    read = read_time(found)
    assert read is not None and read.minutes == {*minutes}


@pytest.mark.parametrize(("wanted", "given", "agrees"), CASES["test_the_finer_date_gives_the_coarser"])
def test_the_finer_date_gives_the_coarser(wanted: dict[str, Any], given: dict[str, Any], agrees: bool) -> None:
    assert Date(**wanted).agrees(Date(**given)) is agrees


def test_times_agree_where_they_can_mean_the_same() -> None:
    half_past_three = Time(frozenset({210, 930}))
    assert half_past_three.agrees(Time(frozenset({930})))
    assert half_past_three.contradicts(Time(frozenset({931})))
    assert not half_past_three.contradicts(Time(frozenset({210})))


@pytest.mark.parametrize("text", ["half past twenty", "any o'clock", "ten to late", "thirteen o'clock"])
def test_words_that_only_look_like_a_time(text: str) -> None:
    found = TIME.search(text)
    assert found is not None and read_time(found) is None


@pytest.mark.parametrize(("one", "other", "agrees"), CASES["test_times_of_two_zones"])
def test_times_of_two_zones(one: str, other: str, agrees: bool) -> None:
    times = [read_time(found) for found in map(TIME.search, (one, other)) if found]
    assert times[0] is not None and times[1] is not None
    assert times[0].agrees(times[1]) is agrees
    assert times[1].contradicts(times[0]) is not agrees


@pytest.mark.parametrize("text", ["noon Central Park", "10 am et al", "3 pm Pacific Gas", "9:30 estimated"])
def test_what_is_no_zone(text: str) -> None:
    found = TIME.search(text)
    time = read_time(found) if found else None
    assert time is not None and time.zone is None
