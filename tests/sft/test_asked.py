"""A template question taken apart again, by its words alone."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest

from emailrl.questions.template import HARD_KINDS, KINDS
from emailrl.questions.template.usual import MY_MAIL, THEIR_MAIL, possessive
from emailrl.sft.asked import answer_of, read_question

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


ME, BOB, EVE = "ann.lee@example.com", "bob.ross@example.com", "eve@other.example"


def mail(subject: str = "Lease of the barn", sender: str = BOB, **fields: Any) -> dict[str, Any]:
    people = {"to_addresses": [ME], "cc_addresses": [], "bcc_addresses": []}
    first = {"message_id": "<1@x>", "date": "2001-05-03 09:00:00", "subject": subject, "from_address": sender}
    return first | people | {"body": "The rent is $450 a month.", "file_name": ""} | fields


def answer(question: str, read: dict[str, Any]) -> str | None:
    asked = read_question(question)
    assert asked is not None
    return answer_of(asked, read, ME)


@pytest.mark.parametrize(
    ("question", "read", "expected"),
    [
        ('Who wrote to me about "Lease of the barn"?', mail(), "Bob Ross"),
        ('Who wrote to me about "Lease of the barn"?', mail("RE: Lease of the barn", EVE), EVE),
        ('Who wrote to me about "Lease of the barn"?', mail("Lease of the barn and the yard"), None),
        ('Who wrote to me about "Lease of the barn"?', mail(sender=ME), None),
        ('When did Bob Ross write to me about "Lease of the barn"?', mail(), "May 3, 2001"),
        ('When did Bob Ross write to me about "Lease of the barn"?', mail(sender="al.ross@example.com"), None),
        ('When did I send the mail about "Lease of the barn"?', mail(sender=ME), "May 3, 2001"),
        ("What did Bob Ross write to me about on May 3, 2001?", mail("Fw: Lease"), "Lease"),
        ("What did Bob Ross write to me about on May 2, 2001?", mail(), None),
        ("Who sent me a mail on Thursday, May 3, 2001?", mail(sender=EVE), EVE),
        ('Who did I send the mail "Lease of the barn" to?', mail(sender=ME, to_addresses=[BOB]), "Bob Ross"),
        ('Who was copied on my mail about "Lease of the barn"?', mail(sender=ME, cc_addresses=[EVE]), EVE),
        ('Who was copied on my mail about "Lease of the barn"?', mail(sender=ME), None),
        (
            'Who else received Bob Ross\' mail about "Lease of the barn"?',
            mail(to_addresses=[ME, EVE], bcc_addresses=[EVE]),
            EVE,
        ),
        ('Who replied to my mail about "Lease of the barn"?', mail("Re: Lease of the barn"), "Bob Ross"),
        ('Who replied to my mail about "Lease of the barn"?', mail(), None),
        ('Who started the thread "Lease of the barn"?', mail(), "Bob Ross"),
        ('Who started the thread "Lease of the barn"?', mail("Re: Lease of the barn"), None),
        ('Who started the thread "Lease of the barn"?', mail(body="> The rent?\nYes."), None),
        ("What was the first message from Bob Ross after May 2, 2001 about?", mail(), "Lease of the barn"),
        ("What was the first message from Bob Ross after May 3, 2001 about?", mail(), None),
        ("Before May 4, 2001, what was the subject of the latest mail from Bob Ross?", mail(), "Lease of the barn"),
        ("Before May 3, 2001, what was the subject of the latest mail from Bob Ross?", mail(), None),
        ('What dollar amount is mentioned in the mail "Lease of the barn" from Bob Ross?', mail(), "$450 a month"),
        ('What phone number is given in the mail "Lease of the barn" from Bob Ross?', mail(), None),
        ("What did Bob Ross write to me about on May 3, 2001?", mail(date=None), None),
    ],
)  # fmt: skip
def test_what_a_mail_answers(question: str, read: dict[str, Any], expected: str | None) -> None:
    assert answer(question, read) == expected
