"""Header and timeline questions: the exact answer where there is one, none where a second could be right."""

from __future__ import annotations

from random import Random

import pytest
from questions.template.world import ANA, BO, CY, DEE, box, mail

from emailrl.questions.inbox.mail import Mail
from emailrl.questions.inbox.mailbox import Inbox
from emailrl.questions.template.generate import KINDS
from emailrl.questions.template.kinds import Finding, Kind

BY_NAME: dict[str, Kind] = {kind.name: kind for kind in KINDS}


def find(name: str, inbox: Inbox, about: Mail) -> Finding | None:
    return BY_NAME[name].find(inbox, about, Random(1))


def answer(name: str, inbox: Inbox, about: Mail) -> str | None:
    finding = find(name, inbox, about)
    return finding.answer if finding else None


PIER = mail(1, "05-03 09:00", BO, ANA, "RE: Pier survey results", cc=CY)
OTHER = mail(2, "05-04 09:00", CY, ANA, "Budget for autumn")


def test_who_when_and_what_of_one_mail() -> None:
    inbox = box(PIER, OTHER)
    assert answer("sender", inbox, PIER) == "Bo Lind"
    assert answer("date_received", inbox, PIER) == "May 3, 2001"
    assert answer("subject", inbox, PIER) == "Pier survey results"
    assert answer("only_sender_of_day", inbox, PIER) == "Bo Lind"
    assert answer("copied", inbox, PIER) == "Cy Marsh"
    assert answer("copied", inbox, OTHER) is None


def test_a_second_mail_that_the_words_could_mean_leaves_no_question() -> None:
    twin = mail(3, "05-04 10:00", CY, ANA, "Results of the pier survey, part two")
    assert answer("sender", box(PIER, twin), PIER) is None
    assert answer("date_received", box(PIER, twin), PIER) == "May 3, 2001"  # the question names the sender
    same_sender = mail(3, "05-04 10:00", BO, ANA, "Results of the pier survey, part two")
    assert answer("date_received", box(PIER, same_sender), PIER) is None
    assert answer("subject", box(PIER, mail(3, "05-03 22:00", BO, ANA, "Lunch")), PIER) is None
    assert answer("only_sender_of_day", box(PIER, mail(3, "05-03 22:00", CY, ANA, "Lunch")), PIER) is None


@pytest.mark.parametrize(
    ("subject", "is_told"),
    [("Telephone interviews", False), ("Telephone list", True), ("Phone interview notes", False)],
)
def test_a_word_within_a_longer_word_counts_as_the_same(subject: str, is_told: bool) -> None:
    call = mail(1, "05-03 09:00", BO, ANA, "Phone interviews")
    rival = mail(2, "05-02 09:00", CY, ANA, subject)
    assert (answer("sender", box(call, rival), call) is not None) is is_told


def test_a_later_mail_does_not_count_before_it_is_sent() -> None:
    later = mail(3, "12-04 10:00", CY, ANA, "Pier survey results")
    finding = find("sender", box(PIER, later), PIER)
    assert finding is not None and PIER.day < finding.ask_day < later.day


def test_mails_of_one_s_own() -> None:
    sent = mail(4, "05-05 08:00", ANA, BO, "Keys for the boathouse")
    assert answer("sent_to", box(sent), sent) == "Bo Lind"
    assert answer("date_sent", box(sent), sent) == "May 5, 2001"
    assert answer("sender", box(sent), sent) is None
    both = mail(4, "05-05 08:00", ANA, [BO, CY], "Keys for the boathouse")
    assert answer("sent_to", box(both), both) is None


def test_the_one_other_recipient() -> None:
    shared = mail(5, "05-06 08:00", BO, [ANA, DEE], "Rota for the ferry")
    assert answer("other_recipient", box(shared), shared) == "Dee Orr"
    three = mail(5, "05-06 08:00", BO, [ANA, DEE, CY], "Rota for the ferry")
    assert answer("other_recipient", box(three), three) is None


def test_an_address_that_is_no_name_is_told_as_it_is() -> None:
    robot = mail(6, "05-06 08:00", "news@ferry.net", ANA, "Timetable for summer")
    assert answer("sender", box(robot), robot) == "news@ferry.net"
    namesake = mail(7, "05-07 08:00", "bo.lind@home.net", ANA, "Hello again")
    assert answer("sender", box(PIER, namesake), PIER) == BO


def test_one_s_own_other_address_is_no_correspondent() -> None:
    alias = mail(8, "05-06 08:00", "ana.b.roebuck@x.org", ANA, "Timetable for summer")
    assert answer("sender", box(alias), alias) == "Ana Roebuck"  # 'roe' is too short to tell
    long_name = Inbox("ana.roebuck@x.org", [mail(8, "05-06 08:00", "aroebuck@home.net", ANA, "Timetable for summer")])
    assert answer("sender", long_name, long_name.mails[0]) is None


BO_MAILS = [
    mail(11, "05-01 09:00", BO, ANA, "Anchor chain order"),
    mail(12, "05-10 09:00", BO, ANA, "Buoy paint colours"),
    mail(13, "05-20 09:00", BO, ANA, "Crane hire quotes"),
    mail(14, "06-09 09:00", BO, ANA, "Diver certificates due"),
]


def test_one_correspondent_over_time() -> None:
    inbox = box(*BO_MAILS, OTHER)
    last = find("last_before", inbox, BO_MAILS[1])
    assert last is not None and last.answer == "Buoy paint colours"
    first = find("first_after", inbox, BO_MAILS[1])
    assert first is not None and first.answer == "Buoy paint colours"
    assert answer("first_contact", inbox, BO_MAILS[0]) == "May 1, 2001"
    assert answer("first_contact", inbox, BO_MAILS[1]) is None
    count = find("count_in_month", inbox, BO_MAILS[2])
    assert count is not None and count.answer == "3" and count.slots["month"] == "May 2001"
    assert [source.message_id for source in count.sources] == ["<11@x>", "<12@x>", "<13@x>"]
    assert f"{count.ask_day:%m}" == "06"
    assert answer("count_in_month", inbox, BO_MAILS[1]) is None  # asked once, of the month's last mail


@pytest.mark.parametrize("seed", range(20))
def test_the_date_of_a_timeline_question_lies_between_the_two_mails(seed: int) -> None:
    inbox = box(*BO_MAILS)
    last = BY_NAME["last_before"].find(inbox, BO_MAILS[1], Random(seed))
    assert last is not None
    days = [f"May {day}, 2001" for day in range(11, 21)]  # sent on the 10th, the next on the 20th at 09:00
    assert last.slots["date"] in days and last.ask_day.isoformat() >= "2001-05-11"
    first = BY_NAME["first_after"].find(inbox, BO_MAILS[1], Random(seed))
    assert first is not None and first.slots["date"] in [f"May {day}, 2001" for day in range(1, 10)]


def test_a_person_with_a_second_address_is_not_counted() -> None:
    inbox = box(*BO_MAILS, mail(15, "05-21 09:00", "blind@home.net", ANA, "From my other account"))
    for name in ("count_in_month", "last_before", "first_after", "first_contact"):
        assert all(find(name, inbox, about) is None for about in BO_MAILS), name
