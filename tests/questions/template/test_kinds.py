"""Each kind of question: the exact answer where there is one, none where a second could be right."""

from __future__ import annotations

from random import Random

import pytest
from questions.template.world import ANA, BO, CY, DEE, box, mail

from emailrl.questions.inbox import Inbox, Mail, own_text
from emailrl.questions.template import HARD_KINDS, KINDS
from emailrl.questions.template.usual import Finding

BY_NAME = {kind.name: kind for kind in (*KINDS, *HARD_KINDS)}


def find(name: str, inbox: Inbox, about: Mail, seed: int = 1) -> Finding | None:
    return BY_NAME[name].find(inbox, about, Random(seed))


def answer(name: str, inbox: Inbox, about: Mail) -> str | None:
    finding = find(name, inbox, about)
    return finding.answer if finding else None


PIER = mail(1, "05-03 09:00", BO, ANA, "RE: Pier survey results", cc=CY)
BUDGET = mail(2, "05-04 09:00", CY, ANA, "Budget for autumn")
PIER_OF_CY = mail(3, "05-04 10:00", CY, ANA, "Results of the pier survey, part two")
PIER_OF_BO = mail(3, "05-04 10:00", BO, ANA, "Results of the pier survey, part two")
LUNCH_OF_BO = mail(3, "05-03 22:00", BO, ANA, "Lunch")
LUNCH_OF_CY = mail(3, "05-03 22:00", CY, ANA, "Lunch")
KEYS = mail(4, "05-05 08:00", ANA, BO, "Keys for the boathouse")
KEYS_TO_TWO = mail(4, "05-05 08:00", ANA, [BO, CY], "Keys for the boathouse")
ROTA = mail(5, "05-06 08:00", BO, [ANA, DEE], "Rota for the ferry")
ROTA_TO_THREE = mail(5, "05-06 08:00", BO, [ANA, DEE, CY], "Rota for the ferry")
ROBOT = mail(6, "05-06 08:00", "news@ferry.net", ANA, "Timetable for summer")
NAMESAKE = mail(7, "05-07 08:00", "bo.lind@home.net", ANA, "Hello again")
ALIAS = mail(8, "05-06 08:00", "ana.b.roebuck@x.org", ANA, "Timetable for summer")
CALL = mail(1, "05-03 09:00", BO, ANA, "Phone interviews")

LIGHTS = mail(1, "05-03 09:00", ANA, BO, "Harbour lights")
LIGHTS_REPLY = mail(2, "05-04 09:00", BO, ANA, "Re: Harbour lights")
LIGHTS_THANKS = mail(3, "05-05 09:00", ANA, BO, "RE: Harbour lights")
LIGHTS_OF_CY = mail(4, "05-04 10:00", CY, ANA, "Re: Harbour lights")
PERMIT = mail(5, "05-06 09:00", CY, ANA, "Dredging permit")
PERMIT_REPLY = mail(6, "05-07 09:00", ANA, CY, "Re: Dredging permit")
PERMIT_AGAIN = mail(7, "05-07 12:00", ANA, CY, "Re: Dredging permit")
BEGUN = mail(8, "05-06 09:00", CY, [ANA, BO], "Dredging permit")
BEGUN_QUOTING = mail(8, "05-06 09:00", CY, [ANA, BO], "Dredging permit", "See below.\n-----Original Message-----\nHi")
JOINED = mail(9, "05-06 10:00", BO, [ANA, CY], "Re: Dredging permit")
BEGUN_TWICE = mail(10, "05-06 11:00", BO, [ANA, CY], "Dredging permit")

BO_MAILS = [
    mail(11, "05-01 09:00", BO, ANA, "Anchor chain order"),
    mail(12, "05-10 09:00", BO, ANA, "Buoy paint colours"),
    mail(13, "05-20 09:00", BO, ANA, "Crane hire quotes"),
    mail(14, "06-09 09:00", BO, ANA, "Diver certificates due"),
]


@pytest.mark.parametrize(
    ("kind", "mails", "expected"),
    [
        ("sender", [PIER, BUDGET], "Bo Lind"),
        ("date_received", [PIER, BUDGET], "May 3, 2001"),
        ("subject", [PIER, BUDGET], "Pier survey results"),
        ("only_sender_of_day", [PIER, BUDGET], "Bo Lind"),
        ("copied", [PIER, BUDGET], "Cy Marsh"),
        ("copied", [BUDGET, PIER], None),
        ("sender", [PIER, PIER_OF_CY], None),  # whose the words could mean too
        ("date_received", [PIER, PIER_OF_CY], "May 3, 2001"),  # the question names the sender
        ("date_received", [PIER, PIER_OF_BO], None),
        ("subject", [PIER, LUNCH_OF_BO], None),
        ("only_sender_of_day", [PIER, LUNCH_OF_CY], None),
        ("sender", [CALL, mail(2, "05-02 09:00", CY, ANA, "Telephone interviews")], None),  # a word within another
        ("sender", [CALL, mail(2, "05-02 09:00", CY, ANA, "Telephone list")], "Bo Lind"),
        ("sender", [CALL, mail(2, "05-02 09:00", CY, ANA, "Phone interview notes")], None),
        ("sent_to", [KEYS], "Bo Lind"),
        ("sent_to", [KEYS_TO_TWO], None),
        ("date_sent", [KEYS], "May 5, 2001"),
        ("sender", [KEYS], None),
        ("other_recipient", [ROTA], "Dee Orr"),
        ("other_recipient", [ROTA_TO_THREE], None),
        ("sender", [ROBOT], "news@ferry.net"),  # no name
        ("sender", [PIER, NAMESAKE], BO),
        ("sender", [ALIAS], "Ana Roebuck"),  # "roe" is too short to tell that she is Ana
        ("reply_from", [LIGHTS_REPLY, LIGHTS, LIGHTS_THANKS], "Bo Lind"),
        ("reply_date", [LIGHTS_REPLY, LIGHTS, LIGHTS_THANKS], "May 4, 2001"),
        ("reply_from", [LIGHTS, LIGHTS_REPLY, LIGHTS_THANKS], None),
        ("reply_from", [LIGHTS_REPLY], None),  # to nothing of Ana's
        ("reply_from", [LIGHTS_REPLY, LIGHTS, LIGHTS_OF_CY], None),
        ("reply_from", [LIGHTS_OF_CY, LIGHTS], None),  # Cy was not asked
        ("my_reply_date", [PERMIT_REPLY, PERMIT], "May 7, 2001"),
        ("my_reply_date", [PERMIT_REPLY, PERMIT, PERMIT_AGAIN], None),
        ("thread_starter", [BEGUN, JOINED], "Cy Marsh"),
        ("thread_starter", [BEGUN], None),
        ("thread_starter", [JOINED], None),
        ("thread_starter", [BEGUN, JOINED, BEGUN_TWICE], None),
        ("thread_starter", [BEGUN_QUOTING, JOINED], None),
        ("last_before", [BO_MAILS[1], *BO_MAILS, BUDGET], "Buoy paint colours"),
        ("first_after", [BO_MAILS[1], *BO_MAILS, BUDGET], "Buoy paint colours"),
        ("first_contact", [BO_MAILS[0], *BO_MAILS, BUDGET], "May 1, 2001"),
        ("first_contact", [BO_MAILS[1], *BO_MAILS, BUDGET], None),
        ("count_in_month", [BO_MAILS[1], *BO_MAILS], None),  # asked once, of the month's last mail
    ],
)
def test_the_answer_for_the_first_mail(kind: str, mails: list[Mail], expected: str | None) -> None:
    assert answer(kind, box(*dict.fromkeys(mails)), mails[0]) == expected


def test_a_later_mail_does_not_count_before_it_is_sent() -> None:
    later = mail(3, "12-04 10:00", CY, ANA, "Pier survey results")
    finding = find("sender", box(PIER, later), PIER)
    assert finding is not None and PIER.day < finding.ask_day < later.day


def test_one_s_own_other_address_is_no_correspondent() -> None:
    inbox = Inbox("ana.roebuck@x.org", [mail(8, "05-06 08:00", "aroebuck@home.net", ANA, "Timetable for summer")])
    assert answer("sender", inbox, inbox.mails[0]) is None


def test_the_mails_of_a_month_are_counted_by_its_last() -> None:
    count = find("count_in_month", box(*BO_MAILS), BO_MAILS[2])
    assert count is not None and (count.answer, count.slots["month"]) == ("3", "May 2001")
    assert [source.message_id for source in count.sources] == ["<11@x>", "<12@x>", "<13@x>"]
    assert f"{count.ask_day:%m}" == "06"


@pytest.mark.parametrize("seed", range(20))
def test_the_date_of_a_timeline_question_lies_between_the_two_mails(seed: int) -> None:
    inbox = box(*BO_MAILS)
    last, first = find("last_before", inbox, BO_MAILS[1], seed), find("first_after", inbox, BO_MAILS[1], seed)
    assert last is not None and first is not None
    days = [f"May {day}, 2001" for day in range(11, 21)]  # sent on the 10th, the next on the 20th at 09:00
    assert last.slots["date"] in days and last.ask_day.isoformat() >= "2001-05-11"
    assert first.slots["date"] in [f"May {day}, 2001" for day in range(1, 10)]


def test_a_person_with_a_second_address_is_not_counted() -> None:
    inbox = box(*BO_MAILS, mail(15, "05-21 09:00", "blind@home.net", ANA, "From my other account"))
    for name in ("count_in_month", "last_before", "first_after", "first_contact"):
        assert all(find(name, inbox, about) is None for about in BO_MAILS), name


# -- facts in the text ------------------------------------------------------------------------------------------------

QUOTE = "\n-----Original Message-----\n"


@pytest.mark.parametrize(
    "quote",
    [
        "\n-----Original Message-----\nFrom: Bo\n",
        "\n---------------------- Forwarded by Bo Lind/HOU/ECT on 03/11/2000\n",
        "\nBo Lind\n03/10/2000 03:22 PM\nTo: Ana\n",
        "\nOn Fri, 4 May 2001, Bo Lind wrote:\n",
    ],
)
def test_what_a_mail_quotes_is_not_its_own(quote: str) -> None:
    own = own_text(f"See you.{quote}at $5\n")
    assert own.startswith("See you.") and "$5" not in own


REPLY_WITH_FOOTER = mail(2, "05-03 10:00", CY, ANA, "Re: Pier survey results", "> Sent by www.gadget.example")
OTHER_WITH_FOOTER = mail(3, "05-01 10:00", CY, ANA, "Lunch", "No. Sent by www.gadget.example")


@pytest.mark.parametrize(
    ("kind", "body", "others", "expected"),
    [
        ("amount", f"It is $7.{QUOTE}How much?", [], "$7"),
        ("amount", f"Fine.{QUOTE}It is $7.", [], None),
        ("amount", f"It is $7.{QUOTE}Not $8?", [], None),
        ("email_address", f"Bo\n{BO.title()}", [], None),  # the header shows it
        ("percentage", "It is 100% done.", [], None),  # a manner of speaking
        ("percentage", "It is 90% done.", [], "90%"),
        ("url", "Fine. Sent by www.gadget.example", [], "www.gadget.example"),
        ("url", "Fine. Sent by www.gadget.example", [REPLY_WITH_FOOTER], "www.gadget.example"),
        ("url", "Fine. Sent by www.gadget.example", [OTHER_WITH_FOOTER], None),  # what programs add
    ],
)
def test_the_fact_that_a_mail_states(kind: str, body: str, others: list[Mail], expected: str | None) -> None:
    about = mail(1, "05-03 09:00", BO, ANA, "Pier survey results", body)
    assert answer(kind, box(about, *others), about) == expected


@pytest.mark.parametrize("seed", range(8))
def test_a_mail_from_a_namesake_of_the_owner_is_not_called_the_owner_s(seed: int) -> None:
    about = mail(1, "05-03 09:00", "jlokay@home.example", "mia.lokay@x.org", "Pier survey results", "It is $7.")
    inbox = Inbox("mia.lokay@x.org", [about])
    assert not inbox.received(about), "taken for the owner's other address"
    finding = find("amount", inbox, about, seed)
    assert finding is not None and "jlokay@home.example" in finding.slots["mail"]


# -- several mails, counts, whole threads, and what no mail says ------------------------------------------------------

FIRST = mail(1, "05-03 09:00", BO, ANA, "Harbour lights")
SECOND = mail(2, "05-03 12:00", BO, ANA, "Dredging permit")
THIRD = mail(3, "05-03 15:00", BO, ANA, "Quay repairs")
MINE = mail(3, "05-03 13:00", ANA, BO, "Quay repairs")
TO_MYSELF = mail(3, "05-03 13:00", ANA, [ANA, BO], "Quay repairs")
ASKED = mail(1, "05-03 23:00", ANA, BO, "Harbour lights")
ASKED_AGAIN = mail(3, "05-05 09:00", ANA, BO, "Re: Harbour lights")
REPLY = mail(2, "05-07 01:00", BO, ANA, "Re: Harbour lights")
REPLY_OF_THE_DAY = mail(2, "05-03 23:30", BO, ANA, "Re: Harbour lights")
THREAD = [
    mail(1, "05-03 09:00", BO, [ANA, CY], "Harbour lights"),
    mail(2, "05-04 09:00", ANA, [BO, CY], "Re: Harbour lights"),
    mail(3, "05-05 09:00", CY, [ANA, BO], "Re: Harbour lights"),
]
NORTH = mail(4, "05-05 10:00", CY, ANA, "Harbour lights of the north")


@pytest.mark.parametrize(
    ("kind", "mails", "expected"),
    [
        ("both_subjects", [SECOND, FIRST], ("Harbour lights and Dredging permit", "12")),
        ("both_subjects", [THIRD, FIRST, SECOND], None),
        ("both_subjects", [mail(2, "05-03 12:00", BO, ANA, "Re: Harbour lights"), FIRST], None),
        ("reply_gap", [REPLY, ASKED], ("4", "12")),
        ("reply_gap", [REPLY, ASKED, ASKED_AGAIN], None),
        ("reply_gap", [REPLY_OF_THE_DAY, ASKED], None),
        ("count_on_day", [SECOND, FIRST, MINE], ("2", "12")),
        ("count_on_day", [FIRST, MINE], None),  # one is no count
        ("count_on_day", [SECOND, FIRST, TO_MYSELF], None),
        ("thread_count", [THREAD[2], *THREAD], ("3", "123")),
        ("thread_count", [THREAD[2], *THREAD, NORTH], None),  # its subject has the words too
        ("last_in_thread", [THREAD[2], *THREAD], ("Cy Marsh", "")),
        ("last_in_thread", [THREAD[1], *THREAD[:2]], None),
    ],
)
def test_hard_questions_on_the_first_mail(kind: str, mails: list[Mail], expected: tuple[str, str] | None) -> None:
    finding = find(kind, box(*dict.fromkeys(mails)), mails[0])
    told = finding and (finding.answer, "".join(source.message_id.strip("<@x>") for source in finding.sources))
    assert told == expected


MANY = [mail(number, f"04-{1 + number % 28:02} 09:00", CY, ANA, f"Report {number} on tides") for number in range(1, 35)]
LATE = mail(40, "05-20 09:00", BO, ANA, "Harbour lights")


def test_a_topic_is_asked_for_before_it_came() -> None:
    finding = find("absent_topic", box(*MANY, LATE), LATE)
    assert finding is not None and finding.answer == "I don't know" and finding.ask_day <= LATE.day
    assert "Harbour lights" in finding.slots["question"]
    spoken_of = mail(39, "05-02 09:00", CY, ANA, "Tonight", "Look at the harbour lights!")
    answered = mail(39, "05-02 09:00", CY, ANA, "Re: Harbour lights")
    for others in ([*MANY, spoken_of], [*MANY, answered], [FIRST]):  # the last is hardly a mailbox
        assert find("absent_topic", box(*others, LATE), LATE) is None


@pytest.mark.parametrize("seed", range(20))
def test_a_day_without_a_mail_from_the_person(seed: int) -> None:
    sent = [mail(day, f"05-{day:02} 09:00", BO, ANA, "Harbour lights") for day in (1, 2, 9)]
    finding = find("absent_day", box(*sent), sent[1], seed)
    assert finding is not None and any(f"May {day}, 2001" in finding.slots["question"] for day in range(4, 8))
    assert find("absent_day", box(*sent), sent[0], seed) is None  # the next is a day later
    assert find("absent_day", box(*sent), sent[2], seed) is None


@pytest.mark.parametrize("seed", range(12))
def test_a_fact_that_the_mail_does_not_state(seed: int) -> None:
    silent = mail(1, "05-03 09:00", BO, ANA, "Harbour lights", "They are out again.")
    finding = find("absent_fact", box(silent), silent, seed)
    assert finding is not None and finding.answer == "I don't know"
    full = mail(1, "05-03 09:00", BO, ANA, "Harbour lights", "Call 713-555-0100 at 9:00 am about the $40, or 5 %.")
    assert find("absent_fact", box(full), full, seed) is None


def test_kinds_are_well_formed_and_say_what_they_need() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS) >= 12
    for kind in KINDS:
        assert len(set(kind.wordings)) == len(kind.wordings) >= 3, kind.name
        assert all(wording.endswith("?") for wording in kind.wordings), kind.name
    needs_all = {kind.name for kind in HARD_KINDS if kind.needs_all}
    assert needs_all == {"both_subjects", "reply_gap", "count_in_month", "count_on_day", "thread_count"}
    assert {kind.name for kind in HARD_KINDS if not kind.answerable} == {"absent_topic", "absent_day", "absent_fact"}
