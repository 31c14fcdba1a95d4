"""Dates and times of day in the formats people write them."""

from __future__ import annotations

import pytest

from emailrl.facts.dates import DATE, TIME, Date, Time, read_dates, read_time

DAY = Date(2003, 3, 14)


@pytest.mark.parametrize(
    ("text", "dates"),
    [
        ("March 14, 2003", [DAY]),
        ("14 March 2003", [DAY]),
        ("14th of March, 2003", [DAY]),
        ("the 14th of March 2003", [DAY]),
        ("2003-03-14", [DAY]),
        ("2003/03/14", [DAY]),
        ("3/14/2003", [DAY]),
        ("3/14/03", [DAY]),
        ("14/3/2003", [DAY]),
        ("14.03.2003", [DAY]),
        ("Mar. 14th, 2003", [DAY]),
        ("Friday, 14 Mar 2003", [Date(2003, 3, 14, 4)]),
        ("Fri (3/14)", [Date(None, 3, 14, 4)]),
        ("Mondays", [Date(weekday=0)]),
        ("Monday the 17th", [Date(day=17, weekday=0)]),
        ("January 17th and 18th", [Date(None, 1, 17), Date(None, 1, 18)]),
        ("17-18 Jan 2001", [Date(2001, 1, 17), Date(2001, 1, 18)]),
        ("Wednesday morning", [Date(weekday=2, part="morning")]),
        ("in May", [Date(month=5)]),
        ("1997", []),
        ("thus", []),
        ("Mons of Fris, weds and sats", []),
        ("Wednesdays", [Date(weekday=2)]),
        ("May I sit in the sun?", []),
        ("the monitor sat there", []),
    ],
)
def test_dates(text: str, dates: list[Date]) -> None:
    assert [date for found in DATE.finditer(text) for date in read_dates(found)] == dates


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("3:30 PM", {930}),
        ("3.30 p.m.", {930}),
        ("15:30", {930}),
        ("1530 hours", {930}),
        ("3:30", {210, 930}),
        ("half past three", {210, 930}),
        ("quarter to eight", {465, 1185}),
        ("09:00", {540}),
        ("9 am", {540}),
        ("12:00 AM", {0}),
        ("12 pm", {720}),
        ("noon", {720}),
        ("2:15 in the afternoon", {855}),
        ("ten o'clock", {600, 1320}),
    ],
)
def test_times(text: str, minutes: set[int]) -> None:
    found = TIME.search(text)
    assert found is not None
    read = read_time(found)
    assert read is not None and read.minutes == minutes


@pytest.mark.parametrize(
    ("wanted", "given", "agrees"),
    [
        (Date(month=5, day=3), Date(2001, 5, 3, 3), True),
        (Date(2001, 5, 3), Date(month=5, day=3), True),
        (Date(2001, 5, 3), Date(2000, 5, 3), False),
        (Date(month=5, day=3), Date(month=5), False),
        (Date(month=5), Date(month=5, day=3), True),
        (Date(year=1997), Date(1997, 2, 3), True),
        (Date(1997, 2, 3), Date(year=1997), False),
        (Date(weekday=4), Date(2001, 5, 4, 4), True),
        (Date(weekday=4), Date(2001, 5, 4), False),
        (Date(weekday=4), Date(weekday=3), False),
    ],
)
def test_the_finer_date_gives_the_coarser(wanted: Date, given: Date, agrees: bool) -> None:
    assert wanted.agrees(given) is agrees


def test_times_agree_where_they_can_mean_the_same() -> None:
    half_past_three = Time(frozenset({210, 930}))
    assert half_past_three.agrees(Time(frozenset({930})))
    assert half_past_three.contradicts(Time(frozenset({931})))
