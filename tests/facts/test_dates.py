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
        ("12/31/69", [Date(2069, 12, 31)]),
        ("12/31/70", [Date(1970, 12, 31)]),
        ("12/31/99", [Date(1999, 12, 31)]),
        ("1/1/00", [Date(2000, 1, 1)]),
        ("May 3, '01", [Date(2001, 5, 3)]),
        ("12/13/2001", [Date(2001, 12, 13)]),
        ("13/12/2001", [Date(2001, 12, 13)]),
        ("11.12.2001", [Date(2001, 12, 11)]),  # a point: the day first
        ("11.13.2001", [Date(2001, 11, 13)]),  # there is no thirteenth month
        ("13/13/2001", []),
        ("0/12/2001", []),
        ("12/1", [Date(None, 12, 1)]),
        ("13/1", [Date(None, 1, 13)]),
        ("1/31", [Date(None, 1, 31)]),
        ("1/32", []),
        ("1/0", []),
        ("2001-00-03", []),
        ("on the 4th", [Date(day=4)]),
        ("on the 4th floor", []),
        ("of May", [Date(month=5)]),
        ("January 2001", [Date(2001, 1)]),
        ("Jan. of 2001", [Date(2001, 1)]),
        ("December", [Date(month=12)]),
        ("Dec 3", [Date(None, 12, 3)]),
        ("Sunday night", [Date(weekday=6, part="night")]),
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
        ("midday", {720}),
        ("2:15 in the afternoon", {855}),
        ("ten o'clock", {600, 1320}),
        ("at two in the morning", {120}),
        ("at nine at night", {1260}),
        ("twelve o'clock", {720, 0}),
        ("one o'clock", {60, 780}),
        ("7 o'clock in the morning", {420}),
        ("12:59", {779, 59}),
        ("1:00", {60, 780}),
        ("0:59", {59}),
        ("13:00", {780}),
        ("01:00", {60}),
        ("23:59", {1439}),
        ("0030 hours", {30}),
        ("9:05 am", {545}),
        ("11:59 pm", {1439}),
        ("twenty past twelve", {740, 20}),
        ("quarter to one", {45}),
        ("five after three", {185, 905}),
        ("ten to four at night", {950}),
        ("at 3", {180, 900}),
        ("at 12", {720, 0}),
        ("at 8 in the morning", {480}),
        ("9:30 to 11 am", {570, 1290}),
        ("9 to 11 am", {540, 1260}),
        ("midnight", {0}),
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
        (Date(day=3), Date(month=5), False),
        (Date(day=3), Date(day=3, weekday=1), True),
        (Date(month=5), Date(year=2001), False),
        (Date(month=5, weekday=4), Date(weekday=4), False),
        (Date(weekday=4), Date(month=5), False),
        (Date(year=1997), Date(month=2), False),
        (Date(part="night"), Date(weekday=4), False),
        (Date(weekday=4, part="night"), Date(weekday=4, part="morning"), False),
        (Date(weekday=0, day=0), Date(weekday=0, day=1), False),
    ],
)
def test_the_finer_date_gives_the_coarser(wanted: Date, given: Date, agrees: bool) -> None:
    assert wanted.agrees(given) is agrees


def test_times_agree_where_they_can_mean_the_same() -> None:
    half_past_three = Time(frozenset({210, 930}))
    assert half_past_three.agrees(Time(frozenset({930})))
    assert half_past_three.contradicts(Time(frozenset({931})))
    assert not half_past_three.contradicts(Time(frozenset({210})))


@pytest.mark.parametrize("text", ["half past twenty", "any o'clock", "ten to late", "thirteen o'clock"])
def test_words_that_only_look_like_a_time(text: str) -> None:
    found = TIME.search(text)
    assert found is not None and read_time(found) is None


@pytest.mark.parametrize(
    ("one", "other", "agrees"),
    [
        ("3 pm CST", "3 pm EST", False),
        ("3 pm CST", "4 pm EST", True),
        ("3 pm CST", "3 p.m. Central", True),
        ("3 pm CST", "3 pm", True),
        ("3 pm (CST)", "15:00, Central Standard Time", True),
        ("3 pm CDT", "3 pm Central Daylight Time", True),
        ("3 pm CST", "3 pm CDT", False),
        ("3 pm CST", "4 pm CDT", True),
        ("3 pm ET", "3 pm CT", False),
        ("3 pm ET", "2 pm CT", True),
        ("3 pm EST", "3 pm CT", False),  # half a year they are one hour apart, the other half EST is not kept
        ("noon Pacific", "3 pm Eastern time", True),
        ("noon PST", "1 pm MST", True),
        ("10 am EST", "15:00 GMT", True),
        ("10 am EST", "15:00 UTC", True),
        ("10 am EDT", "14:00 UTC", True),
        ("10 am EDT", "14:00 GMT", True),
        ("9:00 JST", "7 pm EST", True),
        ("9:00 JST", "8 pm EDT", True),
        ("9:00 CET", "8:00 BST", False),  # neither is kept in the other's season
        ("10 am EDT", "15:00 BST", True),
        ("14:00 GMT", "14:00 CET", False),
        ("14:00 GMT", "3 pm CET", True),
        ("14:00 BST", "15:00 CEST", True),
        ("11 pm PST", "2 am EST", True),  # the next day
        ("9:00 JST", "00:00 UTC", True),
        ("2:00 EST", "1 am CST", True),
        ("2:00 EST", "2 am CST", False),
    ],
)
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
